"""A plain call whose forward and gradients are torch's own kernels, recorded by torch's own node.

No Python prepares its backward: each step of it would fetch code and data that the tensors of a short call have pushed
out of the caches. Torch's node knows first derivatives alone, so a hook on it looks whether the backward is itself
recorded, and then puts gradients that have a derivative in the place of the node's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tilewise import autograd
from tilewise.inputs import TENSOR_COUNT, Arguments
from tilewise.plan import Plan
from tilewise.problem import Problem

# Private: where torch has them no more, or the backend knows nothing of this, a call is recorded by autograd.Forward.
_node: Any = getattr(torch._C, "_current_autograd_node", None)
_hooks_on_saved: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
_ABSENT = (None,) * (TENSOR_COUNT - 3)
_FIRST_THREE = ("q", "k", "v")


class Native(NamedTuple):
    """How a backend lets torch record a problem, and the plain values of its calls."""

    record: Any
    problem: Problem
    rest: tuple[Any, ...]

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor | None:
        """out; None where torch's own gradients would not do for these numbers, or could be handed other tensors."""
        if _hooks_on_saved(True) is not None:
            # they may bring q, k or v back in a layout that torch's kernel misreads
            return None
        recorded = self.record(self.problem, q, k, v)
        if recorded is None:
            return None
        out, node = recorded
        node.register_hook(self._with_derivatives)
        return out  # type: ignore[no-any-return]

    def _with_derivatives(
        self, grads: tuple[torch.Tensor | None, ...], cotangents: tuple[torch.Tensor | None, ...]
    ) -> tuple[torch.Tensor | None, ...] | None:
        """The gradients anew, recorded, where someone may differentiate them; else None, which keeps ``grads``."""
        if not torch.is_grad_enabled() or cotangents[0] is None:
            return None
        node = _node()
        q, k, v, out, dout = (
            tensor.transpose(1, 2)
            for tensor in (node._saved_query, node._saved_key, node._saved_value, node._saved_output, cotangents[0])
        )
        names = tuple(name for name, grad in zip(_FIRST_THREE, grads, strict=True) if grad is not None)
        tensors = (dout, None, out, node._saved_logsumexp, q, k, v, *_ABSENT)
        found = dict(zip(names, autograd.backward(tensors, autograd.asking(self.rest, names)), strict=True))
        return tuple(found[name].transpose(1, 2) if name in found else None for name in _FIRST_THREE)


def native(plan: Plan, arguments: Arguments) -> Native | None:
    """How torch records calls of these arguments, if it can and its gradients are those that would be chosen."""
    record = getattr(plan.backend, "record", None)
    if record is None or _node is None or _hooks_on_saved is None or not plan.backend.records(plan.problem):
        return None
    if plan.derivative("backward", arguments).backend is not plan.backend:
        return None
    return Native(record, plan.problem, arguments[TENSOR_COUNT:])
