"""A backward call without its addresses: maps, tiles, grids and compiled kernels, made once per problem and strides."""

from __future__ import annotations

from typing import Any

import torch

from tilewise.backends.hopper import tiles
from tilewise.backends.hopper.arguments import BackwardPointers, BackwardSizes, BackwardTile, Mode, Scalars
from tilewise.backends.hopper.backward import backward_kernel
from tilewise.backends.hopper.backward_slopes import slopes_kernel
from tilewise.backends.hopper.backward_wide import backward_wide_kernel
from tilewise.backends.hopper.launch import Launch, current_stream, multiprocessors, ticket
from tilewise.backends.hopper.maps import Box, Map, dense_map, packed_map
from tilewise.backends.hopper.plans import (
    CHUNK,
    Schedule,
    address_of,
    contiguous_or_none,
    loadable,
    meta_tensor,
    offsets_of,
    packed_bounds,
    stand_in,
)
from tilewise.backends.hopper.plans_segments import NO_SEGMENTS, Segments
from tilewise.backends.hopper.preprocess import after_kernel, before_kernel, sink_kernel
from tilewise.dispatch.backend import Gradients
from tilewise.inputs import Inputs
from tilewise.problem import Problem

SEARCH = 128  # sequences that every program around the main kernel looks through at once: one for each thread


def backward_sizes(problem: Problem, tile: BackwardTile, slots: int, multiprocessors: int) -> BackwardSizes:
    """Lengths and counts of a backward call."""
    common = (problem.batch, problem.nheads, problem.group)
    if problem.varlen:
        blocks = -(-problem.seqlen_k // tile.block_n)
        flight = tiles.key_heads_in_flight(problem, problem.nheads_k, blocks, multiprocessors)
        bounds = packed_bounds(problem)
        row_blocks = problem.total_q // tile.block_m + problem.batch
        return BackwardSizes(*common, 0, 0, *bounds, 0, slots, flight, slots * problem.nheads_k, row_blocks)
    seen = tiles.seen_keys(problem)
    heads, blocks = problem.batch * problem.nheads_k, -(-(seen.end - seen.begin) // tile.block_n)
    band = (problem.seqlen_q, seen.end - seen.begin, seen.lower, seen.upper, seen.shift)
    flight = tiles.key_heads_in_flight(problem, heads, blocks, multiprocessors)
    row_blocks = -(-problem.seqlen_q // tile.block_m)
    return BackwardSizes(*common, *band, blocks, flight, blocks * heads, row_blocks)


class BackwardPlan:
    """The backward of one problem with given strides: three launches, and others for what it has beside q, k and v."""

    def __init__(self, problem: Problem, inputs: Inputs, out: torch.Tensor, dout: torch.Tensor, dlse: bool) -> None:
        self.loadable = loadable(inputs.q, inputs.k, inputs.v, dout)
        if not self.loadable:
            return
        self.problem, varlen = problem, problem.varlen
        self.tile = tile = tiles.backward_tile(problem)
        self.schedule = Schedule(problem, problem.dtype, tile.block_n, backward=True) if varlen else None
        self.segments = Segments(problem, inputs, tile.block_m, tile.block_n, True) if problem.segments else None
        count = multiprocessors(inputs.q.get_device())
        self.sizes = backward_sizes(problem, tile, self.schedule.slots if self.schedule else 0, count)
        heads = problem.nheads if varlen else problem.batch * problem.nheads
        self.rows = heads * self.sizes.row_blocks * tile.block_m  # padded rows of the statistics and the fp32 dq
        self.seen = slice(None)
        if not varlen:
            seen = tiles.seen_keys(problem)
            self.seen = slice(seen.begin, seen.end)
        self.first_key = self.seen.start or 0
        lower, upper = packed_bounds(problem)
        self.all_seen = not varlen and self.seen == slice(0, problem.seqlen_k)
        self.all_seen_if_same_lengths = varlen and lower <= 0 <= upper
        self.scalars = tiles.scalars_of(problem)
        behind = problem.softcap > 0 and problem.alibi and tile.block_d <= 128 and tiles.keys_behind(problem)
        mode = tiles.mode_of(problem)._replace(sink=False, raw_scale=True, behind=behind)
        self._main(problem, inputs, dout, mode, self.scalars)
        self._around(problem, out, dout, dlse)

    def _main(self, problem: Problem, inputs: Inputs, dout: torch.Tensor, mode: Mode, scalars: Scalars) -> None:
        varlen, tile = problem.varlen, self.tile
        keys: Any = [inputs.k, inputs.v, *(meta_tensor(tuple(t.shape), t.dtype) for t in (inputs.k, inputs.v))]
        if not varlen:
            keys = [t[:, self.seen] for t in keys]
        make = packed_map if varlen else dense_map
        statistics = Map(Box(torch.float32, (tile.block_m,), swizzled=False), (self.rows,), (1,))
        fragments = Map(Box(torch.float32, (128, 32)), (self.rows * tile.block_d // 32, 32), (32, 1))
        maps = (
            make(inputs.q, tile.block_m, tile.block_d),
            make(keys[0], tile.block_n, tile.block_d),
            make(keys[1], tile.block_n, tile.block_d),
            make(dout, tile.block_m, tile.block_d),
            statistics,
            statistics,
            make(keys[2], 64, min(tile.block_d, 128)),
            make(keys[3], 64, min(tile.block_d, 128)),
            fragments,
        )
        sloping, apart = "alibi_slopes" in problem.needs_grad, tiles.slopes_apart(problem)
        packed = (stand_in(torch.int32, varlen) for _ in range(3))
        segments = (stand_in(torch.int32, problem.segments) for _ in range(4))
        slopes = stand_in(torch.float32, problem.alibi), stand_in(torch.float32, sloping)
        pointers = BackwardPointers._make((stand_in(torch.int32), slopes[0], *packed, *segments, slopes[1]))
        grid = min(multiprocessors(inputs.q.get_device()), self.sizes.tiles)
        kernel = backward_kernel if tile.block_d <= 128 else backward_wide_kernel
        common = (*maps, pointers, self.sizes, scalars)
        self.main = Launch(kernel, grid, (*common, mode._replace(slopes=sloping and not apart), tile, 4), early=True)
        self.slopes = None
        if apart:
            tile = tile._replace(dout_stages=2, readers=1)  # where ds and dq would be is room for a second dout
            self.slopes = Launch(slopes_kernel, grid, (*common, mode._replace(slopes=True), tile, 4), early=True)

    def _around(self, problem: Problem, out: torch.Tensor, dout: torch.Tensor, dlse: bool) -> None:
        """The launches before and after."""
        varlen, tile = problem.varlen, self.tile
        fp32, cu = stand_in(torch.float32), stand_in(torch.int32, varlen)
        same = stand_in(problem.dtype)
        shape = (problem.total_q if varlen else problem.seqlen_q, problem.nheads, problem.headdim)
        of_dq = (0 if varlen else shape[0] * shape[1] * shape[2], shape[1] * shape[2], shape[2])
        of_out, of_dout = ((0, *t.stride()[:2]) if varlen else t.stride()[:3] for t in (out, dout))
        of_lse = (0, problem.total_q) if varlen else (problem.nheads * problem.seqlen_q, problem.seqlen_q)
        common = (problem.batch, problem.nheads, problem.seqlen_q, self.sizes.row_blocks)
        self.before_tail = (of_out, of_dout, of_lse, *common, problem.headdim_v)
        self.after_tail = (of_dq, *common, shape[0], problem.headdim, self.scalars.softmax_scale)
        before = (same, same, fp32, fp32 if dlse else None, fp32, fp32, fp32, cu, *self.before_tail)
        statistics = (*before, tile.block_m, tile.block_d, 16, SEARCH, True, varlen)
        self.before = Launch(before_kernel, self.rows // 16, statistics, early=varlen)
        self.sink = None
        if "sink" in problem.needs_grad:
            self.sink_tail = (of_lse, *common)
            sink = (fp32, fp32, fp32, fp32, cu, *self.sink_tail)
            self.sink = Launch(sink_kernel, problem.batch * problem.nheads, (*sink, tile.block_m, CHUNK))
        after = (fp32, same, cu, *self.after_tail)
        rows = (*after, tile.block_m, tile.block_d, SEARCH, True)
        self.after = Launch(after_kernel, self.rows // 64, rows, early=True)

    def run(
        self, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None
    ) -> Gradients:
        """Gradients named in the problem, on the current stream."""
        q, k, v = inputs.q, inputs.k, inputs.v
        index = q.get_device()
        stream = current_stream(index)
        scratch = q.new_empty(self.rows * (self.tile.block_d + 2), dtype=torch.float32)
        acc = scratch.data_ptr()
        lse_at = acc + self.rows * self.tile.block_d * 4
        delta_at = lse_at + self.rows * 4
        dq = q.new_empty(q.shape)
        cu_q, cu_k = offsets_of(inputs) if self.problem.varlen else (None, None)
        all_seen = self.all_seen or (cu_q is cu_k and self.all_seen_if_same_lengths)
        dk, dv = (t.new_empty(t.shape) if all_seen else t.new_zeros(t.shape) for t in (k, v))
        read = (out.data_ptr(), dout.data_ptr(), lse.data_ptr(), address_of(dlse))
        slopes = contiguous_or_none(inputs.alibi_slopes)
        segments = NO_SEGMENTS if self.segments is None else self.segments.make(stream, inputs)
        grads = {"q": dq, "k": dk, "v": dv}
        if slopes is not None and "alibi_slopes" in self.problem.needs_grad:
            grads["alibi_slopes"] = torch.zeros_like(slopes)
        counter, cu, table = ticket(stream, index), address_of(cu_q), None
        # nothing comes between the launches that begin early and those before them
        if self.schedule is not None and cu_k is not None:
            table = self.schedule.make(stream, cu_k, dv.data_ptr(), keys=dk.data_ptr(), clears=all_seen)
        others = (cu_q, cu_k, table, *segments, grads.get("alibi_slopes"))
        pointers = (counter, address_of(slopes), *map(address_of, others))
        self.before(stream, *read, lse_at, delta_at, acc, cu, *self.before_tail)
        keys = [t.data_ptr() + self.first_key * t.stride(1) * t.element_size() for t in (k, v, dk, dv)]
        addresses = (q.data_ptr(), *keys[:2], dout.data_ptr(), lse_at, delta_at, *keys[2:], acc)
        if self.slopes is not None:
            self.slopes(stream, *addresses, pointers, self.sizes, self.scalars)
        self.main(stream, *addresses, pointers, self.sizes, self.scalars)
        self.after(stream, acc, dq.data_ptr(), cu, *self.after_tail)
        if self.sink is not None and inputs.sink is not None:
            sink = inputs.sink.contiguous()
            grads["sink"] = torch.empty_like(sink)
            self.sink(stream, sink.data_ptr(), lse.data_ptr(), delta_at, grads["sink"].data_ptr(), cu, *self.sink_tail)
        return {name: grads[name] for name in self.problem.needs_grad}
