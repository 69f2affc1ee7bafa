"""Batching rules: a vmapped call folds the new dimension into the batch, and runs as one call.

Three kinds of call are run sample by sample instead: packed ones, whose offsets may differ, those with dropout, whose
numbers depend on the batch index, so that folding would drop other pairs than the same call in a loop, and those with
descales.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from tilewise.inputs import Arguments
from tilewise.problem import GRAD_NAMES

_TANGENTS = tuple(f"{name}_tangent" for name in GRAD_NAMES)
_FIELDS = {
    "forward": Arguments._fields,
    "forward_fp8": ("q_descale", "k_descale", "v_descale", *Arguments._fields),
    "backward": ("dout", "dlse", "out", "lse", *Arguments._fields),
    "jvp": (*_TANGENTS, "out", "lse", *Arguments._fields),
    "second": (*_TANGENTS, "dout", "dlse", "out", "lse", *Arguments._fields),
}
_PER_BATCH = {"q", "k", "v", "dout", "out", "dlse", "lse", "segments_q", "segments_k"}
_SCORES = {"bias", "mask"}
_HEADS = {"alibi_slopes", "sink"}
_LEVELS = 64  # as many as torch's vmap inside torch.autograd has


class _Sizes(NamedTuple):
    samples: int
    batch: int


def _fold(name: str, value: torch.Tensor, dim: int | None, sizes: _Sizes, whole: bool) -> torch.Tensor:
    """One tensor argument with samples and batch as one dimension; left to broadcast unless ``whole``."""
    base = name.removesuffix("_tangent")
    sample = value if dim is None else value.movedim(dim, 0)
    own = value.ndim - (dim is not None)
    if base in _SCORES:
        shape = list(sample.shape[sample.ndim - own :])
        sample = sample.reshape(*sample.shape[: sample.ndim - own], *[1] * (4 - own), *shape)
        if dim is None and sample.shape[0] == 1 and not whole:
            return sample
    elif base in _HEADS and own == 1:
        if dim is None and not whole:
            return sample
        sample = sample.unsqueeze(-2)
    inner = sample.shape[1:] if dim is None else sample.shape[2:]
    return sample.expand(sizes.samples, sizes.batch, *inner).reshape(sizes.samples * sizes.batch, *inner)


def _unfold_gradient(grad: torch.Tensor, own_shape: torch.Size, sizes: _Sizes) -> torch.Tensor:
    """A folded gradient as one per sample, summed over the batch where its tensor had no batch of its own."""
    grad = grad.unflatten(0, sizes)  # type: ignore[no-untyped-call]
    if grad.shape[1:] == own_shape:
        return grad
    return grad.sum(1).reshape(sizes.samples, *own_shape)


def _own_shape(value: torch.Tensor, dim: int | None) -> torch.Size:
    return value.shape if dim is None else value.movedim(dim, 0).shape[1:]


def _one_by_one(operator: Any, samples: int, in_dims: Sequence[Any], flat: Sequence[Any]) -> list[Any]:
    """The operator for each sample, results stacked."""
    if not samples:  # a sample of zeros tells the shapes
        zeros = [
            value.new_zeros(_own_shape(value, dim)) if isinstance(value, torch.Tensor) else value
            for value, dim in zip(flat, in_dims, strict=True)
        ]
        return [result.new_empty((0, *result.shape)) for result in operator(*zeros)]
    is_batched = [dim is not None and isinstance(value, torch.Tensor) for value, dim in zip(flat, in_dims, strict=True)]
    results = [
        operator(
            *(
                value.select(dim, index) if batched else value
                for value, dim, batched in zip(flat, in_dims, is_batched, strict=True)
            )
        )
        for index in range(samples)
    ]
    return [torch.stack(parts) for parts in zip(*results, strict=True)]


def _folded(name: str, samples: int, in_dims: Sequence[Any], flat: Sequence[Any]) -> list[Any]:
    """One call for all samples."""
    fields = _FIELDS[name]
    values = dict(zip(fields, flat, strict=True))
    dims = {
        field: dim if isinstance(value, torch.Tensor) else None
        for field, value, dim in zip(fields, flat, in_dims, strict=True)
    }
    sizes = _Sizes(samples, _own_shape(values["q"], dims["q"])[0])
    needed = list(values["needs_grad"]) if name in ("backward", "second") else []
    whole = {*needed, *(grad for grad in GRAD_NAMES if values.get(f"{grad}_tangent") is not None)}
    folded = []
    for field, value in values.items():
        base = field.removesuffix("_tangent")
        if isinstance(value, torch.Tensor) and base in _PER_BATCH | _SCORES | _HEADS:
            value = _fold(field, value, dims[field], sizes, base in whole)
        folded.append(value)
    results = getattr(torch.ops.tilewise, name).default(*folded)
    if not needed:
        return [result.unflatten(0, sizes) for result in results]
    shapes = [_own_shape(values[grad], dims[grad]) for grad in GRAD_NAMES if grad in needed]
    return [_unfold_gradient(grad, shape, sizes) for grad, shape in zip(results, shapes, strict=True)]


class _Mapped(NamedTuple):
    """What ``rule`` reads of torch's own description of a vmap."""

    batch_size: int


def _unwrapped(value: Any) -> tuple[Any, int | None]:
    """A tensor of the vmap inside torch.autograd without its wrapper, and its level; what is not one, and None.

    The wrapper keeps its level to itself. Removed at another level, it stays, behind a new first dimension.
    """
    if not (isinstance(value, torch.Tensor) and torch._C._functorch.is_legacy_batchedtensor(value)):
        return value, None
    for level in range(1, _LEVELS + 1):
        plain = torch._remove_batch_dim(value, level, 1, 0)
        if not torch._C._functorch.is_legacy_batchedtensor(plain):
            return plain, level
    raise NotImplementedError(
        "tilewise: is_grads_batched or vectorize=True inside another is not implemented; use torch.func.vmap, jacrev, "
        "jacfwd or hessian"
    )


def inner_rule(name: str) -> Callable[..., Any]:
    """The same for the vmap inside torch.autograd: is_grads_batched, and vectorize=True of jacobian and hessian."""
    folded = rule(name)

    def batched(*flat: Any) -> Any:
        values, levels = zip(*map(_unwrapped, flat), strict=True)
        level = next(level for level in levels if level is not None)
        samples = next(value.shape[0] for value, own in zip(values, levels, strict=True) if own is not None)
        in_dims = [None if own is None else 0 for own in levels]
        results, _ = folded(_Mapped(samples), in_dims, *values)
        wrapped = [torch._add_batch_dim(result, 0, level) for result in results]
        return wrapped if isinstance(results, list) else tuple(wrapped)

    return batched


def rule(name: str) -> Callable[..., Any]:
    """The batching rule of one operator."""
    listed = name in ("backward", "second")

    def batched(info: Any, in_dims: Any, *flat: Any) -> Any:
        arguments = dict(zip(_FIELDS[name], flat, strict=True))
        alone = name == "forward_fp8" or arguments["cu_seqlens_q"] is not None or arguments["dropout_p"]
        if alone:
            results = _one_by_one(getattr(torch.ops.tilewise, name).default, info.batch_size, in_dims, flat)
        else:
            results = _folded(name, info.batch_size, in_dims, flat)
        return (results, [0] * len(results)) if listed else (tuple(results), (0,) * len(results))

    return batched
