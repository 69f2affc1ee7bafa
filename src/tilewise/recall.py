"""A repeated call of the plainest kind: one look-up leads from its arguments to its plan, past what is already checked.

A first call goes the long way, and what it found is kept under everything that the checks, the choice and the gradient
depend on. Plainest means eager, q, k and v alone, whole (no window, no dropout), and no autocast, torch.func, forward
mode or torch_dispatch mode around it. On a CPU a short call is worth it: each step of the long way also fetches its
code and data anew, because the tensors have pushed them out of the caches.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from tilewise import autograd, options
from tilewise.inputs import TENSOR_COUNT, Arguments, Inputs
from tilewise.plan import Plan, find

_ABSENT = (None,) * (TENSOR_COUNT - 3)
_LIMIT = 4096

Key = tuple[object, ...]


class Recalled(NamedTuple):
    """The plan of a call, its plain values, and whether it is recorded for differentiation."""

    plan: Plan
    rest: tuple[Any, ...]
    recorded: bool

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """out."""
        if self.recorded:
            return autograd.record(self.plan, Arguments._make((q, k, v, *_ABSENT, *self.rest)))[0]
        out: torch.Tensor = self.plan.backend.forward(self.plan.problem, Inputs(q, k, v))[0]
        return out.contiguous()


CALLS: dict[Key, Recalled] = {}


def key_of(q: Any, k: Any, v: Any, *plain: Any) -> Key | None:
    """What the call is kept under; None if it is not of the plainest kind.

    ``plain``: the options that ``options.remembered`` takes.
    """
    if (
        torch.compiler.is_compiling()
        or torch._C._is_any_autocast_enabled()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
        or forward_ad._current_level >= 0
    ):
        return None
    try:
        return (
            (q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride()),
            (q.dtype, k.dtype, v.dtype, q.device, k.device, v.device),
            (q.__class__, k.__class__, v.__class__),
            torch.is_grad_enabled() and (q.requires_grad, k.requires_grad, v.requires_grad),
            torch.get_num_threads(),
            options.default.backend,
            options.remembered(*plain),
        )
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return None  # no tensors, none with strides, or a value with an error of its own: the long way says what


def keep(key: Key, arguments: Arguments) -> None:
    """Keep the call of checked arguments that ``key`` stands for, if it is one of ordinary tensors without dropout."""
    if arguments[3:TENSOR_COUNT] != _ABSENT or arguments.dropout_p or not autograd.is_plain(arguments[:3]):
        return
    if len(CALLS) >= _LIMIT:
        CALLS.clear()
    CALLS[key] = Recalled(find(arguments, "forward"), arguments[TENSOR_COUNT:], bool(arguments.needs_grad))
