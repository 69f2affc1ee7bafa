"""A problem that one call of torch's kernel computes whole, with everything about it looked up beforehand."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tilewise.backends.sdpa import kernel
from tilewise.dispatch.backend import Recorded
from tilewise.problem import Problem


class Whole(NamedTuple):
    """The plain values of the call, and the |lse| up to which torch's gradients are right."""

    causal: bool
    scale: float
    lse_limit: float

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """out, contiguous and no view, so that it may be changed in place like that of any other backend."""
        heads_second = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        out: torch.Tensor = kernel.call(*heads_second, 0.0, self.causal, scale=self.scale)[0]
        return out.transpose(1, 2).contiguous().detach()

    def record(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Recorded:
        """out, contiguous, lse, and torch's node, but None where lse is too large for the gradients of that node.

        lse is still in the caches here; the backward would have to fetch it. One reduction for both ends, as a call of
        each costs more than the numbers.
        """
        heads_second = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        out, lse = kernel.call(*heads_second, 0.0, self.causal, scale=self.scale)
        lowest, highest = lse.aminmax()
        fits = float(highest) <= self.lse_limit and float(lowest) >= -self.lse_limit
        return Recorded(out.transpose(1, 2).contiguous(), lse, out.grad_fn if fits else None)


def whole(problem: Problem) -> Whole | None:
    """How the problem is called, if it is q, k and v in one call whose result needs no look."""
    part = kernel.only_part(problem)
    added = problem.mask_shape is not None or problem.bias_shape is not None
    if part is None or added or problem.varlen or problem.seqlen_k < kernel.LANES:
        return None
    return Whole(part.causal, problem.softmax_scale, kernel.LSE_LIMIT[problem.dtype])
