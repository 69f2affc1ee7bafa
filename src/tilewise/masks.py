"""Which (query i, key j) pairs take part: one answer for every backend, direction and cost model.

Causal and window rules are one thing, a diagonal band ``lower <= j - i <= upper``; segments and the boolean mask are
tested pair by pair. All of them AND together.

::

    causal, bottom-right (seqlen_q 3, seqlen_k 5)     window (1, 1), the same lengths
        j 0 1 2 3 4                                       j 0 1 2 3 4
    i 0   x x x . .                                   i 0   . x x x .
    i 1   x x x x .                                   i 1   . . x x x
    i 2   x x x x x                                   i 2   . . . x x
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tilewise.problem import Problem


class Band(NamedTuple):
    """Pair (i, j) is inside iff lower <= j - i <= upper; None is open."""

    lower: int | None
    upper: int | None


class TileCounts(NamedTuple):
    """Tiles of one (batch, head) score matrix that the band alone decides."""

    full: int
    partial: int
    skipped: int


def band(problem: Problem) -> Band:
    """The band of ``problem``; in the packed form call it on one sequence's problem."""
    shift = problem.seqlen_k - problem.seqlen_q
    lower = None if problem.window_left is None else shift - problem.window_left
    upper = None if problem.window_right is None else shift + problem.window_right
    if problem.causal is not None:
        corner = shift if problem.causal == "bottom_right" else 0
        upper = corner if upper is None else min(upper, corner)
    return Band(lower, upper)


def key_range(limits: Band, start_q: int, stop_q: int, seqlen_k: int) -> tuple[int, int]:
    """Keys [first, last) that queries [start_q, stop_q) can see; first == last when there are none."""
    first = 0 if limits.lower is None else max(0, start_q + limits.lower)
    last = seqlen_k if limits.upper is None else min(seqlen_k, stop_q + limits.upper)
    return (first, last) if first < last else (0, 0)


def query_range(limits: Band, start_k: int, stop_k: int, seqlen_q: int) -> tuple[int, int]:
    """Queries [first, last) that can see any of the keys [start_k, stop_k)."""
    first = 0 if limits.upper is None else max(0, start_k - limits.upper)
    last = seqlen_q if limits.lower is None else min(seqlen_q, stop_k - limits.lower)
    return (first, last) if first < last else (0, 0)


def tile_is_full(limits: Band, start_q: int, stop_q: int, start_k: int, stop_k: int) -> bool:
    """Whether the band keeps every pair of the tile, so that no mask arithmetic is needed."""
    above = limits.lower is None or start_k - (stop_q - 1) >= limits.lower
    below = limits.upper is None or (stop_k - 1) - start_q <= limits.upper
    return above and below


def band_tile(limits: Band, start_q: int, stop_q: int, start_k: int, stop_k: int, device: torch.device) -> torch.Tensor:
    """Boolean (stop_q - start_q, stop_k - start_k): True where the pair lies inside the band."""
    offset = torch.arange(start_k, stop_k, device=device) - torch.arange(start_q, stop_q, device=device)[:, None]
    keep = torch.ones_like(offset, dtype=torch.bool)
    if limits.lower is not None:
        keep &= offset >= limits.lower
    if limits.upper is not None:
        keep &= offset <= limits.upper
    return keep


def kept_pairs(limits: Band, seqlen_q: int, seqlen_k: int) -> int:
    """Pairs inside the band of one (batch, head) score matrix, in closed form."""

    def at_most(bound: int) -> int:
        """Pairs with j - i <= bound."""
        # rows i with 0 < i + bound + 1 < seqlen_k give i + bound + 1 keys, later rows all of them
        first = max(0, -bound)
        full_from = min(max(seqlen_k - 1 - bound, first), seqlen_q)
        if first >= seqlen_q:
            return 0
        ramp = full_from - first
        return ramp * (first + bound + 1) + ramp * (ramp - 1) // 2 + (seqlen_q - full_from) * seqlen_k

    if not seqlen_q or not seqlen_k:
        return 0
    total = seqlen_q * seqlen_k if limits.upper is None else at_most(limits.upper)
    below = 0 if limits.lower is None else at_most(limits.lower - 1)
    return max(0, total - below)


def count_tiles(limits: Band, seqlen_q: int, seqlen_k: int, block_m: int, block_n: int) -> TileCounts:
    """Full, partial and skipped tiles of one score matrix under the band, tile (block_m, block_n)."""
    blocks_n = -(-seqlen_k // block_n)
    if limits.lower is None and limits.upper is None:
        return TileCounts(-(-seqlen_q // block_m) * blocks_n, 0, 0)
    full = partial = skipped = 0
    for start_q in range(0, seqlen_q, block_m):
        stop_q = min(start_q + block_m, seqlen_q)
        first, last = key_range(limits, start_q, stop_q, seqlen_k)
        begin, end = (first // block_n, -(-last // block_n)) if last else (0, 0)
        # blocks that every query of the tile sees whole: no key before, none after, by ``tile_is_full``
        first_full = begin if limits.lower is None else -(-(stop_q - 1 + limits.lower) // block_n)
        reach = seqlen_k if limits.upper is None else start_q + limits.upper + 1
        last_full = end if reach >= seqlen_k else reach // block_n
        whole = max(0, min(end, last_full) - max(begin, first_full))
        full += whole
        partial += end - begin - whole
        skipped += blocks_n - (end - begin)
    return TileCounts(full, partial, skipped)
