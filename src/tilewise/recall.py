"""A repeated call of the plainest kind: one look at its tensors leads to its plan, past what is already checked.

A first call goes the long way, and what it found is kept beside a guard on everything about the tensors that the checks
and the choice depend on, torch's own: class, dtype, device, sizes, strides, requires_grad, and whether autocast,
torch.func or a torch_dispatch mode is on. Plainest means eager, q, k and v alone, whole (no window, no dropout). On a
CPU a short call is worth it: each step of the long way also fetches its code and data anew, because the tensors have
pushed them out of the caches.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from tilewise import autograd, options
from tilewise.inputs import TENSOR_COUNT, Arguments, Inputs
from tilewise.native import Native, native
from tilewise.plan import Plan, find

# None in a torch that was built without it: every call then takes the long way
_GUARD: Any = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None)
_ABSENT = (None,) * (TENSOR_COUNT - 3)
_SHAPES = 4  # kept for the same options, the newest first: those that do not fit are looked at in vain
_LIMIT = 512


class Recalled(NamedTuple):
    """A guard on the tensors of a call, its plan, its plain values, and how it is recorded for differentiation."""

    guard: Any
    plan: Plan
    rest: tuple[Any, ...]
    recorded: bool
    native: Native | None

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """out."""
        if self.native is not None:
            recorded = self.native.run(q, k, v)
            if recorded is not None:
                return recorded
        if self.recorded:
            return autograd.record(self.plan, Arguments._make((q, k, v, *_ABSENT, *self.rest)))[0]
        out: torch.Tensor = self.plan.backend.forward(self.plan.problem, Inputs(q, k, v))[0]
        return out.contiguous()


Key = tuple[object, ...]
CALLS: dict[Key, tuple[Recalled, ...]] = {}


def key_of(*plain: Any) -> Key | None:
    """Everything about a call but its tensors; None where nothing may be remembered, or an option is wrong.

    ``plain``: the options that ``options.remembered`` takes.
    """
    if torch.compiler.is_compiling() or forward_ad._current_level >= 0:
        return None
    try:
        checked = options.remembered(*plain)
    except (TypeError, ValueError):
        return None
    return checked, options.default.backend, torch.is_grad_enabled(), torch.get_num_threads()


def recall(key: Key, q: Any, k: Any, v: Any) -> Recalled | None:
    """The call that this one repeats."""
    for call in CALLS.get(key, ()):
        if call.guard(q, k, v):
            return call
    return None


def keep(key: Key, arguments: Arguments) -> Recalled | None:
    """The call of checked arguments, kept, if it is one of ordinary tensors without dropout."""
    tensors = arguments[:3]
    if _GUARD is None or torch._C._is_any_autocast_enabled() or not autograd.is_plain(tensors):
        return None
    if arguments[3:TENSOR_COUNT] != _ABSENT or arguments.dropout_p:
        return None
    plan = find(arguments, "forward")
    guard = _GUARD(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    if len(CALLS) >= _LIMIT:
        CALLS.clear()
    recorded = bool(arguments.needs_grad)
    call = Recalled(guard, plan, arguments[TENSOR_COUNT:], recorded, native(plan, arguments) if recorded else None)
    CALLS[key] = (call, *CALLS.get(key, ()))[:_SHAPES]
    return call
