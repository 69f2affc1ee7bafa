"""A plain call whose forward and gradients are torch's own kernels, recorded by torch's own node.

No Python prepares its backward: each step of it would fetch code and data that the tensors of a short call have pushed
out of the caches. Torch's node knows first derivatives alone, so a hook on it looks whether the backward is itself
recorded, and then puts gradients that have a derivative in the place of the node's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tilewise import autograd
from tilewise.dispatch.backend import Prepared
from tilewise.inputs import TENSOR_COUNT, Arguments
from tilewise.plan import Plan

# Private: where torch has them no more, every call is recorded by autograd.Forward.
_node: Any = getattr(torch._C, "_current_autograd_node", None)
_hooks_on_saved: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
_ABSENT = (None,) * (TENSOR_COUNT - 3)
_FIRST_THREE = ("q", "k", "v")


Way = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Native(NamedTuple):
    """A backend's prepared call, its plain values, and the way of the calls that torch must not record."""

    prepared: Prepared
    rest: tuple[Any, ...]
    otherwise: Way

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """out."""
        # hooks on saved tensors may bring q, k or v back in a layout that torch's kernel misreads
        recorded = None if _hooks_on_saved(True) is not None else self.prepared.record(q, k, v)
        if recorded is None:
            return self.otherwise(q, k, v)
        recorded[1].register_hook(self._with_derivatives)
        return recorded[0]

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


def native(plan: Plan, prepared: Prepared, arguments: Arguments, otherwise: Way) -> Way:
    """Calls of these arguments recorded by torch, if its gradients are those that would be chosen; or ``otherwise``."""
    if _node is None or _hooks_on_saved is None:
        return otherwise
    if plan.derivative("backward", arguments).backend is not plan.backend:
        return otherwise
    return Native(prepared, arguments[TENSOR_COUNT:], otherwise).run
