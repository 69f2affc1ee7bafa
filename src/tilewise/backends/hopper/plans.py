"""A forward call without its addresses: maps, tiles, grid and compiled kernels, made once per problem and strides."""

from __future__ import annotations

import torch

from tilewise.backends.hopper import tiles
from tilewise.backends.hopper.arguments import (
    OPEN,
    ForwardTile,
    Fp8Tile,
    Pointers,
    Sizes,
)
from tilewise.backends.hopper.combine import combine_kernel
from tilewise.backends.hopper.forward import forward_kernel
from tilewise.backends.hopper.launch import Launch, current_stream, multiprocessors, ticket
from tilewise.backends.hopper.maps import dense_map, packed_map
from tilewise.backends.hopper.plans_segments import NO_SEGMENTS, Segments
from tilewise.backends.hopper.schedule import schedule_kernel
from tilewise.dispatch.backend import State
from tilewise.inputs import Inputs
from tilewise.problem import Problem

MERGED_ROWS = 4  # rows that one program merges
CLEARED_ROWS = 32  # tokens that one program clears
CHUNK = 1024  # sequences that one step of a scan over offsets takes
NO_EXTRAS: tuple[int | None, ...] = (None,) * 9  # of ``Pointers``: slopes, sink, the packed form's and segments'


def stand_in(dtype: torch.dtype, wanted: bool = True) -> torch.Tensor | None:
    """Stands for a pointer of this type when a kernel is compiled."""
    return torch.empty(0, dtype=dtype, device="meta") if wanted else None


def meta_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A shape to make a map of."""
    return torch.empty(shape, dtype=dtype, device="meta")


def contiguous_or_none(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """A contiguous copy where one is needed."""
    return None if tensor is None else tensor.contiguous()


def address_of(tensor: torch.Tensor | None) -> int | None:
    """What a kernel takes for a tensor that may be absent."""
    return None if tensor is None else tensor.data_ptr()


def loadable(*tensors: torch.Tensor) -> bool:
    """Whether the copy engine can walk their strides: multiples of 16 bytes, none 0, contiguous channels."""
    for tensor in tensors:
        size = tensor.element_size()
        for stride, length in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True):
            if length > 1 and (stride * size % 16 or stride <= 0):
                return False
        if tensor.stride(-1) != 1 and tensor.shape[-1] != 1:
            return False
    return True


def packed_bounds(problem: Problem) -> tuple[int, int]:
    """The band of the packed form, counted from length_k - length_q of each sequence."""
    left = OPEN if problem.window_left is None else min(problem.window_left, OPEN)
    right = OPEN if problem.window_right is None else min(problem.window_right, OPEN)
    return -left, min(right, 0) if problem.causal == "bottom_right" else right


class Schedule:
    """The launch before a packed pass: the tile table of its queries or keys, and zeros beyond the last of them."""

    def __init__(self, problem: Problem, dtype: torch.dtype, block: int, backward: bool) -> None:
        """Blocks of queries, the last of a sequence first; in the ``backward`` of keys, the first first."""
        total, longest = (problem.total_k, problem.seqlen_k) if backward else (problem.total_q, problem.seqlen_q)
        self.slots = max(1, min(total // block + problem.batch, problem.batch * -(-longest // block)))
        nheads = problem.nheads_k if backward else problem.nheads
        widths = (nheads * problem.headdim if backward else 0, nheads * problem.headdim_v)
        self.tail = (problem.batch, total, nheads, *widths)
        like, written = stand_in(torch.int32), (stand_in(dtype, backward), stand_in(dtype))
        pointers = (like, like, *written, stand_in(torch.float32, not backward))
        arguments = (*pointers, *self.tail, block, not backward, CHUNK, CLEARED_ROWS, 128, backward)
        self.listing = Launch(schedule_kernel, problem.batch, arguments)
        self.clearing = Launch(schedule_kernel, problem.batch - (-total // CLEARED_ROWS), arguments)

    def make(
        self,
        stream: int,
        cu_seqlens: torch.Tensor,
        values: int,
        keys: int | None = None,
        lse: int | None = None,
        clears: bool = True,
    ) -> torch.Tensor:
        """Fill a new table on ``stream``, and if it ``clears``, zeros and empty rows beyond the last offset.

        Addresses of what is written: ``values`` out and lse, in the backward dv and ``keys`` dk.
        """
        table = torch.empty(2 + 2 * self.slots, dtype=torch.int32, device=cu_seqlens.device)
        launch = self.clearing if clears else self.listing
        launch(stream, cu_seqlens.data_ptr(), table.data_ptr(), keys, values, lse, *self.tail)
        return table


def offsets_of(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Both cu_seqlens as the kernels read them."""
    if inputs.cu_seqlens_q is None or inputs.cu_seqlens_k is None:
        raise RuntimeError("the packed form needs both cu_seqlens")
    queries = inputs.cu_seqlens_q.to(torch.int32).contiguous()
    if inputs.cu_seqlens_k.is_set_to(inputs.cu_seqlens_q):
        return queries, queries
    return queries, inputs.cu_seqlens_k.to(torch.int32).contiguous()


def forward_sizes(problem: Problem, tile: ForwardTile | Fp8Tile, slots: int, splits: int = 1) -> Sizes:
    """Lengths and counts of a forward call."""
    common = (problem.batch, problem.nheads, problem.group)
    if problem.varlen:
        bounds = packed_bounds(problem)
        return Sizes(*common, 0, 0, *bounds, 0, slots, 1, slots * problem.nheads, problem.total_q)
    seen = tiles.seen_keys(problem)
    blocks = -(-problem.seqlen_q // tile.block_m)
    band = (problem.seqlen_q, seen.end - seen.begin, seen.lower, seen.upper, seen.shift)
    flight = tiles.heads_in_flight(problem)
    split_keys = -(-(seen.end - seen.begin) // (splits * tile.block_n)) * tile.block_n
    count = blocks * problem.batch * problem.nheads * splits
    return Sizes(*common, *band, blocks, flight, count, problem.seqlen_q, splits, split_keys)


class Merge:
    """States over ranges of the keys, and the launch that merges them."""

    def __init__(self, problem: Problem, block_dv: int, splits: int) -> None:
        self.rows = problem.batch * problem.nheads * problem.seqlen_q
        self.floats = splits * self.rows * block_dv, splits * self.rows
        self.tail = (splits, self.rows, problem.seqlen_q, problem.nheads, problem.headdim_v)
        fp32 = stand_in(torch.float32)
        arguments = (fp32, fp32, stand_in(problem.dtype), fp32, *self.tail, MERGED_ROWS, block_dv)
        self.launch = Launch(combine_kernel, -(-self.rows // MERGED_ROWS), arguments)

    def states(self, like: torch.Tensor) -> tuple[torch.Tensor, int, int]:
        """Memory for the states, and the addresses of outs and lses in it."""
        outs, lses = self.floats
        scratch = like.new_empty(outs + lses, dtype=torch.float32)
        return scratch, scratch.data_ptr(), scratch.data_ptr() + 4 * outs


class ForwardPlan:
    """The forward of one problem with given strides."""

    def __init__(self, problem: Problem, inputs: Inputs) -> None:
        self.loadable = loadable(inputs.q, inputs.k, inputs.v)
        if not self.loadable:
            return
        varlen, tile = problem.varlen, tiles.forward_tile(problem)
        processors = multiprocessors(inputs.q.get_device())
        splits = tiles.key_splits(problem, tile, processors)
        mode = tiles.mode_of(problem)._replace(split=splits > 1)
        self.merge = Merge(problem, tile.box_dv, splits) if splits > 1 else None
        self.scalars = tiles.scalars_of(problem)
        rows = (problem.total_q,) if varlen else (problem.batch, problem.seqlen_q)
        self.out_shape = (*rows, problem.nheads, problem.headdim_v)
        self.lse_shape = (*rows[:-1], problem.nheads, rows[-1])
        k, v = inputs.k, inputs.v
        self.skip: tuple[int, ...] = (0, 0)
        if not varlen:
            seen = tiles.seen_keys(problem)
            self.skip = tuple(seen.begin * t.stride(1) * t.element_size() for t in (k, v))
            k, v = (t[:, seen.begin : seen.end] for t in (k, v))
        make = packed_map if varlen else dense_map
        maps = (
            make(inputs.q, 64, tile.part_d),
            make(k, tile.block_n, tile.part_d),
            make(v, tile.block_n, tile.box_dv),
            make(meta_tensor(self.out_shape, problem.dtype), 64, tile.box_dv // tile.out_parts),
        )
        self.schedule = None
        self.extras = varlen or problem.alibi or problem.sink or problem.segments
        self.segments = Segments(problem, inputs, tile.block_m, tile.block_n, False) if problem.segments else None
        if varlen:
            self.schedule = Schedule(problem, problem.dtype, tile.block_m, backward=False)
        self.sizes = forward_sizes(problem, tile, self.schedule.slots if self.schedule else 0, splits)
        pointers = Pointers(
            stand_in(torch.int32),
            stand_in(torch.float32),
            stand_in(torch.float32, mode.split),
            stand_in(torch.float32, problem.alibi),
            stand_in(torch.float32, problem.sink),
            *(stand_in(torch.int32, varlen) for _ in range(3)),
            *(stand_in(torch.int32, problem.segments) for _ in range(4)),
        )
        grid = min(processors, self.sizes.tiles)
        self.launch = Launch(forward_kernel, grid, (*maps, pointers, self.sizes, self.scalars, mode, tile, 4))

    def _extras(self, stream: int, inputs: Inputs, out: torch.Tensor, lse_at: int) -> tuple[torch.Tensor | None, ...]:
        """What a call may have beside q, k and v, in the order of ``Pointers``, with the packed form's table made."""
        packed: tuple[torch.Tensor | None, ...] = (None, None, None)
        if self.schedule is not None:
            cu_q, cu_k = offsets_of(inputs)
            packed = (cu_q, cu_k, self.schedule.make(stream, cu_q, out.data_ptr(), lse=lse_at))
        segments = NO_SEGMENTS if self.segments is None else self.segments.make(stream, inputs)
        return contiguous_or_none(inputs.alibi_slopes), contiguous_or_none(inputs.sink), *packed, *segments

    def run(self, inputs: Inputs) -> State:
        """(out, lse) on the current stream."""
        q = inputs.q
        index = q.get_device()
        stream = current_stream(index)
        out = q.new_empty(self.out_shape)
        lse = q.new_empty(self.lse_shape, dtype=torch.float32)
        lse_at, outs_at, extras = lse.data_ptr(), None, NO_EXTRAS
        if self.extras:
            tensors = self._extras(stream, inputs, out, lse_at)  # alive until the launch
            extras = tuple(map(address_of, tensors))
        if self.merge is not None:
            _states, outs_at, lse_at = self.merge.states(q)
        skip_k, skip_v = self.skip
        self.launch(
            stream,
            q.data_ptr(),
            inputs.k.data_ptr() + skip_k,
            inputs.v.data_ptr() + skip_v,
            out.data_ptr(),
            (ticket(stream, index), lse_at, outs_at, *extras),
            self.sizes,
            self.scalars,
        )
        if self.merge is not None:
            self.merge.launch(stream, outs_at, lse_at, out.data_ptr(), lse.data_ptr(), *self.merge.tail)
        return out, lse
