"""A call without its addresses: tensor maps, tiles, grids and compiled kernels, made once per problem and strides."""

from __future__ import annotations

import torch

from tilewise.backends.hopper import launch, tiles
from tilewise.backends.hopper.arguments import BackwardPointers, BackwardSizes, Pointers, Sizes
from tilewise.backends.hopper.backward import backward_kernel
from tilewise.backends.hopper.forward import forward_kernel
from tilewise.backends.hopper.launch import Box, Launch, Map, dense_map, packed_map
from tilewise.backends.hopper.preprocess import after_kernel, before_kernel
from tilewise.backends.hopper.schedule import table_kernel
from tilewise.dispatch.backend import Gradients, State
from tilewise.inputs import Inputs
from tilewise.problem import Problem

_TICKETS: dict[tuple[int, int], torch.Tensor] = {}


def ticket(stream: int, device: torch.device) -> int:
    """Address of a counter that is 0 and that no other stream uses; every kernel leaves it 0.

    A graph that is being captured gets one of its own, since it may be replayed beside this stream's kernels.
    """
    if torch.cuda.is_current_stream_capturing():
        counter = torch.zeros(1, dtype=torch.int32, device=device)
        _CAPTURED.append(counter)
        return counter.data_ptr()
    key = (device.index, stream)
    counter = _TICKETS.get(key)
    if counter is None:
        counter = _TICKETS[key] = torch.zeros(1, dtype=torch.int32, device=device)
    return counter.data_ptr()


_CAPTURED: list[torch.Tensor] = []


def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of the device: the most CTAs that run at once, one on each."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _placeholder(dtype: torch.dtype, wanted: bool = True) -> torch.Tensor | None:
    """Stands for a pointer of this type when a kernel is compiled."""
    return torch.empty(0, dtype=dtype, device="meta") if wanted else None


class ForwardPlan:
    """The forward of one problem with given strides."""

    def __init__(self, problem: Problem, inputs: Inputs) -> None:
        self.problem = problem
        self.tile = tiles.forward_tile(problem)
        self.mode = tiles.mode_of(problem)
        self.scalars = tiles.scalars_of(problem)
        device = inputs.q.device
        varlen = problem.varlen
        shape = (problem.total_q,) if varlen else (problem.batch, problem.seqlen_q)
        self.out_shape = (*shape, problem.nheads, problem.headdim_v)
        rows = (problem.nheads, problem.total_q) if varlen else (problem.batch, problem.nheads, problem.seqlen_q)
        self.lse_shape = rows
        out = torch.empty(self.out_shape, dtype=problem.dtype, device="meta")
        seen = None if varlen else tiles.seen_keys(problem)
        self.first_key = 0 if seen is None else seen.begin
        k, v = (inputs.k, inputs.v) if seen is None else (t[:, seen.begin : seen.end] for t in (inputs.k, inputs.v))
        self.key_bytes = tuple(0 if varlen else t.stride(1) * t.element_size() * self.first_key for t in (k, v))
        make = packed_map if varlen else dense_map
        tile = self.tile
        self.maps = (
            make(inputs.q, 64, tile.block_d),
            make(k, tile.block_n, tile.block_d),
            make(v, tile.block_n, tile.block_dv),
            make(out, 64, tile.block_dv),
        )
        self.sizes = self._sizes()
        grid = min(multiprocessors(device), self.sizes.tiles)
        pointers = Pointers(
            _placeholder(torch.int32),
            _placeholder(torch.float32),
            _placeholder(torch.float32, problem.alibi),
            _placeholder(torch.float32, problem.sink),
            *(_placeholder(torch.int32, varlen) for _ in range(3)),
        )
        arguments = (*self.maps, pointers, self.sizes, self.scalars, self.mode, tile, 4)
        self.launch = Launch(forward_kernel, grid, arguments)
        if varlen:
            table = (_placeholder(torch.int32), _placeholder(torch.int32), problem.batch, tile.block_m, 1024)
            self.make_table = Launch(table_kernel, problem.batch, table)

    def _sizes(self) -> Sizes:
        problem, block_m = self.problem, self.tile.block_m
        common = (problem.batch, problem.nheads, problem.group)
        if problem.varlen:
            slots = min(problem.total_q // block_m + problem.batch, problem.batch * -(-problem.seqlen_q // block_m))
            left = tiles.OPEN if problem.window_left is None else min(problem.window_left, tiles.OPEN)
            right = tiles.OPEN if problem.window_right is None else min(problem.window_right, tiles.OPEN)
            if problem.causal == "bottom_right":
                right = min(right, 0)
            return Sizes(*common, problem.seqlen_q, problem.seqlen_k, -left, right, 0, slots, 1,
                         slots * problem.nheads, problem.total_q)  # fmt: skip
        seen = tiles.seen_keys(problem)
        blocks = -(-problem.seqlen_q // block_m)
        return Sizes(*common, problem.seqlen_q, seen.end - seen.begin, seen.lower, seen.upper, seen.shift, blocks,
                     tiles.heads_in_flight(problem), blocks * problem.batch * problem.nheads, problem.seqlen_q)  # fmt: skip

    def run(self, inputs: Inputs) -> State:
        """(out, lse) on the current stream."""
        q = inputs.q
        device = q.device
        out = torch.empty(self.out_shape, dtype=q.dtype, device=device)
        lse = torch.empty(self.lse_shape, dtype=torch.float32, device=device)
        stream = launch.current_stream(device.index)
        packed: tuple[int | None, ...] = (None, None, None)
        if self.problem.varlen:
            self._clear_rest(inputs, out, lse)
            cu_q, cu_k = (t.to(torch.int32) for t in (inputs.cu_seqlens_q, inputs.cu_seqlens_k))
            table = torch.empty(2 + 2 * self.sizes.blocks, dtype=torch.int32, device=device)
            self.make_table(stream, cu_q.data_ptr(), table.data_ptr(), self.problem.batch)
            packed = (cu_q.data_ptr(), cu_k.data_ptr(), table.data_ptr())
        slopes = None if inputs.alibi_slopes is None else inputs.alibi_slopes.contiguous()
        sink = None if inputs.sink is None else inputs.sink.contiguous()
        pointers = (ticket(stream, device), lse.data_ptr(), _address(slopes), _address(sink), *packed)
        q_map, k_map, v_map, o_map = self.maps
        self.launch(
            stream,
            q_map.at(q.data_ptr()),
            k_map.at(inputs.k.data_ptr() + self.key_bytes[0]),
            v_map.at(inputs.v.data_ptr() + self.key_bytes[1]),
            o_map.at(out.data_ptr()),
            pointers,
            self.sizes,
            self.scalars,
        )
        return out, lse

    def _clear_rest(self, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Tokens beyond the last offset, whose number the host does not know."""
        out.zero_()
        lse.fill_(-torch.inf)


class BackwardPlan:
    """The backward of one dense problem with given strides: three launches."""

    def __init__(self, problem: Problem, inputs: Inputs, out: torch.Tensor, dout: torch.Tensor, dlse: bool) -> None:
        self.problem = problem
        self.tile = tile = tiles.backward_tile(problem)
        self.mode = tiles.mode_of(problem)._replace(sink=False, raw_scale=True)
        self.scalars = tiles.scalars_of(problem)
        seen = tiles.seen_keys(problem)
        self.seen = slice(seen.begin, seen.end)
        self.all_seen = seen.begin == 0 and seen.end == problem.seqlen_k
        blocks = -(-(seen.end - seen.begin) // 128)
        self.row_blocks = -(-problem.seqlen_q // tile.block_m)
        self.padded = self.row_blocks * tile.block_m
        self.heads = problem.batch * problem.nheads
        self.sizes = BackwardSizes(problem.batch, problem.nheads, problem.group, problem.seqlen_q, seen.end - seen.begin,
                                   seen.lower, seen.upper, seen.shift, blocks,
                                   blocks * problem.batch * problem.nheads_k, self.row_blocks)  # fmt: skip
        k, v = inputs.k[:, self.seen], inputs.v[:, self.seen]
        dk, dv = (torch.empty(t.shape, dtype=t.dtype, device="meta")[:, self.seen] for t in (inputs.k, inputs.v))
        block_d = tile.block_d
        rows = self.heads * self.padded
        statistics = Map(Box(torch.float32, (tile.block_m,), swizzled=False), (rows,), (1,))
        fragments = Map(Box(torch.float32, (128, 32)), (rows * block_d // 32, 32), (32, 1))
        self.maps = (
            dense_map(inputs.q, tile.block_m, block_d),
            dense_map(k, 128, block_d),
            dense_map(v, 128, block_d),
            dense_map(dout, tile.block_m, block_d),
            statistics,
            statistics,
            dense_map(dk, 64, block_d),
            dense_map(dv, 64, block_d),
            fragments,
        )
        pointers = BackwardPointers(_placeholder(torch.int32), _placeholder(torch.float32, problem.alibi))
        grid = min(multiprocessors(inputs.q.device), self.sizes.tiles)
        self.main = Launch(backward_kernel, grid,
                           (*self.maps, pointers, self.sizes, self.scalars, self.mode, tile, 4))  # fmt: skip
        factor = 1.4426950408889634 if problem.softcap else -1.0 / problem.softmax_scale
        dq = torch.empty(inputs.q.shape, dtype=problem.dtype, device="meta")
        self.before_tail = (out.stride()[:3], dout.stride()[:3], problem.nheads, problem.seqlen_q, self.padded,
                            problem.headdim_v, factor)  # fmt: skip
        self.after_tail = (dq.stride()[:3], problem.nheads, problem.seqlen_q, self.padded, problem.headdim,
                           self.scalars.softmax_scale)  # fmt: skip
        fp32 = _placeholder(torch.float32)
        self.before = Launch(
            before_kernel,
            rows // 16,
            (dq, dq, fp32, fp32 if dlse else None, fp32, fp32, fp32, *self.before_tail, block_d, 16),
        )
        self.after = Launch(after_kernel, rows // 64, (fp32, dq, *self.after_tail, block_d))

    def run(
        self, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None
    ) -> Gradients:
        """Gradients named in the problem, on the current stream."""
        q, k, v = inputs.q, inputs.k, inputs.v
        device = q.device
        stream = launch.current_stream(device.index)
        rows = self.heads * self.padded
        scratch = torch.empty(rows * (self.tile.block_d + 2), dtype=torch.float32, device=device)
        acc = scratch.data_ptr()
        lse_at = acc + rows * self.tile.block_d * 4
        delta_at = lse_at + rows * 4
        make = torch.empty if self.all_seen else torch.zeros
        dq = torch.empty(q.shape, dtype=q.dtype, device=device)
        dk, dv = (make(t.shape, dtype=t.dtype, device=device) for t in (k, v))
        self.before(stream, out.data_ptr(), dout.data_ptr(), lse.data_ptr(), _address(dlse), lse_at, delta_at, acc,
                    *self.before_tail)  # fmt: skip
        slopes = None if inputs.alibi_slopes is None else inputs.alibi_slopes.contiguous()
        first = self.seen.start
        keys = [t.data_ptr() + first * t.stride(1) * t.element_size() for t in (k, v, dk, dv)]
        addresses = (q.data_ptr(), *keys[:2], dout.data_ptr(), lse_at, delta_at, *keys[2:], acc)
        maps = [kind.at(address) for kind, address in zip(self.maps, addresses, strict=True)]
        pointers = (ticket(stream, device), _address(slopes), None, None, None)
        self.main(stream, *maps, pointers, self.sizes, self.scalars)
        self.after(stream, acc, dq.data_ptr(), *self.after_tail)
        grads = {"q": dq, "k": dk, "v": dv}
        if "sink" in self.problem.needs_grad and inputs.sink is not None:
            grads["sink"] = self._sink_gradient(inputs.sink, lse, scratch[rows * (self.tile.block_d + 1) :])
        return {name: grads[name] for name in self.problem.needs_grad}

    def _sink_gradient(self, sink: torch.Tensor, lse: torch.Tensor, minus_delta: torch.Tensor) -> torch.Tensor:
        """A sink is a key whose value is zero: its ds is -p delta."""
        minus_delta = minus_delta.view(*lse.shape[:2], -1)[..., : lse.shape[2]]
        p = torch.exp(sink[..., None] - lse).masked_fill(lse == -torch.inf, 0.0)
        return (p * minus_delta).sum(-1)
