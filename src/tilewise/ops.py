"""The operators torch sees: schemas, implementations, fake kernels, batching rules.

Four functions close the calculus up to second order: ``forward``, ``backward``, ``jvp`` (forward mode) and ``second``
(the gradient of jvp, which is all that double backward needs). Each takes the flat arguments of ``inputs.Arguments``;
the request for a backend crosses as a plain string, and the choice is made where the sizes are numbers. Their
derivatives are registered in ``autograd.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch.library import Library

from tilewise import batching
from tilewise.descale import out_dtype
from tilewise.dispatch.backend import Gradients
from tilewise.fp8 import Descales, as_tensor, describe_scaled
from tilewise.inputs import DESCALES, Arguments, Inputs, check_tensors, inputs_of, validate
from tilewise.plan import Plan, find, make
from tilewise.problem import GRAD_NAMES, Problem

_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? mask, Tensor? alibi_slopes, Tensor? sink, "
    "Tensor? segments_q, Tensor? segments_k, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? dropout_seed, "
    "str causal, int? window_left, int? window_right, float? softmax_scale, float softcap, float dropout_p, "
    "SymInt? max_seqlen_q, SymInt? max_seqlen_k, bool deterministic, str[] needs_grad, str backend"
)
_DESCALES = ", ".join(f"Tensor? {name}" for name in DESCALES)
_TANGENTS = ", ".join(f"Tensor? {name}_tangent" for name in GRAD_NAMES)

LIBRARY: Any = Library("tilewise", "DEF")  # type: ignore[no-untyped-call]
LIBRARY.define(f"forward({_ARGUMENTS}) -> (Tensor, Tensor)")
LIBRARY.define(f"forward_fp8({_DESCALES}, {_ARGUMENTS}) -> (Tensor, Tensor)")
LIBRARY.define(f"backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, {_ARGUMENTS}) -> Tensor[]")
LIBRARY.define(f"jvp({_TANGENTS}, Tensor out, Tensor lse, {_ARGUMENTS}) -> (Tensor, Tensor)")
LIBRARY.define(f"second({_TANGENTS}, Tensor dout, Tensor dlse, Tensor out, Tensor lse, {_ARGUMENTS}) -> Tensor[]")

_NEEDS = Arguments._fields.index("needs_grad")

State = tuple[torch.Tensor, torch.Tensor]
Optional = torch.Tensor | None
_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


def _beyond_autocast(function: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """``function`` with autocast off: it has cast the inputs, and must not round the state to half again."""

    @functools.wraps(function)
    def run(*given: _Given.args, **named: _Given.kwargs) -> _Result:
        if not torch._C._is_any_autocast_enabled():
            return function(*given, **named)
        with torch._C._DisableAutocast():
            return function(*given, **named)

    return run


def _arguments(flat: Sequence[Any]) -> Arguments:
    """The dispatcher hands lists over; a tuple can be part of a key."""
    return Arguments._make((*flat[:_NEEDS], tuple(flat[_NEEDS]), *flat[_NEEDS + 1 :]))


def forward(arguments: Arguments) -> State:
    """(out, lse) of the chosen backend; out is contiguous, lse as it comes: few callers look at it."""
    plan = find(arguments, "forward")
    return run_forward(plan, inputs_of(arguments, plan.problem))


@_beyond_autocast
def run_forward(plan: Plan, inputs: Inputs) -> State:
    """``forward`` by a plan that is at hand."""
    out, lse = plan.backend.forward(plan.problem, inputs)
    return out.contiguous(), lse


def _forward_operator(*flat: Any) -> State:
    """``forward`` for the dispatcher, both contiguous as its fake kernel says."""
    out, lse = forward(_arguments(flat))
    return out, lse.contiguous()


def scaled_forward(arguments: Arguments, descales: Descales) -> State:
    """(out, lse) of fp8 inputs with descales; an operator of its own, so that other calls carry nothing of them."""
    check_tensors(arguments)
    tensors = [as_tensor(name, descale, arguments) for name, descale in zip(DESCALES, descales, strict=True)]
    state: State = torch.ops.tilewise.forward_fp8.default(*tensors, *arguments)
    return state


def _scaled_operator(*flat: Any) -> State:
    arguments = _arguments(flat[3:])
    problem, inputs = describe_scaled(arguments, flat[:3])
    out, lse = run_forward(make(problem, "forward", arguments), inputs)
    return out, lse.contiguous()


def _as_given(grads: Gradients, names: tuple[str, ...], arguments: Arguments) -> list[torch.Tensor]:
    """Gradients in the shapes and dtypes of the caller's tensors."""
    result = []
    for name in names:
        like = getattr(arguments, name)
        grad = grads[name]
        if grad.shape != like.shape:
            grad = grad.reshape(like.shape) if name == "bias" else grad.sum_to_size(like.shape)
        if grad.dtype != like.dtype:
            grad = grad.to(like.dtype)
        result.append(grad.contiguous())
    return result


def _counted(dlse: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """dlse without the rows that see nothing: -inf is a constant, whatever 2 * lse * 0 made of it."""
    return dlse.masked_fill(lse == -torch.inf, 0.0)


def backward(
    dout: torch.Tensor, dlse: Optional, out: torch.Tensor, lse: torch.Tensor, *flat: Any
) -> list[torch.Tensor]:
    """The gradients named in ``needs_grad``, in that order."""
    arguments = _arguments(flat)
    return run_backward(find(arguments, "backward"), arguments, dout, dlse, out, lse)


@_beyond_autocast
def run_backward(
    plan: Plan, arguments: Arguments, dout: torch.Tensor, dlse: Optional, out: torch.Tensor, lse: torch.Tensor
) -> list[torch.Tensor]:
    """``backward`` by a plan that is at hand."""
    inputs = inputs_of(arguments, plan.problem)
    dlse = None if dlse is None else _counted(dlse, lse)
    grads = plan.backend.backward(plan.problem, inputs, out, lse, dout, dlse)
    return _as_given(grads, plan.problem.needs_grad, arguments)


def _named_tangents(tangents: tuple[Optional, ...], problem: Problem) -> Gradients:
    """Tangents by name, in the forms that ``Inputs`` gives their primals."""
    named = {}
    for name, tangent in zip(GRAD_NAMES, tangents, strict=True):
        if tangent is None:
            continue
        if name == "bias":
            tangent = tangent[(None,) * (4 - tangent.ndim)]
        elif name in ("alibi_slopes", "sink"):
            tangent = tangent.to(problem.state_dtype).expand(problem.batch, problem.nheads)
        named[name] = tangent
    return named


@_beyond_autocast
def jvp(*flat: Any) -> State:
    """Tangents of (out, lse)."""
    count = len(GRAD_NAMES)
    tangents, (out, lse), arguments = flat[:count], flat[count : count + 2], _arguments(flat[count + 2 :])
    plan = find(arguments, "jvp")
    inputs = inputs_of(arguments, plan.problem)
    named = _named_tangents(tangents, plan.problem)
    out_tangent, lse_tangent = plan.backend.jvp(plan.problem, inputs, out, lse, named)
    return out_tangent.contiguous(), lse_tangent.contiguous()


@_beyond_autocast
def second(*flat: Any) -> list[torch.Tensor]:
    """Gradient of <dout, jvp_out> + <dlse, jvp_lse> by the primals in ``needs_grad``."""
    count = len(GRAD_NAMES)
    tangents, arguments = flat[:count], _arguments(flat[count + 4 :])
    dout, dlse, out, lse = flat[count : count + 4]
    plan = find(arguments, "second")
    inputs = inputs_of(arguments, plan.problem)
    named = _named_tangents(tangents, plan.problem)
    grads = plan.backend.second(plan.problem, inputs, out, lse, named, dout, _counted(dlse, lse))
    return _as_given(grads, plan.problem.needs_grad, arguments)


def _empty_state(arguments: Arguments) -> State:
    """What forward returns, without its numbers; checks shapes and dtypes as forward does."""
    validate(arguments)
    q, v = arguments.q, arguments.v
    out = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=out_dtype(q.dtype))
    rows = (q.shape[1], q.shape[0]) if arguments.cu_seqlens_q is not None else (q.shape[0], q.shape[2], q.shape[1])
    return out, q.new_empty(rows, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)


def _empty_grads(arguments: Arguments) -> list[torch.Tensor]:
    likes = [getattr(arguments, name) for name in GRAD_NAMES if name in arguments.needs_grad]
    return [like.new_empty(like.shape) for like in likes]


_FAKES: dict[str, Callable[..., Any]] = {
    "forward": lambda *flat: _empty_state(_arguments(flat)),
    "forward_fp8": lambda *flat: _empty_state(_arguments(flat[3:])),
    "backward": lambda *flat: _empty_grads(_arguments(flat[4:])),
    "jvp": lambda *flat: _empty_state(_arguments(flat[len(GRAD_NAMES) + 2 :])),
    "second": lambda *flat: _empty_grads(_arguments(flat[len(GRAD_NAMES) + 4 :])),
}
IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "forward": _forward_operator,
    "backward": backward,
    "jvp": jvp,
    "second": second,
    "forward_fp8": _scaled_operator,
}

for _name, _function in IMPLEMENTATIONS.items():
    LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tilewise::{_name}", _FAKES[_name], lib=LIBRARY)
    torch.library.register_vmap(f"tilewise::{_name}", batching.rule(_name), lib=LIBRARY)
    LIBRARY.impl(_name, batching.inner_rule(_name), "Batched")
