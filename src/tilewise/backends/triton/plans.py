"""The launches of a call, built once for everything but its addresses: block lists, cleared tails, the forward."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tilewise import masks
from tilewise.backends.triton import facts as host
from tilewise.backends.triton import tiles
from tilewise.backends.triton.arguments import Config, Extras, Mode, PairStride, Tile
from tilewise.backends.triton.blocks import block_lists_kernel, block_states_kernel
from tilewise.backends.triton.forward import forward_kernel
from tilewise.backends.triton.launch import Launch
from tilewise.backends.triton.tails import clear_tail_kernel
from tilewise.device import device_facts
from tilewise.dispatch.backend import State
from tilewise.inputs import Inputs
from tilewise.problem import Problem

TAIL_PROGRAMS = 64
LIST_CHUNK = 1024
GRID_LIMIT = 2**16 - 1  # of CUDA, for all dimensions of a grid but the first
NO_EXTRAS = Extras()


class Strides(NamedTuple):
    """Strides of the tensors that every problem has; a kernel reads those it needs."""

    q: Any
    k: Any
    v: Any
    out: Any
    dout: Any = None
    dq: Any = None
    dk: Any = None
    dv: Any = None


def blocks(length: int, block: int) -> int:
    """How many blocks cover a length."""
    return -(-length // block)


def programs(problem: Problem, block: int, queries: bool) -> int:
    """Blocks that cover the sequences of one head: exact, or for packed ones the slots of places.py."""
    length, total = (problem.seqlen_q, problem.total_q) if queries else (problem.seqlen_k, problem.total_k)
    return total // block + problem.batch if problem.varlen else blocks(length, block) * problem.batch


def types_of(inputs: Inputs, lists: bool) -> Extras:
    """The optional tensors' dtypes in their places, which is what a kernel is compiled for."""
    extras = host.extras_of(inputs, torch.empty(0, dtype=torch.int32, device="meta") if lists else None)
    return Extras(*(None if tensor is None else tensor.dtype for tensor in extras))


class ListPlan:
    """Block lists of a problem with a boolean mask or segments, for one tile and owner ("queries" or "keys")."""

    def __init__(self, problem: Problem, inputs: Inputs, marks: host.Marks, tile: Tile, owner: str) -> None:
        shape = problem.mask_shape or (1, 1, 1, 1)
        batch = problem.batch if problem.segments else host.four(shape)[0]
        heads = host.four(shape)[1]
        num_m, num_n = blocks(problem.seqlen_q, tile.block_m), blocks(problem.seqlen_k, tile.block_n)
        owners, others = (num_m, num_n) if owner == "queries" else (num_n, num_m)
        by_owner, by_other = (num_n, 1) if owner == "queries" else (1, num_n)
        row = others + 2
        self.num_states = batch * heads * num_m * num_n
        self.num_entries = batch * heads * owners * row
        self.stride = PairStride(
            batch=0 if batch == 1 else heads * owners * row, head=0 if heads == 1 else owners * row, row=row, col=1
        )
        device = inputs.q.device
        strides = host.extra_strides_of(inputs, marks, self.stride)
        mode = host.mode_of(problem, marks)
        tail = (strides, host.sizes_of(problem, inputs), heads, num_m, num_n, mode, tile)
        states = (torch.int8, types_of(inputs, lists=False))
        self.states = Launch(block_states_kernel, self.num_states, states, tail, Config(4), device)
        lists_tail = (others, by_owner, by_other, owners, LIST_CHUNK)
        types = (torch.int32, torch.int8)
        self.lists = Launch(block_lists_kernel, batch * heads * owners, types, lists_tail, Config(4), device)

    def run(self, inputs: Inputs) -> torch.Tensor:
        """The lists, int32."""
        states = torch.empty(self.num_states, dtype=torch.int8, device=inputs.q.device)
        lists = torch.empty(self.num_entries, dtype=torch.int32, device=inputs.q.device)
        self.states((states, host.extras_of(inputs)))
        self.lists((lists, states))
        return lists


def clear_rows(shape: tuple[int, ...], dtype: torch.dtype, offsets: torch.Tensor) -> Launch:
    """Zeros for the tokens after the last offset of a packed contiguous (total, heads, channels) tensor."""
    width = shape[1] * shape[2]
    tail = (len(offsets) - 1, shape[0], width, 1, width, 0.0, 16, 128)
    return Launch(clear_tail_kernel, TAIL_PROGRAMS, (dtype, offsets.dtype), tail, Config(4), offsets.device)


def clear_lse(nheads: int, total: int, offsets: torch.Tensor) -> Launch:
    """-inf for the tokens after the last offset of a packed (nheads, total) lse."""
    tail = (len(offsets) - 1, total, 1, total, nheads, float("-inf"), 16, 128)
    return Launch(clear_tail_kernel, TAIL_PROGRAMS, (torch.float32, offsets.dtype), tail, Config(4), offsets.device)


def cuts_off_keys(mode: Mode) -> bool:
    """Whether the copy engine cuts off keys that a band leaves out, and tiles are counted from the first that is seen.

    A bias and dropout have to be read by fours and eights of keys from the sequence's first on.
    """
    left_out = mode.unseen or (mode.varlen and mode.lower)
    return left_out and not (mode.lists or mode.bias or mode.dropout)


def seen_keys(problem: Problem, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Dense tensors of keys up to the last that any query sees."""
    _, end = masks.key_range(masks.band(problem), 0, problem.seqlen_q, problem.seqlen_k)
    return tuple(host.until(tensor, end) for tensor in tensors)


def forward_grid(problem: Problem, tile: Tile, together: int) -> tuple[tuple[int, int, int], bool]:
    """The grid of a forward, and whether it is the cube of places.place: wanted, and no side too long for CUDA."""
    units = problem.nheads * tile.num_dv
    num_blocks = programs(problem, tile.block_m, queries=True)
    if tile.cube and units and problem.batch:
        rounds = blocks(units * problem.batch, together)
        cube = (blocks(units * problem.batch, rounds), num_blocks // problem.batch, rounds)
        if max(cube[1:]) <= GRID_LIMIT:
            return cube, True
    return (num_blocks * units, 1, 1), False


class ForwardPlan:
    """The launches of one forward."""

    def __init__(self, problem: Problem, inputs: Inputs, tensors: tuple[torch.Tensor, ...]) -> None:
        marks = host.marks_of(problem, inputs, tensors)
        mode = host.mode_of(problem, marks)
        tile, config = tiles.choose_shape(
            "forward", problem, device_facts(inputs.q.device), marks.align, mode.unseen, marks.bias
        )
        boxed = tile.boxes and host.fits_boxes(tensors)
        tile = tile._replace(boxes=boxed, clipped=boxed and cuts_off_keys(mode))
        boxes: tuple[Any, ...] = (None,) * 3
        if tile.boxes:
            q, k, v = tensors
            if tile.clipped:
                k, v = seen_keys(problem, k, v)
            boxes = (
                host.box_of(q, tile.block_m, tile.block_d, clipped=False),  # rows past the end reach no result
                host.box_of(k, tile.block_n, tile.block_d),
                host.box_of(v, tile.block_n, tile.block_dv),
            )
        sizes = host.forward_sizes(problem, inputs, mode)
        grid, cube = forward_grid(problem, tile, sizes.together)
        tile = tile._replace(cube=cube)
        self.lists = ListPlan(problem, inputs, marks, tile, "queries") if mode.lists else None
        q = inputs.q
        self.index = q.device.index
        self.shape = shape = (*q.shape[:-1], problem.headdim_v)
        self.out_is_like_q = q.is_contiguous() and q.shape == shape
        self.rows = (problem.nheads, shape[0]) if problem.varlen else (shape[0], problem.nheads, shape[1])
        q_stride, k_stride, v_stride = (host.stride_of(tensor, marks.align) for tensor in tensors)
        tail = (
            Strides(q_stride, k_stride, v_stride, host.contiguous_stride(shape, marks.align)),
            host.extra_strides_of(inputs, marks, self.lists.stride if self.lists else host.NO_PAIRS),
            sizes,
            host.scalars_of(problem),
            mode,
            tile,
        )
        extras = types_of(inputs, mode.lists)
        pointers = (*[problem.dtype] * 4, torch.float32, *boxes, extras)
        self.has_extras = extras != NO_EXTRAS
        self.main = Launch(forward_kernel, grid, pointers, tail, config, inputs.q.device)
        self.tails: tuple[Launch, ...] = ()
        if inputs.cu_seqlens_q is not None:
            rows = clear_rows(shape, problem.dtype, inputs.cu_seqlens_q)
            self.tails = (rows, clear_lse(problem.nheads, problem.total_q, inputs.cu_seqlens_q))

    def run(self, inputs: Inputs) -> State:
        """(out, lse)."""
        extras = NO_EXTRAS
        if self.has_extras:
            extras = host.extras_of(inputs, self.lists.run(inputs) if self.lists else None)
        q, k, v = inputs.q, inputs.k, inputs.v
        out = torch.empty_like(q) if self.out_is_like_q else q.new_empty(self.shape)  # the first costs less
        lse = q.new_empty(self.rows, dtype=torch.float32)
        self.main((q, k, v, out, lse, q, k, v, extras))
        for launch, tensor in zip(self.tails, (out, lse), strict=False):
            launch((tensor, extras.cu_seqlens_q))
        return out, lse
