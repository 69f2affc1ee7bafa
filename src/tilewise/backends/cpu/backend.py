"""The tiled backend in plain torch operators: every feature, every derivative, any device, O(N) extra memory."""

from __future__ import annotations

import torch

from tilewise import masks
from tilewise.backends.cpu import first_order, packed, second_order
from tilewise.backends.cpu.tiles import Tiling
from tilewise.device import DeviceFacts
from tilewise.dispatch.backend import Gradients, Reason, State
from tilewise.inputs import Inputs, PackedSequence
from tilewise.problem import Problem

# Measured on two cores with AVX-512: products and exp of a warm loop, and the host cost of one visited tile.
_FLOPS_PER_THREAD, _FLOPS_ELSEWHERE = 7e10, 2e12
_SECONDS_PER_TILE, _SECONDS_PER_CALL = 3e-5, 2e-4
_WORK = {"forward": 1.0, "backward": 2.5, "jvp": 4.0, "second": 9.0}


class CpuBackend:
    """Online softmax and recomputation over tiles, in torch operators."""

    name = "cpu"
    auto_devices = frozenset({"cpu", "cuda", "mps", "xpu", "hpu", "mtia", "npu", "privateuseone"})

    def supports(self, problem: Problem, facts: DeviceFacts) -> tuple[Reason, ...]:
        """Everything SEMANTICS defines."""
        return ()

    def cost(self, problem: Problem, facts: DeviceFacts) -> float:
        """Seconds: kept pairs' FLOPs at a measured rate, and the host's work for each tile."""
        lengths = problem.batch * problem.nheads
        pairs = masks.kept_pairs(masks.band(problem), problem.seqlen_q, problem.seqlen_k) * lengths
        flops = 2 * pairs * (problem.headdim + problem.headdim_v) * _WORK[problem.derivative]
        rate = _FLOPS_PER_THREAD * facts.threads if problem.device_type == "cpu" else _FLOPS_ELSEWHERE
        tiling = Tiling.of(problem)
        tiles = (
            pairs / (tiling.block_q * max(problem.group, 1) * tiling.block_k * tiling.units)
            + problem.batch * problem.varlen
        )
        return flops / rate + _SECONDS_PER_TILE * tiles + _SECONDS_PER_CALL

    def tile(self, problem: Problem, facts: DeviceFacts) -> tuple[int, int]:
        """(query rows, key columns) of a tile."""
        tiling = Tiling.of(problem)
        return tiling.block_q, tiling.block_k

    @torch.no_grad()
    def forward(self, problem: Problem, inputs: Inputs) -> State:
        """(out, lse)."""
        if not problem.varlen:
            return first_order.forward(problem, inputs)
        return packed.state(problem, inputs, lambda _, part: first_order.forward(part.problem, part.inputs))

    @torch.no_grad()
    def backward(
        self,
        problem: Problem,
        inputs: Inputs,
        out: torch.Tensor,
        lse: torch.Tensor,
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
    ) -> Gradients:
        """The gradients named in ``problem.needs_grad``."""
        if not problem.varlen:
            return first_order.backward(problem, inputs, out, lse, dout, dlse)

        def run(_: int, part: PackedSequence) -> Gradients:
            parts = packed.tokens(out, part), packed.columns(lse, part), packed.tokens(dout, part)
            part_dlse = None if dlse is None else packed.columns(dlse, part)
            return first_order.backward(part.problem, part.inputs, *parts, part_dlse)

        return packed.gradients(problem, inputs, run)

    @torch.no_grad()
    def jvp(self, problem: Problem, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor, tangents: Gradients) -> State:
        """Tangents of (out, lse)."""
        if not problem.varlen:
            return second_order.jvp(problem, inputs, lse, tangents)

        def run(index: int, part: PackedSequence) -> State:
            named = packed.dense_tangents(tangents, part, index)
            return second_order.jvp(part.problem, part.inputs, packed.columns(lse, part), named)

        return packed.state(problem, inputs, run, fill=0.0)

    @torch.no_grad()
    def second(
        self,
        problem: Problem,
        inputs: Inputs,
        out: torch.Tensor,
        lse: torch.Tensor,
        tangents: Gradients,
        dout: torch.Tensor,
        dlse: torch.Tensor,
    ) -> Gradients:
        """The gradient of <dout, jvp_out> + <dlse, jvp_lse> by the primals in ``problem.needs_grad``."""
        if not problem.varlen:
            return second_order.second(problem, inputs, lse, tangents, dout, dlse)

        def run(index: int, part: PackedSequence) -> Gradients:
            named = packed.dense_tangents(tangents, part, index)
            parts = packed.columns(lse, part), named, packed.tokens(dout, part), packed.columns(dlse, part)
            return second_order.second(part.problem, part.inputs, *parts)

        return packed.gradients(problem, inputs, run)


BACKEND = CpuBackend()
