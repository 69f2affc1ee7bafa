"""A repeated call of the plainest kind: one look at its tensors leads to its plan, past what is already checked.

A first call goes the long way, and what it found is kept beside a guard on everything about the tensors that the checks
and the choice depend on, torch's own: class, dtype, device, sizes, strides, requires_grad, and whether autocast or
torch.func is on. Plainest means eager, with no torch_dispatch mode, and q, k and v alone, three tensors, whole (no
window, no dropout). On a CPU a short call is worth it: each step of the long way also fetches its code and data anew,
because the tensors have pushed them out of the caches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from tilewise import autograd, options
from tilewise.dispatch.backend import State
from tilewise.inputs import ABSENT, TENSOR_COUNT, Arguments, Inputs
from tilewise.native import Way, native
from tilewise.plan import Plan, find

# None in a torch that was built without it: every call then takes the long way
_GUARD: Any = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None)
_SHAPES = 4  # kept for the same options, the newest first: those that do not fit are looked at in vain
_LIMIT = 512


class Recalled(NamedTuple):
    """A guard on the tensors of a call, and what gives its out from them."""

    guard: Callable[..., bool]
    run: Way


Key = tuple[object, ...]
CALLS: dict[Key, tuple[Recalled, ...]] = {}


def key_of(*plain: Any) -> Key | None:
    """Everything about a call but its tensors; None where nothing may be remembered, or an option is wrong.

    ``plain``: the options that ``options.remembered`` takes.
    """
    if torch.compiler.is_compiling() or forward_ad._current_level >= 0 or torch._C._len_torch_dispatch_stack():
        return None
    try:
        checked = options.remembered(*plain)
    except (TypeError, ValueError):
        return None
    return checked, options.default.backend, torch.is_grad_enabled(), torch.get_num_threads()


def recall(key: Key, q: Any, k: Any, v: Any) -> torch.Tensor | None:
    """out of the call that this one repeats; None if there is none."""
    calls = CALLS.get(key, ())
    # the guard asks for strides, and a nested tensor's end the process
    if calls and any(getattr(tensor, "is_nested", False) for tensor in (q, k, v)):
        return None
    for call in calls:
        if call.guard(q, k, v):
            return call.run(q, k, v)
    return None


def keep(key: Key, arguments: Arguments) -> torch.Tensor | None:
    """out of checked arguments, whose call is kept; None unless it is one of ordinary tensors without dropout."""
    tensors = arguments[:3]
    if _GUARD is None or torch._C._is_any_autocast_enabled() or not autograd.is_plain(tensors):
        return None
    if arguments[3:TENSOR_COUNT] != ABSENT or arguments.dropout_p:
        return None
    q, k, v = tensors
    if q is k or k is v or v is q:  # the guard takes no tensor twice
        return None
    way = _way(find(arguments, "forward"), arguments)  # checks the tensors, which the guard takes as they are
    call = Recalled(_GUARD(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check, way)
    if len(CALLS) >= _LIMIT:
        CALLS.clear()
    CALLS[key] = (call, *CALLS.get(key, ()))[:_SHAPES]
    return call.run(q, k, v)


def _way(plan: Plan, arguments: Arguments) -> Way:
    """The shortest way from q, k and v to out."""
    backend, problem, rest = plan.backend, plan.problem, arguments[TENSOR_COUNT:]
    prepared = backend.prepared(problem) if hasattr(backend, "prepared") else None

    def recorded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, state: State | None = None) -> torch.Tensor:
        return autograd.record(plan, Arguments._make((q, k, v, *ABSENT, *rest)), state)[0]

    def computed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = backend.forward(problem, Inputs(q, k, v))[0]
        return out.contiguous()

    if not arguments.needs_grad:
        return computed if prepared is None else prepared.run
    if prepared is None:
        return functools.partial(autograd.record_plain, plan, rest)
    return native(plan, prepared, arguments, recorded)
