"""The one place that knows calculus: which operator is the derivative of which.

With F the forward, B its backward, J its forward mode and S the gradient of J by the primals,

    backward of F = B           forward mode of F = J
    backward of B: by (dout, dlse) J, by the primals S       (B is the gradient of <dout, out> + <dlse, lse>, so
    forward mode of B: B along (dout, dlse), S along the primals    its derivative is symmetric)
    backward of J: by the tangents B, by the primals S

so four operators give gradients, double backward, forward mode, Hessians and gradients through tangents. ``out`` and
``lse`` are handed to B, J and S as numbers that save work; their dependence on the primals is counted in S.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad

from tilewise import ops
from tilewise.inputs import TENSOR_COUNT, Arguments
from tilewise.problem import GRAD_NAMES

Tensors = tuple[torch.Tensor | None, ...]
_SLOTS = tuple(Arguments._fields.index(name) for name in GRAD_NAMES)
_COUNT = len(GRAD_NAMES)


def _is_plain(tensors: Sequence[Any]) -> bool:
    """Ordinary eager tensors and no mode watching: the dispatcher would only cost time."""
    return (
        not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and torch._C._len_torch_dispatch_stack() == 0
        and all(type(t) in (torch.Tensor, torch.nn.Parameter) and not t.is_meta for t in tensors if t is not None)
    )


def _run(name: str, flat: Sequence[Any]) -> Any:
    """The operator below autograd."""
    with torch._C._AutoDispatchBelowAutograd():
        return getattr(torch.ops.tilewise, name).default(*flat)


class _Saved:
    """Packs operator arguments into an autograd context and back: tensors saved, the rest as attributes."""

    @staticmethod
    def save(ctx: Any, flat: Sequence[Any], extra: Tensors = ()) -> None:
        tensors = [value for value in (*flat, *extra) if isinstance(value, torch.Tensor)]
        ctx.template = [None if isinstance(value, torch.Tensor) else (value,) for value in (*flat, *extra)]
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def load(ctx: Any) -> list[Any]:
        tensors = iter(ctx.saved_tensors)
        return [next(tensors) if slot is None else slot[0] for slot in ctx.template]


def _wanted(ctx: Any, offset: int) -> list[str]:
    """Names of the tensors, among arguments starting at ``offset``, whose gradient is asked for."""
    return [name for name, slot in zip(GRAD_NAMES, _SLOTS, strict=True) if ctx.needs_input_grad[offset + slot]]


def _asking(arguments: Sequence[Any], names: Sequence[str]) -> Arguments:
    return Arguments(*arguments)._replace(needs_grad=list(names))


def _spread(named: dict[str, torch.Tensor], offset: int, total: int) -> list[torch.Tensor | None]:
    """Gradients at their arguments' places, None elsewhere."""
    result: list[torch.Tensor | None] = [None] * total
    for name, slot in zip(GRAD_NAMES, _SLOTS, strict=True):
        result[offset + slot] = named.get(name)
    return result


def _by_name(names: Sequence[str], grads: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    return dict(zip(names, grads, strict=True))


def _add(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    return b if a is None else a if b is None else a + b


def _or_zeros(grad: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(like) if grad is None else grad


class Forward(torch.autograd.Function):
    """F: arguments to (out, lse)."""

    @staticmethod
    def forward(*flat: Any) -> Any:
        if _is_plain(flat[:TENSOR_COUNT]):
            return ops.forward(*flat)
        return _run("forward", flat)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _Saved.save(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        *flat, out, lse = _Saved.load(ctx)
        names = _wanted(ctx, 0)
        if not names or (grads[0] is None and grads[1] is None):
            return (None,) * len(flat)
        results = backward(_or_zeros(grads[0], out), grads[1], out, lse, *_asking(flat, names))
        return tuple(_spread(_by_name(names, results), 0, len(flat)))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        *flat, out, lse = _Saved.load(ctx)
        chosen = [tangents[slot] for slot in _SLOTS]
        return torch.ops.tilewise.jvp.default(*chosen, out, lse, *flat)


class Backward(torch.autograd.Function):
    """B: (dout, dlse, out, lse, *arguments) to the gradients in ``needs_grad``."""

    @staticmethod
    def forward(*flat: Any) -> Any:
        if _is_plain(flat[: 4 + TENSOR_COUNT]):
            return tuple(ops.backward(*flat))
        return tuple(_run("backward", flat))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _Saved.save(ctx, inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        dout, dlse, out, lse, *flat = _Saved.load(ctx)
        arguments = Arguments(*flat)
        tangents = _tangent_slots(arguments.needs_grad, grads)
        if all(tangent is None for tangent in tangents):
            return (None,) * (4 + len(flat))
        by_dout, by_dlse = torch.ops.tilewise.jvp.default(*tangents, out, lse, *flat)
        names = _wanted(ctx, 4)
        results = []
        if names:
            results = torch.ops.tilewise.second.default(
                *tangents, dout, _or_zeros(dlse, lse), out, lse, *_asking(flat, names)
            )
        spread = _spread(_by_name(names, results), 4, 4 + len(flat))
        spread[0], spread[1] = by_dout, None if dlse is None else by_dlse
        return tuple(spread)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        dout, dlse, out, lse, *flat = _Saved.load(ctx)
        names = list(Arguments(*flat).needs_grad)
        along = [tangents[4 + slot] for slot in _SLOTS]
        total: list[torch.Tensor | None] = [None] * len(names)
        if tangents[0] is not None or tangents[1] is not None:
            moved = backward(_or_zeros(tangents[0], dout), tangents[1], out, lse, *flat)
            total = [_add(a, b) for a, b in zip(total, moved, strict=True)]
        if any(tangent is not None for tangent in along):
            curved = torch.ops.tilewise.second.default(*along, dout, _or_zeros(dlse, lse), out, lse, *flat)
            total = [_add(a, b) for a, b in zip(total, curved, strict=True)]
        likes = [getattr(Arguments(*flat), name) for name in names]
        return tuple(_or_zeros(grad, like) for grad, like in zip(total, likes, strict=True))


def _tangent_slots(names: Sequence[str], grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Cotangents of gradients, in ``names`` order, as the six tangent slots of J and S."""
    named = dict(zip(names, grads, strict=True))
    return [named.get(name) for name in GRAD_NAMES]


class Jvp(torch.autograd.Function):
    """J: (six tangents, out, lse, *arguments) to the tangents of (out, lse)."""

    @staticmethod
    def forward(*flat: Any) -> Any:
        return _run("jvp", flat)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _Saved.save(ctx, inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        loaded = _Saved.load(ctx)
        tangents, (out, lse), flat = loaded[:_COUNT], loaded[_COUNT : _COUNT + 2], loaded[_COUNT + 2 :]
        if grads[0] is None and grads[1] is None:
            return (None,) * len(loaded)
        dout, dlse = _or_zeros(grads[0], out), _or_zeros(grads[1], lse)
        names = _wanted(ctx, _COUNT + 2)
        results: Any = []
        if names:
            results = torch.ops.tilewise.second.default(*tangents, dout, dlse, out, lse, *_asking(flat, names))
        spread = _spread(_by_name(names, results), _COUNT + 2, len(loaded))
        moving = [name for index, name in enumerate(GRAD_NAMES) if ctx.needs_input_grad[index]]
        if moving:
            by_tangents = _by_name(moving, backward(dout, dlse, out, lse, *_asking(flat, moving)))
            spread[:_COUNT] = [by_tangents.get(name) for name in GRAD_NAMES]
        return tuple(spread)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        loaded = _Saved.load(ctx)
        if any(tangents[_COUNT + 2 + slot] is not None for slot in _SLOTS):
            raise NotImplementedError(
                "tilewise: forward mode of forward mode is not implemented; for second derivatives use "
                "torch.func.hessian, jvp of grad, or grad of jvp"
            )
        return torch.ops.tilewise.jvp.default(*tangents[:_COUNT], *loaded[_COUNT:])


class Second(torch.autograd.Function):
    """S: its own derivatives would be of third order."""

    @staticmethod
    def forward(*flat: Any) -> Any:
        return tuple(_run("second", flat))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.count = len(inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError("tilewise: attention is differentiable twice; a third derivative was asked for")

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError("tilewise: attention is differentiable twice; a third derivative was asked for")


def _apply(function: type[torch.autograd.Function], flat: Sequence[Any]) -> Any:
    """Record ``function`` in whichever autograd level is running, torch.func's included."""
    bound = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    if torch._C._are_functorch_transforms_active():
        with enable_single_level_autograd_function():
            return bound(*flat)
    return bound(*flat)


def _is_recorded(flat: Sequence[Any]) -> bool:
    if forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active():
        return True
    return torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in flat)


def _kernel(name: str, function: type[torch.autograd.Function], listed: bool) -> Any:
    def autograd_kernel(*flat: Any) -> Any:
        if not _is_recorded(flat):
            return _run(name, flat)
        result = _apply(function, flat)
        return list(result) if listed else result

    return autograd_kernel


for _name, _function, _listed in (
    ("forward", Forward, False),
    ("backward", Backward, True),
    ("jvp", Jvp, False),
    ("second", Second, True),
):
    ops.LIBRARY.impl(_name, _kernel(_name, _function, _listed), "Autograd")


def forward(arguments: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse), recorded for differentiation; ordinary eager calls go around the dispatcher."""
    if _is_plain(arguments[:TENSOR_COUNT]):
        state = _apply(Forward, arguments) if _is_recorded(arguments[:TENSOR_COUNT]) else ops.forward(*arguments)
    else:
        state = torch.ops.tilewise.forward.default(*arguments)
    return state[0], state[1]


def backward(*flat: Any) -> Any:
    """B, recorded for differentiation, by the same short way."""
    if _is_plain(flat[: 4 + TENSOR_COUNT]):
        recorded = _is_recorded(flat[: 4 + TENSOR_COUNT])
        return _apply(Backward, flat) if recorded else ops.backward(*flat)
    return torch.ops.tilewise.backward.default(*flat)
