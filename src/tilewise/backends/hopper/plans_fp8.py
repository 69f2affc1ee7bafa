"""The fp8 forward of one problem with given strides: as ``plans.ForwardPlan``, with descales and out in bf16."""

from __future__ import annotations

import torch

from tilewise.backends.hopper import plans, tiles
from tilewise.backends.hopper.arguments import Descale, Fp8Pointers
from tilewise.backends.hopper.forward_fp8 import forward_fp8_kernel
from tilewise.backends.hopper.forward_fp8_turned import forward_fp8_turned_kernel
from tilewise.backends.hopper.launch import Launch, current_stream, multiprocessors, ticket
from tilewise.backends.hopper.maps import dense_map, packed_map
from tilewise.backends.hopper.turn_ahead import CHANNELS, turn_kernel
from tilewise.descale import BLOCK
from tilewise.dispatch.backend import State
from tilewise.inputs import Inputs
from tilewise.problem import Problem

OUT = torch.bfloat16


def _descales_of(inputs: Inputs) -> tuple[torch.Tensor | None, ...]:
    return inputs.q_descale, inputs.k_descale, inputs.v_descale


def _descale(tensor: torch.Tensor | None, block: int) -> Descale | None:
    """A descale, one by block from ``block`` on."""
    if tensor is None:
        return None
    skip = block * tensor.stride(2) * tensor.element_size() if tensor.ndim == 3 else 0
    return Descale(tensor.data_ptr() + skip, *tensor.stride())


class TurnedValues:
    """v with contiguous keys, in the order of ``turn.py``, once for all tiles of queries: dense problems only."""

    def __init__(self, v: torch.Tensor, channels: int) -> None:
        batch, keys, heads, _ = v.shape
        blocks, parts = -(-keys // BLOCK), channels // CHANNELS
        self.shape = (batch, heads, channels, blocks * BLOCK)
        like = plans.meta_tensor(self.shape, v.dtype).transpose(1, 2)
        self.map = dense_map(like, channels, BLOCK)
        self.sizes = (heads, blocks)
        maps = (dense_map(v, BLOCK, CHANNELS), dense_map(like, CHANNELS, BLOCK))
        self.launch = Launch(turn_kernel, batch * heads * blocks * parts, (*maps, *self.sizes, parts, 1), 1)

    def make(self, stream: int, v: torch.Tensor, address: int) -> torch.Tensor:
        """A new one of what lies at ``address``, on ``stream``."""
        turned = v.new_empty(self.shape)
        self.launch(stream, address, turned.data_ptr(), *self.sizes)
        return turned


class Fp8ForwardPlan:
    """Everything of a call but the addresses."""

    def __init__(self, problem: Problem, inputs: Inputs) -> None:
        self.loadable = plans.loadable(inputs.q, inputs.k, inputs.v)
        if not self.loadable:
            return
        varlen, tile = problem.varlen, tiles.fp8_tile(problem)
        self.scalars = tiles.scalars_of(problem)
        rows = (problem.total_q,) if varlen else (problem.batch, problem.seqlen_q)
        self.out_shape = (*rows, problem.nheads, problem.headdim_v)
        self.lse_shape = (*rows[:-1], problem.nheads, rows[-1])
        k, v = inputs.k, inputs.v
        self.skip: tuple[int, ...] = (0, 0)
        self.first_block, self.unseen = 0, None
        if not varlen:
            seen = tiles.seen_keys(problem)
            first = seen.begin + seen.unseen
            self.skip = tuple(first * t.stride(1) for t in (k, v))
            k, v = (t[:, first : seen.end] for t in (k, v))
            self.first_block, self.unseen = seen.begin // BLOCK, seen.unseen or None
        make = packed_map if varlen else dense_map
        self.turned = None if tile.turners else TurnedValues(v, tile.block_dv)
        maps = (
            make(inputs.q, 64, tile.block_d),
            make(k, tile.block_n, tile.block_d),
            self.turned.map if self.turned else make(v, tile.block_n, tile.block_dv),
        )
        self.schedule = None
        like, fp32, int32 = plans.stand_in(OUT), plans.stand_in(torch.float32), plans.stand_in(torch.int32)
        if varlen:
            self.schedule = plans.Schedule(problem, OUT, tile.block_m, backward=False)
        self.sizes = plans.forward_sizes(problem, tile, self.schedule.slots if self.schedule else 0)
        scaled = (None if t is None else Descale(fp32, 0, 0) for t in _descales_of(inputs))
        extras = (fp32 if problem.alibi else None, fp32 if problem.sink else None)
        packed = (int32 if varlen else None for _ in range(3))
        pointers = Fp8Pointers._make((int32, fp32, like, *scaled, self.unseen, *extras, *packed))
        grid = min(multiprocessors(inputs.q.get_device()), self.sizes.tiles)
        arguments = (*maps, pointers, self.sizes, self.scalars, tiles.mode_of(problem), tile, 4)
        self.launch = Launch(forward_fp8_turned_kernel if self.turned else forward_fp8_kernel, grid, arguments)

    def run(self, inputs: Inputs) -> State:
        """(out, lse) on the current stream."""
        q = inputs.q
        index = q.get_device()
        stream = current_stream(index)
        out = q.new_empty(self.out_shape, dtype=OUT)
        lse = q.new_empty(self.lse_shape, dtype=torch.float32)
        packed: tuple[torch.Tensor | None, ...] = (None, None, None)
        if self.schedule is not None:
            cu_q, cu_k = plans.offsets_of(inputs)
            packed = (cu_q, cu_k, self.schedule.make(stream, cu_q, out.data_ptr(), lse=lse.data_ptr()))
        slopes, sink = plans.contiguous_or_none(inputs.alibi_slopes), plans.contiguous_or_none(inputs.sink)
        skip_k, skip_v = self.skip
        scaled = map(_descale, _descales_of(inputs), (0, self.first_block, self.first_block))
        extras = map(plans.address_of, (slopes, sink, *packed))
        v_at = inputs.v.data_ptr() + skip_v
        if self.turned:
            turned = self.turned.make(stream, inputs.v, v_at)
            v_at = turned.data_ptr()
        self.launch(
            stream,
            q.data_ptr(),
            inputs.k.data_ptr() + skip_k,
            v_at,
            (ticket(stream, index), lse.data_ptr(), out.data_ptr(), *scaled, self.unseen, *extras),
            self.sizes,
            self.scalars,
        )
        return out, lse
