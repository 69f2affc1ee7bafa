"""Batching rules: a vmapped call folds the new dimension into the batch where that is the same function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def _moved(value: Any, dim: int | None) -> Any:
    return value if dim is None or not isinstance(value, torch.Tensor) else value.movedim(dim, 0)


def _one_by_one(name: str, size: int, in_dims: Sequence[Any], flat: Sequence[Any]) -> Any:
    """Call the operator for each index of the batched dimension and stack the results."""
    operator = getattr(torch.ops.tilewise, name).default
    moved = [_moved(value, dim) for value, dim in zip(flat, in_dims, strict=True)]
    results = [
        operator(
            *(
                value[index] if dim is not None and isinstance(value, torch.Tensor) else value
                for value, dim in zip(moved, in_dims, strict=True)
            )
        )
        for index in range(size)
    ]
    stacked = [torch.stack(parts) for parts in zip(*results, strict=True)]
    return (stacked, [0] * len(stacked)) if isinstance(results[0], list) else (tuple(stacked), (0,) * len(stacked))


def rule(name: str) -> Callable[..., Any]:
    """The batching rule of one operator."""

    def batched(info: Any, in_dims: Any, *flat: Any) -> Any:
        return _one_by_one(name, info.batch_size, in_dims, flat)

    return batched
