"""Which tiles of the score matrix a block of queries visits, and what of each is hidden.

The score matrix of one K/V head, with a row for each query and query head of its group, is cut into tiles of (group *
block_q, block_k). Tiles that band, segments or boolean mask exclude altogether are never visited; tiles they keep
altogether carry no mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tilewise import masks
from tilewise.backends.cpu.layout import Span, pairs
from tilewise.inputs import Inputs
from tilewise.problem import Problem

# Elements of a tile that a unit fills, and that a thread fills in a step. CPU: 512 KiB of fp32 a unit leave room for
# the operands in a 2 MiB L2; two units for each thread halve the steps. Elsewhere launches cost more than cache misses.
_AREA, _AREA_ELSEWHERE = 1 << 17, 1 << 20
_STEP = 1 << 18
_ROWS, _ROWS_ELSEWHERE = 256, 1024
_LEAST_COLUMNS, _UNITS_ELSEWHERE = 512, 64
# Elements of K, V and their gradients that a step may hold: 32 MiB of fp32, unless one unit for each thread needs more.
_COPIES = 1 << 23


class Tile(NamedTuple):
    """``keep`` is True where the pair takes part, broadcastable to (batch, heads, group, queries, keys); None: all.

    ``band`` says the same by the diagonals of the tile itself, where nothing else hides pairs.
    """

    queries: slice
    keys: slice
    keep: torch.Tensor | None = None
    band: masks.Band | None = None


@dataclass(frozen=True, slots=True)
class Tiling:
    """Sizes of a tile, and how many units (batch item, K/V head) share one step: one thread each."""

    block_q: int
    block_k: int
    units: int

    @staticmethod
    def of(problem: Problem) -> Tiling:
        """The tiling that fits the problem and its device."""
        on_cpu, group = problem.device_type == "cpu", max(problem.group, 1)
        area = _AREA if on_cpu else _AREA_ELSEWHERE
        most = max((_ROWS if on_cpu else _ROWS_ELSEWHERE) // group, 1)
        block_q = max(min(1 << (most.bit_length() - 1), problem.seqlen_q), 1)
        rows = group * block_q
        block_k = max(min(max(_LEAST_COLUMNS, area // rows), problem.seqlen_k), 1)
        if not on_cpu:
            return Tiling(block_q, block_k, _UNITS_ELSEWHERE * max(area // (rows * block_k), 1))
        threads = torch.get_num_threads()
        copies = 2 * max(problem.seqlen_k, 1) * (problem.headdim + problem.headdim_v)
        return Tiling(block_q, block_k, threads * max(min(_STEP // (rows * block_k), _COPIES // (copies * threads)), 1))

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

    def key_blocks(self, first: int, last: int) -> Iterator[slice]:
        """Keys first to last, ``block_k`` at a time; a short rest joins the block before it."""
        while first < last:
            stop = first + self.block_k
            if last - stop <= self.block_k // 2:
                stop = last
            yield slice(first, stop)
            first = stop


class Visibility:
    """Answers, for one call, which tiles a block of queries visits."""

    def __init__(self, problem: Problem, inputs: Inputs, tiling: Tiling) -> None:
        self.problem, self.inputs, self.tiling = problem, inputs, tiling
        self.band = masks.band(problem)
        self.may_wait = problem.device_type == "cpu"  # reading a tile's mask elsewhere would wait for the device
        self.by_pair = inputs.mask is not None or inputs.segments_q is not None
        self._bands: dict[tuple[int, int, int], tuple[torch.Tensor, masks.Band]] = {}

    def tiles(self, span: Span, queries: slice) -> Iterator[Tile]:
        """Tiles with at least one visible pair, keys ascending."""
        lower, upper = self.band
        if lower is not None and upper is not None and lower > upper:
            return
        first, last = masks.key_range(self.band, queries.start, queries.stop, self.problem.seqlen_k)
        full_first = first if lower is None else queries.stop - 1 + lower  # the keys that every query sees
        full_last = last if upper is None else queries.start + upper + 1
        for keys in self.tiling.key_blocks(first, last):
            full = full_first <= keys.start and keys.stop <= full_last
            banded = () if full else self._band_tile(queries, keys)
            if not self.by_pair:
                yield Tile(queries, keys, *banded)
                continue
            visited, keep = self._pair_tile(span, queries, keys, banded[0] if banded else None)
            if visited:
                yield Tile(queries, keys, keep)

    def seen(self, span: Span) -> torch.Tensor:
        """Boolean (batch, heads, seqlen_k): True where some query of the span sees the key."""
        result = torch.zeros((*span.sizes, self.problem.seqlen_k), dtype=torch.bool, device=self.inputs.q.device)
        for queries in self.tiling.query_blocks(self.problem):
            for tile in self.tiles(span, queries):
                part = result[..., tile.keys]
                part |= True if tile.keep is None else tile.keep.any(-2).any(2)
        return result

    def _band_tile(self, queries: slice, keys: slice) -> tuple[torch.Tensor, masks.Band]:
        """A tile's keep and band, remembered: its distance to the diagonal decides them."""
        shift = keys.start - queries.start
        place = (shift, queries.stop - queries.start, keys.stop - keys.start)
        if place not in self._bands:
            band = masks.Band(*(None if limit is None else limit - shift for limit in self.band))
            keep = masks.band_tile(band, 0, place[1], 0, place[2], self.inputs.q.device)[None, None, None]
            self._bands[place] = keep, band
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
