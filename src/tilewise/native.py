"""A plain call whose forward and gradients are torch's own kernels, recorded by torch's own node.

No Python prepares its backward, which a short call would find out of the caches. But torch's node knows first
derivatives alone. So a hook ahead of it looks whether its gradients may themselves be differentiated; if so, gradients
that have a derivative take the place of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from tilewise import autograd
from tilewise.dispatch.backend import Prepared, State
from tilewise.inputs import ABSENT, TENSOR_COUNT, Arguments
from tilewise.plan import Plan
from tilewise.problem import GRAD_NAMES

# Private: where torch has them no more, every call is recorded by autograd.Forward.
_node: Any = getattr(torch._C, "_current_autograd_node", None)
_hooks_on_saved: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)

Way = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Grads = tuple[torch.Tensor | None, ...]


class Otherwise(Protocol):
    """The way by autograd.Forward; ``state``: (out, lse) if they are known."""

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, state: State | None = None
    ) -> torch.Tensor: ...


class Native(NamedTuple):
    """A prepared call, its plain values, and the way of the calls that torch must not record."""

    prepared: Prepared
    rest: tuple[Any, ...]
    otherwise: Otherwise

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """out, contiguous, recorded by torch; by ``otherwise`` where torch must not."""
        ignore_tracing = True
        # hooks on saved tensors may bring q, k or v back in a layout that torch's kernel misreads
        hooked = _hooks_on_saved(ignore_tracing) is not None
        out, lse, node = self.prepared.record(q, k, v)
        if node is None or hooked:
            return self.otherwise(q, k, v, (out.detach(), lse))
        node.register_prehook(self._before)
        return out

    def _before(self, cotangents: Grads) -> Grads | None:
        """Where the gradients may be differentiated: let the node compute on zeros, and put others in their place."""
        dout = cotangents[0]
        if dout is None or not autograd.is_differentiated():
            return None
        node = _node()

        def replace(grads: Grads, _zeros: Grads) -> Grads:
            handle.remove()
            return self._gradients(node, dout, grads)

        handle = node.register_hook(replace)
        return (torch.zeros_like(node._saved_output, requires_grad=False),)

    def _gradients(self, node: Any, dout: torch.Tensor, places: Grads) -> Grads:
        """What ``node`` owes where ``places`` has a tensor: heads second as it has them, and differentiable."""
        saved = node._saved_query, node._saved_key, node._saved_value, node._saved_output
        q, k, v, out, dout = (tensor.transpose(1, 2) for tensor in (*saved, dout))
        owed = tuple(name for name, place in zip(GRAD_NAMES, places, strict=False) if place is not None)
        tensors = (dout, None, out, node._saved_logsumexp, q, k, v, *ABSENT)
        grads = iter(autograd.backward(tensors, autograd.asking(self.rest, owed)))
        return tuple(None if place is None else next(grads).transpose(1, 2) for place in places)


def native(plan: Plan, prepared: Prepared, arguments: Arguments, otherwise: Otherwise) -> Way:
    """Calls of these arguments recorded by torch, if its gradients are those that would be chosen; or ``otherwise``."""
    if _node is None or _hooks_on_saved is None:
        return otherwise
    if plan.derivative("backward", arguments).backend is not plan.backend:
        return otherwise
    return Native(prepared, arguments[TENSOR_COUNT:], otherwise).run
