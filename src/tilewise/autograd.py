"""The one place that knows calculus: which operator is the derivative of which.

With F the forward, B its backward, J its forward mode and S the gradient of J by the primals,

    backward of F = B           forward mode of F = J
    backward of B: by (dout, dlse) J, by the primals S       (B is the gradient of <dout, out> + <dlse, lse>, so
    forward mode of B: B along (dout, dlse), S along the primals    its derivative is symmetric)
    backward of J: by the tangents B, by the primals S

so four operators give gradients, double backward, forward mode, Hessians and gradients through tangents. ``out`` and
``lse`` are handed to B, J and S as numbers that save work; their dependence on the primals is counted in S.

Each Function takes its tensors one by one and the operator's plain values as one tuple, ``rest``. Ordinary eager calls
go around the dispatcher, and F keeps the plan it ran by for its backward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad

from tilewise import ops
from tilewise.inputs import ABSENT, TENSOR_COUNT, Arguments, Inputs, check_tensors, inputs_of
from tilewise.plan import Plan, find
from tilewise.problem import GRAD_NAMES

Grad = torch.Tensor | None
_SLOTS = tuple(Arguments._fields.index(name) for name in GRAD_NAMES)
_SLOT = dict(zip(GRAD_NAMES, _SLOTS, strict=True))
_COUNT = len(GRAD_NAMES)
_NEEDS = Arguments._fields.index("needs_grad") - TENSOR_COUNT
_ORDINARY = (torch.Tensor, torch.nn.Parameter)
_is_wrapped: Callable[[torch.Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
_is_included: Callable[[Any], bool] = torch._C._dispatch_tls_is_dispatch_key_included
_MAPPING: Any = torch._C._dispatch_key_parse("VmapMode")


def is_plain(tensors: Sequence[Any]) -> bool:
    """Ordinary eager tensors and no mode watching: the dispatcher would only cost time."""
    if (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
        or _is_included(_MAPPING)  # is_grads_batched and vectorize=True, whose tensors look ordinary
    ):
        return False
    for tensor in tensors:
        # wrapped: by a level of torch.func that is left behind, as what ``vjp`` saves is when its function is called
        if tensor is not None and (type(tensor) not in _ORDINARY or tensor.is_meta or _is_wrapped(tensor)):
            return False
    return True


def _run(name: str, tensors: Sequence[Any], rest: Sequence[Any]) -> Any:
    """The operator below autograd."""
    if is_plain(tensors):
        return ops.IMPLEMENTATIONS[name](*tensors, *rest)
    operator = getattr(torch.ops.tilewise, name).default
    if not torch._C._are_functorch_transforms_active():
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*tensors, *rest)
    # a Function's forward runs with gradients off, which would hide the call from the outer torch.func levels
    with torch._C._AutoDispatchBelowAutograd(), torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
        return operator(*tensors, *rest)


def _save(ctx: Any, tensors: Sequence[Any], rest: Sequence[Any]) -> None:
    ctx.save_for_backward(*tensors)
    ctx.save_for_forward(*tensors)
    ctx.set_materialize_grads(False)
    ctx.rest = rest


@functools.cache
def _names(needs: tuple[bool, ...], offset: int) -> tuple[str, ...]:
    """Names of the tensors, among arguments starting at ``offset``, whose gradient is needed."""
    return tuple(name for name, slot in _SLOT.items() if needs[offset + slot])


def _wanted(ctx: Any, offset: int) -> tuple[str, ...]:
    """Names of the tensors, among arguments starting at ``offset``, whose gradient is asked for."""
    return _names(ctx.needs_input_grad, offset)


def asking(rest: tuple[Any, ...], names: tuple[str, ...]) -> tuple[Any, ...]:
    """The plain values, asking for the gradients of ``names``."""
    return rest if rest[_NEEDS] == names else (*rest[:_NEEDS], names, *rest[_NEEDS + 1 :])


def _spread(names: Sequence[str], grads: Sequence[torch.Tensor], offset: int, others: int = 1) -> list[Grad]:
    """Gradients at the places of their tensors, which start at ``offset``; None elsewhere and for what follows."""
    result: list[Grad] = [None] * (offset + TENSOR_COUNT + others)
    for name, grad in zip(names, grads, strict=True):
        result[offset + _SLOT[name]] = grad
    return result


def _six(names: Sequence[str], grads: Sequence[Grad]) -> list[Grad]:
    """Tangents, or cotangents of gradients, in ``names`` order, as the six tangent slots of J and S."""
    named = dict(zip(names, grads, strict=True))
    return [named.get(name) for name in GRAD_NAMES]


def _add(a: Grad, b: Grad) -> Grad:
    return b if a is None else a if b is None else a + b


def _or_zeros(grad: Grad, like: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(like) if grad is None else grad


def _strides(tensors: Sequence[torch.Tensor]) -> list[tuple[int, ...]]:
    """Of q, k and v, for which a plan is made: saved tensors can be packed away and come back in another layout."""
    return [tensor.stride() for tensor in tensors[:3]]


def _gradients(plan: Plan | None, flat: tuple[Any, ...], state: tuple[Any, ...]) -> Any:
    """The gradients that the arguments ``flat`` ask for; ``state``: dout, dlse, out, lse; ``plan``: where it fits."""
    dout, dlse, out, lse = state
    tensors, rest = flat[:TENSOR_COUNT], flat[TENSOR_COUNT:]
    if plan is not None and not is_differentiated() and is_plain((dout, dlse, *tensors)):
        arguments = Arguments._make(flat)
        return ops.run_backward(plan.derivative("backward", arguments), arguments, dout, dlse, out, lse)
    return backward((*state, *tensors), rest)


class Forward(torch.autograd.Function):
    """F: (tensors, rest, plan, state) to (out, lse); without a plan, by the dispatcher; a state is the result known."""

    @staticmethod
    def forward(ctx: Any, *flat: Any) -> Any:
        *tensors, rest, plan, state = flat
        if state is not None:
            out, lse = state
        elif plan is None:
            out, lse = _run("forward", tensors, rest)
        else:
            out, lse = ops.run_forward(plan, inputs_of(Arguments._make((*tensors, *rest)), plan.problem))
        _save(ctx, (*tensors, out, lse), rest)
        ctx.plan = plan
        ctx.strides = None if plan is None else _strides(tensors)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        *tensors, out, lse = ctx.saved_tensors
        names = _wanted(ctx, 0)
        if not names or (grads[0] is None and grads[1] is None):
            return (None,) * (TENSOR_COUNT + 3)
        plan = ctx.plan if ctx.plan is not None and ctx.strides == _strides(tensors) else None
        state = _or_zeros(grads[0], out), grads[1], out, lse
        return tuple(_spread(names, _gradients(plan, (*tensors, *asking(ctx.rest, names)), state), 0, 3))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        *tensors, out, lse = ctx.saved_tensors
        six = [tangents[slot] for slot in _SLOTS]
        return torch.ops.tilewise.jvp.default(*six, out, lse, *tensors, *ctx.rest)


class PlainForward(torch.autograd.Function):
    """F of q, k and v alone, ordinary eager tensors: (q, k, v, plan, rest) to out. It carries nothing absent."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan, rest: tuple[Any, ...]) -> Any:
        out, lse = plan.backend.forward(plan.problem, Inputs(q, k, v))
        out = out.contiguous()
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.set_materialize_grads(False)
        ctx.call = plan, rest, _strides((q, k, v))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        names = tuple(name for name, needed in zip(GRAD_NAMES, ctx.needs_input_grad[:3], strict=False) if needed)
        if grads[0] is None:
            return None, None, None, None, None
        plan, rest, strides = ctx.call
        plan = plan if strides == _strides((q, k, v)) else None
        flat = (q, k, v, *ABSENT, *asking(rest, names))
        named = dict(zip(names, _gradients(plan, flat, (grads[0], None, out, lse)), strict=True))
        return named.get("q"), named.get("k"), named.get("v"), None, None


class Backward(torch.autograd.Function):
    """B: (dout, dlse, out, lse, tensors, rest) to the gradients in ``needs_grad``."""

    @staticmethod
    def forward(ctx: Any, *flat: Any) -> Any:
        *tensors, rest = flat
        _save(ctx, tensors, rest)
        return tuple(_run("backward", tensors, rest))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        dout, dlse, out, lse, *tensors = ctx.saved_tensors
        six = _six(ctx.rest[_NEEDS], grads)
        names = _wanted(ctx, 4)
        if all(tangent is None for tangent in six):
            return (None,) * (4 + TENSOR_COUNT + 1)
        results: Any = []
        if names:
            rest = asking(ctx.rest, names)
            results = torch.ops.tilewise.second.default(*six, dout, _or_zeros(dlse, lse), out, lse, *tensors, *rest)
        spread = _spread(names, results, 4)
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            by_dout, by_dlse = torch.ops.tilewise.jvp.default(*six, out, lse, *tensors, *ctx.rest)
            spread[0], spread[1] = by_dout, None if dlse is None else by_dlse
        return tuple(spread)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        dout, dlse, out, lse, *tensors = ctx.saved_tensors
        names = ctx.rest[_NEEDS]
        six = [tangents[4 + slot] for slot in _SLOTS]
        total: list[Grad] = [None] * len(names)
        if tangents[0] is not None or tangents[1] is not None:
            moved = backward((_or_zeros(tangents[0], dout), tangents[1], out, lse, *tensors), ctx.rest)
            total = [_add(a, b) for a, b in zip(total, moved, strict=True)]
        if any(tangent is not None for tangent in six):
            curved = torch.ops.tilewise.second.default(*six, dout, _or_zeros(dlse, lse), out, lse, *tensors, *ctx.rest)
            total = [_add(a, b) for a, b in zip(total, curved, strict=True)]
        likes = [tensors[_SLOTS[GRAD_NAMES.index(name)]] for name in names]
        return tuple(_or_zeros(grad, like) for grad, like in zip(total, likes, strict=True))


class Jvp(torch.autograd.Function):
    """J: (six tangents, out, lse, tensors, rest) to the tangents of (out, lse)."""

    @staticmethod
    def forward(ctx: Any, *flat: Any) -> Any:
        *tensors, rest = flat
        _save(ctx, tensors, rest)
        return _run("jvp", tensors, rest)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        saved = ctx.saved_tensors
        six, (out, lse), tensors = saved[:_COUNT], saved[_COUNT : _COUNT + 2], saved[_COUNT + 2 :]
        if grads[0] is None and grads[1] is None:
            return (None,) * (len(saved) + 1)
        dout, dlse = _or_zeros(grads[0], out), _or_zeros(grads[1], lse)
        names = _wanted(ctx, _COUNT + 2)
        results: Any = []
        if names:
            rest = asking(ctx.rest, names)
            results = torch.ops.tilewise.second.default(*six, dout, dlse, out, lse, *tensors, *rest)
        spread = _spread(names, results, _COUNT + 2)
        moving = tuple(name for index, name in enumerate(GRAD_NAMES) if ctx.needs_input_grad[index])
        if moving:
            by_tangents = backward((dout, dlse, out, lse, *tensors), asking(ctx.rest, moving))
            spread[:_COUNT] = _six(moving, by_tangents)
        return tuple(spread)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        if any(tangents[_COUNT + 2 + slot] is not None for slot in _SLOTS):
            raise NotImplementedError(
                "tilewise: forward mode of forward mode is not implemented; for second derivatives use "
                "torch.func.hessian, jvp of grad, or grad of jvp"
            )
        return torch.ops.tilewise.jvp.default(*tangents[:_COUNT], *ctx.saved_tensors[_COUNT:], *ctx.rest)


class Second(torch.autograd.Function):
    """S: linear in its tangents, and symmetric as the Hessian it is; by anything else it would be of third order."""

    @staticmethod
    def forward(ctx: Any, *flat: Any) -> Any:
        *tensors, rest = flat
        _save(ctx, tensors, rest)
        return tuple(_run("second", tensors, rest))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """By the tangents alone: a node of ``Constant`` stands behind every other tensor."""
        spread: list[Grad] = [None] * (len(ctx.saved_tensors) + 1)
        moving = tuple(name for index, name in enumerate(GRAD_NAMES) if ctx.needs_input_grad[index])
        if moving and any(grad is not None for grad in grads):
            six = _six(ctx.rest[_NEEDS], grads)
            others = ctx.saved_tensors[_COUNT:]
            by_tangents = torch.ops.tilewise.second.default(*six, *others, *asking(ctx.rest, moving))
            spread[:_COUNT] = _six(moving, by_tangents)
        return tuple(spread)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return tuple(torch.ops.tilewise.second.default(*tangents[:_COUNT], *ctx.saved_tensors[_COUNT:], *ctx.rest))


class Constant(torch.autograd.Function):
    """What S has no derivative by: the tensor itself, and a refusal that only a derivative through it comes to."""

    @staticmethod
    def forward(ctx: Any, *flat: Any) -> Any:
        with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):  # for the outer torch.func levels
            return flat[0].view_as(flat[0])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError("tilewise: attention is differentiable twice; a third derivative was asked for")

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError("tilewise: attention is differentiable twice; a third derivative was asked for")


class ScaledForward(torch.autograd.Function):
    """F of fp8 inputs: it has no derivative, and says so wherever one is asked for."""

    @staticmethod
    def forward(ctx: Any, *flat: Any) -> Any:
        *tensors, rest = flat
        return _run("forward_fp8", tensors, rest)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError("tilewise: fp8 inputs have no gradient; detach what rides along")

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError("tilewise: fp8 inputs have no forward mode; a tangent came in with a tensor")


_plain_forward: Any = super(torch.autograd.Function, PlainForward).apply
_FUNCTIONS: dict[str, type[torch.autograd.Function]] = {
    "forward": Forward,
    "backward": Backward,
    "jvp": Jvp,
    "second": Second,
    "forward_fp8": ScaledForward,
}


def _apply(function: type[torch.autograd.Function], *flat: Any) -> Any:
    """Record ``function`` in whichever autograd level is running, torch.func's included."""
    bound = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    if torch._C._are_functorch_transforms_active():
        with enable_single_level_autograd_function():
            return bound(*flat)
    return bound(*flat)


def is_differentiated() -> bool:
    """Whether the derivative that is being computed may itself be differentiated: recorded, in forward mode, mapped."""
    return torch.is_grad_enabled() or torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def _is_recorded(tensors: Sequence[Any]) -> bool:
    """Whether a derivative may be asked for: reverse mode, forward mode, or a torch.func level."""
    if forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active():
        return True
    if not torch.is_grad_enabled():
        return False
    for tensor in tensors:
        if tensor is not None and tensor.requires_grad:
            return True
    return False


def _kernel(name: str) -> Any:
    """What the dispatcher runs at the autograd key."""
    count = [field.type for field in getattr(torch.ops.tilewise, name).default._schema.arguments]
    tensor_count = sum("Tensor" in str(kind) for kind in count)
    listed = name in ("backward", "second")

    def autograd_kernel(*flat: Any) -> Any:
        tensors, rest = flat[:tensor_count], flat[tensor_count:]
        if not _is_recorded(tensors):
            return _run(name, tensors, rest)
        unknown = (None, None) if name == "forward" else ()  # neither plan nor state
        if name == "second":
            others = (t if t is None or not t.is_floating_point() else _apply(Constant, t) for t in tensors[_COUNT:])
            tensors = (*tensors[:_COUNT], *others)
        result = _apply(_FUNCTIONS[name], *tensors, rest, *unknown)
        return list(result) if listed else result

    return autograd_kernel


for _name in _FUNCTIONS:
    ops.LIBRARY.impl(_name, _kernel(_name), "Autograd")


def forward(arguments: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse), recorded for differentiation; ordinary eager calls go around the dispatcher."""
    tensors = arguments[:TENSOR_COUNT]
    if not is_plain(tensors):
        check_tensors(arguments)
        state = torch.ops.tilewise.forward.default(*arguments)
    elif _is_recorded(tensors):
        state = record(find(arguments, "forward"), arguments)
    else:
        state = ops.forward(arguments)
    return state[0], state[1]


def record(plan: Plan, arguments: Arguments, state: ops.State | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of ordinary eager tensors by a plan that is at hand, recorded; ``state``: what it gives, if known."""
    out, lse = _apply(Forward, *arguments[:TENSOR_COUNT], arguments[TENSOR_COUNT:], plan, state)
    return out, lse


def record_plain(plan: Plan, rest: tuple[Any, ...], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """out of q, k and v alone by a plan that is at hand, recorded; not for a call that autocast or torch.func sees."""
    out: torch.Tensor = _plain_forward(q, k, v, plan, rest)
    return out


def backward(tensors: Sequence[Any], rest: Sequence[Any]) -> Any:
    """B, recorded for differentiation, by the same short way."""
    if not is_plain(tensors):
        return torch.ops.tilewise.backward.default(*tensors, *rest)
    return _apply(Backward, *tensors, rest) if _is_recorded(tensors) else ops.backward(*tensors, *rest)
