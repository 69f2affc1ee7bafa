"""e4m3 inputs with descales: checked, and an operator of their own, so that other calls carry nothing of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tilewise import ops
from tilewise.descale import FP8
from tilewise.device import device_facts
from tilewise.dispatch import registry
from tilewise.dispatch.choose import choose
from tilewise.errors import InvalidInput, InvalidType
from tilewise.inputs import Arguments, Inputs, describe, validate
from tilewise.problem import Problem

Descale = torch.Tensor | float | None


class Descales(NamedTuple):
    """What the stored numbers of q, k and v are multiplied by; None is 1."""

    q: Descale = None
    k: Descale = None
    v: Descale = None


NONE = Descales()


def _tensor(name: str, descale: Any, arguments: Arguments) -> torch.Tensor | None:
    """A descale as a tensor beside q, its kind checked."""
    if descale is None:
        return None
    if isinstance(descale, (int, float)) and not isinstance(descale, bool):
        return torch.full((), descale, dtype=torch.float32, device=arguments.q.device)
    if not isinstance(descale, torch.Tensor):
        raise InvalidType(f"{name}: must be a number, a torch.Tensor or None, got {type(descale).__name__}")
    if descale.dtype != torch.float32:
        raise InvalidType(f"{name}: dtype is {str(descale.dtype).removeprefix('torch.')}, must be float32")
    if descale.requires_grad and torch.is_grad_enabled():
        raise InvalidInput(f"{name}: requires grad, but fp8 has no gradient; detach it")
    return descale


def _per_head(name: str, descale: torch.Tensor | None, problem: Problem, arguments: Arguments) -> torch.Tensor | None:
    """A descale as (batch, nheads_k), a view."""
    if descale is None:
        return None
    if problem.dtype != FP8:
        has = str(problem.dtype).removeprefix("torch.")
        raise InvalidInput(f"{name}: is for float8_e4m3fn inputs, q is {has}; multiply the inputs by it instead")
    if descale.device != arguments.q.device:
        raise InvalidInput(f"{name}: is on {descale.device}, must be on q's device, {arguments.q.device}")
    sizes = (problem.batch, problem.nheads_k)
    if descale.numel() == 1:
        return descale.reshape(1, 1).expand(sizes)
    if tuple(descale.shape) not in (sizes, sizes[1:]):
        raise InvalidInput(
            f"{name}: shape is {tuple(descale.shape)}, must be one number, (nheads_k,) or (batch, nheads_k) with batch "
            f"{sizes[0]}, nheads_k {sizes[1]}"
        )
    return descale.expand(sizes)


def describe_scaled(arguments: Arguments, descales: Sequence[Any]) -> tuple[Problem, Inputs]:
    """As ``inputs.describe``, with the descales that were given.

    Raises:
        InvalidInput, InvalidType: naming the argument.
    """
    problem, inputs = describe(arguments)
    given = {}
    for letter, descale in zip("qkv", descales, strict=True):
        name = f"{letter}_descale"
        given[name] = _per_head(name, _tensor(name, descale, arguments), problem, arguments)
    names = tuple(name[0] for name, descale in given.items() if descale is not None)
    return problem.replace(descales=names), inputs.replace(**given)


def _forward(*flat: Any) -> ops.State:
    """(out, lse) of the chosen backend, both contiguous."""
    arguments = ops.arguments_of(flat[3:])
    problem, inputs = describe_scaled(arguments, flat[:3])
    name = choose(problem, device_facts(arguments.q.device), arguments.backend).name
    backend = registry.load("reference" if problem.is_empty else name)
    with torch._C._DisableAutocast():
        out, lse = backend.forward(problem, inputs)
    return out.contiguous(), lse.contiguous()


def _fake(*flat: Any) -> ops.State:
    arguments = ops.arguments_of(flat[3:])
    validate(arguments)
    return ops.empty_state(arguments)


def forward(arguments: Arguments, descales: Descales) -> ops.State:
    """(out, lse) of real values = stored x descale.

    Raises:
        InvalidInput, InvalidType: as ``describe_scaled``.
        UnsupportedProblem: a gradient is asked for, or no backend runs the rest.
    """
    named = zip("qkv", descales, strict=True)
    tensors = [_tensor(f"{letter}_descale", descale, arguments) for letter, descale in named]
    state: ops.State = torch.ops.tilewise.forward_fp8.default(*tensors, *arguments)
    return state


ops.register("forward_fp8", f"Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, {ops.ARGUMENTS}", _forward, _fake)
