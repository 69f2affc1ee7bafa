"""The tiled backend in plain torch operators: every feature, every derivative, any device, O(N) extra memory."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tilewise import masks
from tilewise.backends.cpu import first_order, packed, second_order
from tilewise.backends.cpu.tiles import Tiling
from tilewise.descale import FP8, real
from tilewise.device import DeviceFacts
from tilewise.dispatch.backend import Gradients, Reason, State, forward_only
from tilewise.inputs import Inputs, PackedSequence
from tilewise.problem import Problem


class Rate(NamedTuple):
    """Nanoseconds of one thread for a pair of query and key: ``pair`` for the softmax, ``channel`` for each channel."""

    pair: float
    channel: float


# Forward and backward, one core of a Xeon with AVX-512 at 1024 to 4096 tokens, headdim 64 and 128. Half inputs are
# computed in fp32; a kernel that multiplies them as they are is to be preferred, so their rates are the slower ones.
_RATES = {
    torch.float64: (Rate(3.2, 0.085), Rate(3.0, 0.25)),
    torch.float32: (Rate(1.0, 0.035), Rate(1.8, 0.085)),
    torch.bfloat16: (Rate(1.2, 0.04), Rate(2.5, 0.14)),
    torch.float16: (Rate(1.2, 0.04), Rate(2.5, 0.14)),
    FP8: (Rate(1.2, 0.04), Rate(2.5, 0.14)),
}
# How often the second-order functions compute what backward computes.
_WORK = {"forward": 1.0, "backward": 1.0, "jvp": 1.5, "second": 3.5}
_SECONDS_PER_TILE, _SECONDS_PER_CALL = 1.2e-4, 2e-4
# On an accelerator this is the fallback: many launches, slower than any kernel of its own.
_SHARE_ELSEWHERE = 0.05


class CpuBackend:
    """Online softmax and recomputation over tiles, in torch operators."""

    name = "cpu"
    auto_devices = frozenset({"cpu", "cuda", "mps", "xpu", "hpu", "mtia", "npu", "privateuseone"})

    def supports(self, problem: Problem, facts: DeviceFacts) -> tuple[Reason, ...]:
        """Everything SEMANTICS defines."""
        return forward_only(problem)

    def cost(self, problem: Problem, facts: DeviceFacts) -> float:
        """Seconds: the pairs that are computed at a measured rate, and the host's work for each tile and call."""
        tiling = Tiling.of(problem)
        pairs = masks.kept_pairs(masks.band(problem), problem.seqlen_q, problem.seqlen_k)
        if problem.banded:  # tiles on the edge of the band are computed whole
            pairs = min(pairs + problem.seqlen_q * tiling.block_q // 2, problem.seqlen_q * problem.seqlen_k)
        pairs *= problem.batch * problem.nheads
        rate = _RATES[problem.dtype][problem.derivative != "forward"]
        channels = (problem.headdim + problem.headdim_v) / 2
        work = pairs * (rate.pair + rate.channel * channels) * 1e-9 * _WORK[problem.derivative]
        share = 1 / max(facts.threads, 1) if problem.device_type == "cpu" else _SHARE_ELSEWHERE
        tiles = pairs / (tiling.block_q * max(problem.group, 1) * tiling.block_k * tiling.units)
        calls = problem.batch if problem.varlen else 1
        return work * share + tiles * _SECONDS_PER_TILE + calls * _SECONDS_PER_CALL

    def tile(self, problem: Problem, facts: DeviceFacts) -> tuple[int, int]:
        """(query rows, key columns) of a tile."""
        tiling = Tiling.of(problem)
        return tiling.block_q, tiling.block_k

    def copies(self, problem: Problem) -> dict[str, int]:
        """None."""
        return {}

    @torch.no_grad()
    def forward(self, problem: Problem, inputs: Inputs) -> State:
        """(out, lse)."""
        if "q" in problem.block_descales:
            inputs = inputs.replace(q=real(inputs.q, inputs.q_descale), q_descale=None)
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
