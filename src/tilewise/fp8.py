"""e4m3 inputs with descales: checked, and brought to the form every backend takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tilewise.descale import BLOCK, FP8, blocks_of
from tilewise.errors import InvalidInput, InvalidType
from tilewise.inputs import DESCALES, Arguments, Inputs, check_tensor, describe
from tilewise.problem import Problem

Descale = torch.Tensor | float | None
_LARGEST = torch.finfo(torch.float32).max


class Descales(NamedTuple):
    """What the stored numbers of q, k and v are multiplied by; None is 1."""

    q: Descale = None
    k: Descale = None
    v: Descale = None


NONE = Descales()


def as_tensor(name: str, descale: Any, arguments: Arguments) -> torch.Tensor | None:
    """A descale as a tensor beside q, its kind checked."""
    if descale is None:
        return None
    if isinstance(descale, (int, float)) and not isinstance(descale, bool):
        if not abs(descale) <= _LARGEST:
            raise InvalidInput(f"{name}: is {descale}, must be finite and fit in fp32")
        return torch.full((), descale, dtype=torch.float32, device=arguments.q.device)
    check_tensor(name, descale, ", a number or None")
    if descale.dtype != torch.float32:
        raise InvalidType(f"{name}: dtype is {str(descale.dtype).removeprefix('torch.')}, must be float32")
    if descale.device != arguments.q.device:
        raise InvalidInput(f"{name}: is on {descale.device}, must be on q's device, {arguments.q.device}")
    if descale.requires_grad and torch.is_grad_enabled():
        raise InvalidInput(f"{name}: requires grad, but fp8 has no gradient; detach it")
    tensor: torch.Tensor = descale
    return tensor


def _in_full(name: str, descale: torch.Tensor | None, problem: Problem) -> torch.Tensor | None:
    """A descale as (batch, nheads_k) or (batch, nheads_k, blocks), a view."""
    if descale is None:
        return None
    if problem.dtype != FP8:
        has = str(problem.dtype).removeprefix("torch.")
        raise InvalidInput(f"{name}: is for float8_e4m3fn inputs, q is {has}; multiply the inputs by it instead")
    sizes = (problem.batch, problem.nheads_k)
    if descale.numel() == 1:
        return descale.reshape(1, 1).expand(sizes)
    blocks = blocks_of(problem.seqlen_q if name[0] == "q" else problem.seqlen_k)
    forms = [sizes[1:], sizes] if problem.varlen else [sizes[1:], sizes, (*sizes, blocks)]
    if tuple(descale.shape) not in forms:
        by_block = "" if problem.varlen else f", or (batch, nheads_k, blocks of {BLOCK}) with {blocks} blocks"
        raise InvalidInput(
            f"{name}: shape is {tuple(descale.shape)}, must be one number, (nheads_k,) or (batch, nheads_k) with batch "
            f"{sizes[0]}, nheads_k {sizes[1]}{by_block}"
        )
    return descale if descale.ndim == 3 else descale.expand(sizes)


def describe_scaled(arguments: Arguments, descales: Sequence[Any]) -> tuple[Problem, Inputs]:
    """As ``inputs.describe``, with the descales that were given.

    Raises:
        InvalidInput, InvalidType: naming the argument.
    """
    problem, inputs = describe(arguments)
    given = {}
    for name, descale in zip(DESCALES, descales, strict=True):
        given[name] = _in_full(name, as_tensor(name, descale, arguments), problem)
    names = tuple(name[0] for name, descale in given.items() if descale is not None)
    by_block = tuple(name[0] for name, descale in given.items() if descale is not None and descale.ndim == 3)
    return problem.replace(descales=names, block_descales=by_block), inputs.replace(**given)
