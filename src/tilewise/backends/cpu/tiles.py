"""Which tiles of the score matrix a block of queries visits, and what of each is hidden.

The score matrix of one K/V head, its group of query heads stacked below each other, is cut into tiles of (group *
block_q, block_k). Tiles the band, the segments or the boolean mask exclude altogether are never visited; tiles they
keep altogether carry no mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tilewise import masks
from tilewise.inputs import Inputs
from tilewise.problem import Problem

# One thread's share of a tile, in elements. CPU: 512 KiB of fp32 leave room for the operands in a 2 MiB L2 (256 x 512
# was the fastest of 128..512 x 256..1024). Elsewhere launches cost more than cache misses.
_AREA = {"cpu": 1 << 17}
_ROWS = {"cpu": 256}
_AREA_ELSEWHERE, _ROWS_ELSEWHERE, _UNITS_ELSEWHERE = 1 << 20, 1024, 64
_LEAST_COLUMNS = 512


class Span(NamedTuple):
    """Batch items and K/V heads worked on together, one unit for each pair of them."""

    batch: slice
    heads: slice


class Tile(NamedTuple):
    """``keep`` is True where the pair takes part, broadcastable to (batch, heads, group, queries, keys); None: all."""

    queries: slice
    keys: slice
    keep: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Tiling:
    """Sizes of a tile, and how many units (batch item, K/V head) share one step: one thread each."""

    block_q: int
    block_k: int
    units: int

    @staticmethod
    def of(problem: Problem) -> Tiling:
        """The tiling that fits the problem and its device."""
        kind = problem.device_type
        area, group = _AREA.get(kind, _AREA_ELSEWHERE), max(problem.group, 1)
        most = max(_ROWS.get(kind, _ROWS_ELSEWHERE) // group, 1)
        block_q = max(min(1 << (most.bit_length() - 1), problem.seqlen_q), 1)
        rows = group * block_q
        block_k = max(min(max(_LEAST_COLUMNS, area // rows), problem.seqlen_k), 1)
        threads = torch.get_num_threads() if kind == "cpu" else _UNITS_ELSEWHERE
        return Tiling(block_q, block_k, threads * max(area // (rows * block_k), 1))

    def spans(self, problem: Problem) -> Iterator[Span]:
        """The problem's batch items and K/V heads, ``units`` at a time."""
        heads = min(self.units, problem.nheads_k)
        items = self.units // heads if heads == problem.nheads_k and heads else 1
        for b in range(0, problem.batch, items):
            for h in range(0, problem.nheads_k, max(heads, 1)):
                yield Span(
                    slice(b, min(b + items, problem.batch)),
                    slice(h, min(h + heads, problem.nheads_k)),
                )

    def query_blocks(self, problem: Problem) -> Iterator[slice]:
        """All queries, ``block_q`` at a time."""
        for start in range(0, problem.seqlen_q, self.block_q):
            yield slice(start, min(start + self.block_q, problem.seqlen_q))


def pairs(tensor: torch.Tensor, group: int, span: Span, queries: slice, keys: slice) -> torch.Tensor:
    """The part of a (batch, nheads, seqlen_q, seqlen_k) tensor that belongs to a tile, dimensions of size 1 left.

    Returns a view (batch, heads, group, queries, keys).
    """
    heads = tensor.shape[1]
    five = torch.unflatten(tensor, 1, (heads // group, group) if heads > 1 else (1, 1))
    for dim, part in ((0, span.batch), (1, span.heads), (3, queries), (4, keys)):
        if five.shape[dim] > 1:
            five = five.narrow(dim, part.start, part.stop - part.start)
    return five


class Visibility:
    """Answers, for one call, which tiles a block of queries visits."""

    def __init__(self, problem: Problem, inputs: Inputs, tiling: Tiling) -> None:
        self.problem, self.inputs, self.tiling = problem, inputs, tiling
        self.band = masks.band(problem)
        self.may_wait = problem.device_type == "cpu"  # reading a tile's mask elsewhere would wait for the device
        self._bands: dict[tuple[int, int, int], torch.Tensor] = {}

    @property
    def by_pair(self) -> bool:
        """Whether more than the band hides pairs."""
        return self.inputs.mask is not None or self.inputs.segments_q is not None

    def tiles(self, span: Span, queries: slice) -> Iterator[Tile]:
        """Tiles with at least one visible pair, keys ascending."""
        lower, upper = self.band
        if lower is not None and upper is not None and lower > upper:
            return
        first, last = masks.key_range(self.band, queries.start, queries.stop, self.problem.seqlen_k)
        for start in range(first, last, self.tiling.block_k):
            keys = slice(start, min(start + self.tiling.block_k, last))
            keep = None if self._full(queries, keys) else self._band_tile(queries, keys)
            if not self.by_pair:
                yield Tile(queries, keys, keep)
                continue
            visited, keep = self._pair_tile(span, queries, keys, keep)
            if visited:
                yield Tile(queries, keys, keep)

    def seen(self, span: Span) -> torch.Tensor:
        """Boolean (batch, heads, seqlen_k): True where some query of the span sees the key."""
        sizes = [part.stop - part.start for part in span]
        result = torch.zeros((*sizes, self.problem.seqlen_k), dtype=torch.bool, device=self.inputs.q.device)
        for queries in self.tiling.query_blocks(self.problem):
            for tile in self.tiles(span, queries):
                part = result[..., tile.keys]
                part |= True if tile.keep is None else tile.keep.any(-2).any(2)
        return result

    def _full(self, queries: slice, keys: slice) -> bool:
        return masks.tile_is_full(self.band, queries.start, queries.stop, keys.start, keys.stop)

    def _band_tile(self, queries: slice, keys: slice) -> torch.Tensor:
        """The band's (1, 1, 1, queries, keys), remembered: it depends on the tile's distance to the diagonal only."""
        place = (keys.start - queries.start, queries.stop - queries.start, keys.stop - keys.start)
        if place not in self._bands:
            self._bands[place] = masks.band_tile(
                self.band, queries.start, queries.stop, keys.start, keys.stop, self.inputs.q.device
            )[None, None, None]
        return self._bands[place]

    def _pair_tile(
        self, span: Span, queries: slice, keys: slice, keep: torch.Tensor | None
    ) -> tuple[bool, torch.Tensor | None]:
        """Whether the tile is visited, and what of it is kept by segments, mask and ``keep`` together."""
        inputs = self.inputs
        parts = [] if keep is None else [keep]
        if inputs.segments_q is not None and inputs.segments_k is not None:
            ids_q = inputs.segments_q[span.batch, queries]
            ids_k = inputs.segments_k[span.batch, keys]
            if self.may_wait and bool(((ids_q.amin(1) > ids_k.amax(1)) | (ids_q.amax(1) < ids_k.amin(1))).all()):
                return False, None
            parts.append((ids_q[:, :, None] == ids_k[:, None, :])[:, None, None])
        if inputs.mask is not None:
            parts.append(pairs(inputs.mask, self.problem.group, span, queries, keys))
        total = parts[0]
        for part in parts[1:]:
            total = total & part
        if not self.may_wait:
            return True, total
        return bool(total.any()), None if bool(total.all()) else total
