"""Tensors as the tiles read them: (units, rows or keys, dim), and memory that is taken once.

A unit is a (batch item, K/V head) pair. The rows of a block of queries are those of the group's query heads, one head
below the other, so that K and V are never expanded.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch


class Span(NamedTuple):
    """Batch items and K/V heads worked on together, one unit for each pair of them."""

    batch: slice
    heads: slice

    @property
    def sizes(self) -> tuple[int, int]:
        """How many batch items and heads."""
        return self.batch.stop - self.batch.start, self.heads.stop - self.heads.start


class RowSide:
    """A span's part of a (batch, seqlen_q, nheads, dim) tensor, read and written block by block."""

    def __init__(self, tensor: torch.Tensor, span: Span, group: int) -> None:
        heads = slice(span.heads.start * group, span.heads.stop * group)
        part = torch.unflatten(tensor[span.batch, :, heads], 2, (span.sizes[1], group))
        self._view = part.permute(0, 2, 3, 1, 4)

    def load(self, queries: slice, dtype: torch.dtype, *, extra: int = 0) -> torch.Tensor:
        """A copy (units, rows, dim + extra) of a block, the extra columns uninitialised."""
        block = self._view[:, :, :, queries]
        *outer, dim = block.shape
        result = torch.empty(*outer, dim + extra, dtype=dtype, device=block.device)
        (result[..., :dim] if extra else result).copy_(block)
        return result.view(outer[0] * outer[1], outer[2] * outer[3], dim + extra)

    def store(self, queries: slice, values: torch.Tensor) -> None:
        """Write a block's (units, rows, dim)."""
        block = self._view[:, :, :, queries]
        block.copy_(values.view(block.shape))


def row_scalars(tensor: torch.Tensor, span: Span, group: int) -> RowSide:
    """A (batch, nheads, seqlen_q) tensor as one with dim 1."""
    return RowSide(tensor.transpose(1, 2)[..., None], span, group)


class Scratch:
    """Memory taken once and handed out by name in the shape asked for: fresh pages cost more than a pass over them."""

    def __init__(self, like: torch.Tensor, dtype: torch.dtype) -> None:
        self._like, self._dtype = like, dtype
        self._flat: dict[str, torch.Tensor] = {}
        self._views: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Uninitialised memory; what was taken under the same name before is overwritten."""
        view = self._views.get((name, shape))
        return self._new(name, shape) if view is None else view

    def _new(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        size = math.prod(shape)
        flat = self._flat.get(name)
        if flat is None or flat.numel() < size:
            flat = self._flat[name] = self._like.new_empty(size, dtype=self._dtype)
            self._views.clear()
        view = self._views[name, shape] = flat[:size].view(shape)
        return view


def load_keys(
    tensor: torch.Tensor, span: Span, into: Scratch, name: str, *, scale: float = 1.0, ones: bool = False
) -> torch.Tensor:
    """A copy (units, seqlen_k, dim) of a span's part of a (batch, seqlen_k, nheads_k, dim) tensor, times ``scale``.

    With ``ones`` it has a last column of ones, against which a column of the rows adds a number to every product. It
    lies in the scratch ``name``.
    """
    part = tensor[span.batch, :, span.heads].transpose(1, 2)
    *outer, dim = part.shape
    result = into.take(name, (*outer, dim + ones))
    body = result[..., :dim] if ones else result
    if scale == 1.0:
        body.copy_(part)
    else:
        torch.mul(part.to(body.dtype), scale, out=body)
    if ones:
        result[..., dim] = 1.0
    return result.flatten(0, 1)


def store_keys(tensor: torch.Tensor, span: Span, values: torch.Tensor) -> None:
    """The inverse of load_keys."""
    tensor[span.batch, :, span.heads] = torch.unflatten(values, 0, span.sizes).transpose(1, 2)


def pairs(tensor: torch.Tensor, group: int, span: Span, queries: slice, keys: slice) -> torch.Tensor:
    """A tile's part of a (batch, nheads, seqlen_q, seqlen_k) tensor, as a view (batch, heads, group, queries, keys).

    Dimensions of size 1 stay 1.
    """
    nheads = tensor.shape[1]
    five = torch.unflatten(tensor, 1, (nheads // group, group) if nheads > 1 else (1, 1))
    for dim, part in ((0, span.batch), (1, span.heads), (3, queries), (4, keys)):
        if five.shape[dim] > 1:
            five = five.narrow(dim, part.start, part.stop - part.start)
    return five


class Strips:
    """The parts of a tensor along one dimension that tiles read or add to; the views are remembered."""

    def __init__(self, whole: torch.Tensor, dim: int) -> None:
        self.whole, self._dim = whole, dim
        self._views: dict[tuple[int, int], torch.Tensor] = {}

    def __getitem__(self, part: slice) -> torch.Tensor:
        place = (part.start, part.stop)
        view = self._views.get(place)
        if view is None:
            view = self._views[place] = self.whole.narrow(self._dim, part.start, part.stop - part.start)
        return view
