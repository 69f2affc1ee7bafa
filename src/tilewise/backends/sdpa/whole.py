"""A problem that one call of torch's kernel computes whole, with everything about it looked up beforehand."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tilewise.backends.sdpa import kernel
from tilewise.problem import Problem

# |lse| from which exp(s - lse), with s computed anew, is too far from the forward's P for the error budget.
LSE_LIMIT = {torch.float64: 2.0**5, torch.float32: 2.0**5, torch.bfloat16: 2.0**12, torch.float16: 2.0**12}


class Whole(NamedTuple):
    """The plain values of the call, and the |lse| up to which torch's gradients are right."""

    causal: bool
    scale: float
    limit: float

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """out."""
        heads_second = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        out: torch.Tensor = kernel.call(*heads_second, 0.0, self.causal, scale=self.scale)[0]
        return out.transpose(1, 2).contiguous()

    def record(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, Any] | None:
        """out with torch's graph behind it, and its node of attention; None where lse is too large for its gradients.

        lse is still in the caches here; the backward would have to fetch it.
        """
        heads_second = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        out, lse = kernel.call(*heads_second, 0.0, self.causal, scale=self.scale)
        lowest, highest = lse.aminmax()
        if float(highest) > self.limit or float(lowest) < -self.limit:
            return None
        return out.transpose(1, 2).contiguous(), out.grad_fn


def whole(problem: Problem) -> Whole | None:
    """How the problem is called, if it is q, k and v in one call whose result needs no look."""
    part = kernel.only_part(problem)
    added = problem.mask_shape is not None or problem.bias_shape is not None
    if part is None or added or problem.varlen or problem.seqlen_k < kernel.LANES:
        return None
    return Whole(part.causal, problem.softmax_scale, LSE_LIMIT[problem.dtype])
