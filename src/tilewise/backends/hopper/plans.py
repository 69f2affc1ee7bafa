"""A call without its addresses: tensor maps, tiles, grids and compiled kernels, made once per problem and strides."""

from __future__ import annotations

from typing import Any

import torch

from tilewise.backends.hopper import tiles
from tilewise.backends.hopper.arguments import (
    OPEN,
    BackwardPointers,
    BackwardSizes,
    BackwardTile,
    ForwardTile,
    Mode,
    Pointers,
    Scalars,
    Sizes,
)
from tilewise.backends.hopper.backward import backward_kernel
from tilewise.backends.hopper.backward_wide import backward_wide_kernel
from tilewise.backends.hopper.forward import forward_kernel
from tilewise.backends.hopper.launch import (
    Box,
    Launch,
    Map,
    current_stream,
    dense_map,
    multiprocessors,
    packed_map,
    ticket,
)
from tilewise.backends.hopper.preprocess import after_kernel, before_kernel
from tilewise.backends.hopper.schedule import clear_kernel, table_kernel
from tilewise.dispatch.backend import Gradients, State
from tilewise.inputs import Inputs
from tilewise.problem import Problem

CHUNK = 1024  # sequences that one step of a scan over offsets takes


def _like(dtype: torch.dtype, wanted: bool = True) -> torch.Tensor | None:
    """Stands for a pointer of this type when a kernel is compiled."""
    return torch.empty(0, dtype=dtype, device="meta") if wanted else None


def _meta(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _contiguous(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _address(tensor: torch.Tensor | None) -> int | None:
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


class Table:
    """The device-made tile table of the packed form."""

    def __init__(self, problem: Problem, total: int, longest: int, block: int, last_first: bool) -> None:
        self.batch = problem.batch
        self.slots = max(1, min(total // block + problem.batch, problem.batch * -(-longest // block)))
        like = _like(torch.int32)
        self.launch = Launch(table_kernel, problem.batch, (like, like, problem.batch, block, last_first, CHUNK))

    def make(self, stream: int, cu_seqlens: torch.Tensor) -> torch.Tensor:
        """Fill a new table on ``stream``."""
        table = torch.empty(2 + 2 * self.slots, dtype=torch.int32, device=cu_seqlens.device)
        self.launch(stream, cu_seqlens.data_ptr(), table.data_ptr(), self.batch)
        return table


def _offsets(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    if inputs.cu_seqlens_q is None or inputs.cu_seqlens_k is None:
        raise RuntimeError("the packed form needs both cu_seqlens")
    return inputs.cu_seqlens_q.to(torch.int32).contiguous(), inputs.cu_seqlens_k.to(torch.int32).contiguous()


def forward_sizes(problem: Problem, tile: ForwardTile, slots: int) -> Sizes:
    """Lengths and counts of a forward call."""
    common = (problem.batch, problem.nheads, problem.group)
    if problem.varlen:
        bounds = packed_bounds(problem)
        return Sizes(*common, 0, 0, *bounds, 0, slots, 1, slots * problem.nheads, problem.total_q)
    seen = tiles.seen_keys(problem)
    blocks = -(-problem.seqlen_q // tile.block_m)
    band = (problem.seqlen_q, seen.end - seen.begin, seen.lower, seen.upper, seen.shift)
    flight = tiles.heads_in_flight(problem)
    return Sizes(*common, *band, blocks, flight, blocks * problem.batch * problem.nheads, problem.seqlen_q)


class ForwardPlan:
    """The forward of one problem with given strides."""

    def __init__(self, problem: Problem, inputs: Inputs) -> None:
        self.loadable = loadable(inputs.q, inputs.k, inputs.v)
        if not self.loadable:
            return
        varlen, tile = problem.varlen, tiles.forward_tile(problem)
        self.varlen = varlen
        mode = tiles.mode_of(problem)
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
        self.maps = (
            make(inputs.q, 64, tile.block_d),
            make(k, tile.block_n, tile.block_d),
            make(v, tile.block_n, tile.block_dv),
            make(_meta(self.out_shape, problem.dtype), 64, tile.block_dv),
        )
        self.table = None
        if varlen:
            self.table = Table(problem, problem.total_q, problem.seqlen_q, tile.block_m, True)
            self.clear_tail = (problem.batch, problem.total_q, problem.nheads, problem.nheads * problem.headdim_v)
            likes = (_like(problem.dtype), _like(torch.float32), _like(torch.int32))
            self.clear = Launch(clear_kernel, -(-problem.total_q // 32), (*likes, *self.clear_tail, 32, 128))
        self.sizes = forward_sizes(problem, tile, self.table.slots if self.table else 0)
        pointers = Pointers(
            _like(torch.int32),
            _like(torch.float32),
            _like(torch.float32, problem.alibi),
            _like(torch.float32, problem.sink),
            *(_like(torch.int32, varlen) for _ in range(3)),
        )
        grid = min(multiprocessors(inputs.q.get_device()), self.sizes.tiles)
        self.launch = Launch(forward_kernel, grid, (*self.maps, pointers, self.sizes, self.scalars, mode, tile, 4))

    def run(self, inputs: Inputs) -> State:
        """(out, lse) on the current stream."""
        q = inputs.q
        index = q.get_device()
        stream = current_stream(index)
        out = q.new_empty(self.out_shape)
        lse = q.new_empty(self.lse_shape, dtype=torch.float32)
        packed: tuple[torch.Tensor | None, ...] = (None, None, None)
        if self.table is not None:
            cu_q, cu_k = _offsets(inputs)
            packed = (cu_q, cu_k, self.table.make(stream, cu_q))
            self.clear(stream, out.data_ptr(), lse.data_ptr(), cu_q.data_ptr(), *self.clear_tail)
        slopes, sink = _contiguous(inputs.alibi_slopes), _contiguous(inputs.sink)
        q_map, k_map, v_map, out_map = self.maps
        skip_k, skip_v = self.skip
        self.launch(
            stream,
            q_map.at(q.data_ptr()),
            k_map.at(inputs.k.data_ptr() + skip_k),
            v_map.at(inputs.v.data_ptr() + skip_v),
            out_map.at(out.data_ptr()),
            (ticket(stream, index), lse.data_ptr(), _address(slopes), _address(sink), *map(_address, packed)),
            self.sizes,
            self.scalars,
        )
        return out, lse


def backward_sizes(problem: Problem, tile: BackwardTile, slots: int) -> BackwardSizes:
    """Lengths and counts of a backward call."""
    common = (problem.batch, problem.nheads, problem.group)
    if problem.varlen:
        blocks = problem.total_q // tile.block_m + problem.batch
        return BackwardSizes(*common, 0, 0, *packed_bounds(problem), 0, slots, slots * problem.nheads_k, blocks)
    seen = tiles.seen_keys(problem)
    blocks = -(-(seen.end - seen.begin) // tile.block_n)
    band = (problem.seqlen_q, seen.end - seen.begin, seen.lower, seen.upper, seen.shift)
    row_blocks = -(-problem.seqlen_q // tile.block_m)
    return BackwardSizes(*common, *band, blocks, blocks * problem.batch * problem.nheads_k, row_blocks)


class BackwardPlan:
    """The backward of one problem with given strides: three launches, and a fourth for the packed form's table."""

    def __init__(self, problem: Problem, inputs: Inputs, out: torch.Tensor, dout: torch.Tensor, dlse: bool) -> None:
        self.loadable = loadable(inputs.q, inputs.k, inputs.v, dout)
        if not self.loadable:
            return
        self.problem, varlen = problem, problem.varlen
        self.tile = tile = tiles.backward_tile(problem)
        self.table = Table(problem, problem.total_k, problem.seqlen_k, tile.block_n, False) if varlen else None
        self.sizes = backward_sizes(problem, tile, self.table.slots if self.table else 0)
        heads = problem.nheads if varlen else problem.batch * problem.nheads
        self.rows = heads * self.sizes.row_blocks * tile.block_m  # padded rows of the statistics and the fp32 dq
        self.seen = slice(None)
        if not varlen:
            seen = tiles.seen_keys(problem)
            self.seen = slice(seen.begin, seen.end)
        self.first_key = self.seen.start or 0
        self.all_seen = not varlen and self.seen == slice(0, problem.seqlen_k)
        self.scalars = tiles.scalars_of(problem)
        self._main(problem, inputs, dout, tiles.mode_of(problem)._replace(sink=False, raw_scale=True), self.scalars)
        self._around(problem, out, dout, dlse)

    def _main(self, problem: Problem, inputs: Inputs, dout: torch.Tensor, mode: Mode, scalars: Scalars) -> None:
        varlen, tile = problem.varlen, self.tile
        keys: Any = [inputs.k, inputs.v, *(_meta(tuple(t.shape), t.dtype) for t in (inputs.k, inputs.v))]
        if not varlen:
            keys = [t[:, self.seen] for t in keys]
        make = packed_map if varlen else dense_map
        statistics = Map(Box(torch.float32, (tile.block_m,), swizzled=False), (self.rows,), (1,))
        fragments = Map(Box(torch.float32, (128, 32)), (self.rows * tile.block_d // 32, 32), (32, 1))
        self.maps = (
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
        packed = (_like(torch.int32, varlen) for _ in range(3))
        pointers = BackwardPointers(_like(torch.int32), _like(torch.float32, problem.alibi), *packed)
        grid = min(multiprocessors(inputs.q.get_device()), self.sizes.tiles)
        kernel = backward_kernel if tile.block_d <= 128 else backward_wide_kernel
        self.main = Launch(kernel, grid, (*self.maps, pointers, self.sizes, scalars, mode, tile, 4))

    def _around(self, problem: Problem, out: torch.Tensor, dout: torch.Tensor, dlse: bool) -> None:
        """The launches before and after."""
        varlen, tile = problem.varlen, self.tile
        fp32, cu = _like(torch.float32), _like(torch.int32, varlen)
        same = _like(problem.dtype)
        shape = (problem.total_q if varlen else problem.seqlen_q, problem.nheads, problem.headdim)
        of_dq = (0 if varlen else shape[0] * shape[1] * shape[2], shape[1] * shape[2], shape[2])
        of_out, of_dout = ((0, *t.stride()[:2]) if varlen else t.stride()[:3] for t in (out, dout))
        of_lse = (0, problem.total_q) if varlen else (problem.nheads * problem.seqlen_q, problem.seqlen_q)
        common = (problem.batch, problem.nheads, problem.seqlen_q, self.sizes.row_blocks)
        # without a cap the scores are accumulated onto -lse / softmax_scale; with one it is subtracted later
        factor = tiles.LOG2E if problem.softcap else -1.0 / problem.softmax_scale
        self.before_tail = (of_out, of_dout, of_lse, *common, problem.headdim_v, factor)
        self.after_tail = (of_dq, *common, problem.headdim, self.scalars.softmax_scale)
        before = (same, same, fp32, fp32 if dlse else None, fp32, fp32, fp32, cu, *self.before_tail)
        self.before = Launch(before_kernel, self.rows // 16, (*before, tile.block_m, tile.block_d, 16, CHUNK))
        after = (fp32, same, cu, *self.after_tail)
        self.after = Launch(after_kernel, self.rows // 64, (*after, tile.block_m, tile.block_d, CHUNK))

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
        # unseen keys, and tokens beyond the last offset, have gradients that no tile writes
        dq = q.new_zeros(q.shape) if self.table is not None else q.new_empty(q.shape)
        dk, dv = (t.new_empty(t.shape) if self.all_seen else t.new_zeros(t.shape) for t in (k, v))
        packed: tuple[torch.Tensor | None, ...] = (None, None, None)
        if self.table is not None:
            cu_q, cu_k = _offsets(inputs)
            packed = (cu_q, cu_k, self.table.make(stream, cu_k))
        cu = _address(packed[0])
        self.before(stream, out.data_ptr(), dout.data_ptr(), lse.data_ptr(), _address(dlse), lse_at, delta_at, acc, cu,
                    *self.before_tail)  # fmt: skip
        slopes = _contiguous(inputs.alibi_slopes)
        keys = [t.data_ptr() + self.first_key * t.stride(1) * t.element_size() for t in (k, v, dk, dv)]
        addresses = (q.data_ptr(), *keys[:2], dout.data_ptr(), lse_at, delta_at, *keys[2:], acc)
        maps = [kind.at(address) for kind, address in zip(self.maps, addresses, strict=True)]
        pointers = (ticket(stream, index), _address(slopes), *map(_address, packed))
        self.main(stream, *maps, pointers, self.sizes, self.scalars)
        self.after(stream, acc, dq.data_ptr(), cu, *self.after_tail)
        grads = {"q": dq, "k": dk, "v": dv}
        if "sink" in self.problem.needs_grad and inputs.sink is not None:
            grads["sink"] = self._sink_gradient(inputs.sink, lse, scratch[self.rows * (self.tile.block_d + 1) :])
        return {name: grads[name] for name in self.problem.needs_grad}

    def _sink_gradient(self, sink: torch.Tensor, lse: torch.Tensor, minus_delta: torch.Tensor) -> torch.Tensor:
        """A sink is a key whose value is zero: its ds is -p delta."""
        minus_delta = minus_delta.view(*lse.shape[:2], -1)[..., : lse.shape[2]]
        p = torch.exp(sink[..., None] - lse).masked_fill(lse == -torch.inf, 0.0)
        return (p * minus_delta).sum(-1)
