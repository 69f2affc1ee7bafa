"""The reference as a backend: chosen only by name, O(seqlen_q * seqlen_k) memory, every feature."""

from __future__ import annotations

import torch

from tilewise.backends.reference import formulas, second_order
from tilewise.device import DeviceFacts
from tilewise.dispatch.backend import Gradients, Reason, State, forward_only
from tilewise.inputs import Inputs, sequences
from tilewise.problem import Problem


class Reference:
    """Materialising attention in fp64 or fp32."""

    name = "reference"
    auto_devices: frozenset[str] = frozenset()

    def supports(self, problem: Problem, facts: DeviceFacts) -> tuple[Reason, ...]:
        """Everything, but for gradients of fp8."""
        return forward_only(problem)

    def cost(self, problem: Problem, facts: DeviceFacts) -> float:
        """Seconds at a modest rate; never competes, since auto does not choose it."""
        pairs = problem.batch * problem.nheads * problem.seqlen_q * problem.seqlen_k
        return 2.0 * pairs * (problem.headdim + problem.headdim_v) / 5e9

    def tile(self, problem: Problem, facts: DeviceFacts) -> tuple[int, int]:
        """The whole matrix."""
        return max(problem.seqlen_q, 1), max(problem.seqlen_k, 1)

    def copies(self, problem: Problem) -> dict[str, int]:
        """None."""
        return {}

    def forward(self, problem: Problem, inputs: Inputs) -> State:
        """(out, lse) by whole matrices."""
        if not problem.varlen:
            return formulas.forward(problem, inputs)
        out = inputs.q.new_zeros((problem.total_q, problem.nheads, problem.headdim_v), dtype=problem.out_dtype)
        lse = out.new_full((problem.nheads, problem.total_q), -torch.inf, dtype=problem.state_dtype)
        for part in sequences(problem, inputs):
            out_part, lse_part = formulas.forward(part.problem, part.inputs)
            out[part.tokens_q], lse[:, part.tokens_q] = out_part[0], lse_part[0]
        return out, lse

    def backward(
        self,
        problem: Problem,
        inputs: Inputs,
        out: torch.Tensor,
        lse: torch.Tensor,
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
    ) -> Gradients:
        """Gradients by the formulas, probabilities recomputed."""
        if not problem.varlen:
            return formulas.backward(problem, inputs, out, dout, dlse)
        total = _zeros(problem, inputs)
        for index, part in enumerate(sequences(problem, inputs)):
            rows = part.tokens_q
            dlse_part = None if dlse is None else dlse[None, :, rows]
            grads = formulas.backward(part.problem, part.inputs, out[None, rows], dout[None, rows], dlse_part)
            _place(total, grads, index, part.tokens_q, part.tokens_k)
        return total

    def jvp(self, problem: Problem, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor, tangents: Gradients) -> State:
        """Tangents of (out, lse)."""
        if not problem.varlen:
            return second_order.jvp(problem, inputs, tangents)
        out_tangent, lse_tangent = torch.zeros_like(out), torch.zeros_like(lse)
        for index, part in enumerate(sequences(problem, inputs)):
            local = _part_of(tangents, index, part.tokens_q, part.tokens_k)
            out_part, lse_part = second_order.jvp(part.problem, part.inputs, local)
            out_tangent[part.tokens_q], lse_tangent[:, part.tokens_q] = out_part[0], lse_part[0]
        return out_tangent, lse_tangent

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
        """Gradient of <dout, out_tangent> + <dlse, lse_tangent> by the primals."""
        if not problem.varlen:
            return second_order.second(problem, inputs, tangents, dout, dlse)
        total = _zeros(problem, inputs)
        for index, part in enumerate(sequences(problem, inputs)):
            rows = part.tokens_q
            local = _part_of(tangents, index, part.tokens_q, part.tokens_k)
            grads = second_order.second(part.problem, part.inputs, local, dout[None, rows], dlse[None, :, rows])
            _place(total, grads, index, part.tokens_q, part.tokens_k)
        return total


def _zeros(problem: Problem, inputs: Inputs) -> Gradients:
    return {
        name: torch.zeros_like(getattr(inputs, name), memory_format=torch.contiguous_format)
        for name in problem.needs_grad
    }


def _place(total: Gradients, part: Gradients, index: int, tokens_q: slice, tokens_k: slice) -> None:
    """Write one sequence's gradients where they belong in the packed ones."""
    for name, grad in part.items():
        where = {"q": tokens_q, "k": tokens_k, "v": tokens_k}.get(name, slice(index, index + 1))
        total[name][where] = grad[0] if name in ("q", "k", "v") else grad


def _part_of(tangents: Gradients, index: int, tokens_q: slice, tokens_k: slice) -> Gradients:
    """One sequence's share of packed tangents."""
    where = {"q": tokens_q, "k": tokens_k, "v": tokens_k}
    return {
        name: tangent[None, where[name]] if name in where else tangent[index : index + 1]
        for name, tangent in tangents.items()
    }


BACKEND = Reference()
