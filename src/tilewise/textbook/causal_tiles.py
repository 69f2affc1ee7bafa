"""Which tiles of the score matrix a causal mask or a window skips, counted and in closed form.

Every such rule keeps the pairs of a band: lower <= j - i <= upper. A block of queries [i0, i1) then touches exactly the
keys from i0 + lower to i1 - 1 + upper, and sees all of those from i1 - 1 + lower to i0 + upper: two intervals answer
for every tile.

    corner        causal upper              with window_size = (left, 0), lower
    bottom-right  seqlen_k - seqlen_q       seqlen_k - seqlen_q - left
    top-left      0                         (windows are bottom-right)

Run: ``python -m tilewise.textbook.causal_tiles``.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch


class Band(NamedTuple):
    """Pair (i, j) takes part iff lower <= j - i <= upper."""

    seqlen_q: int
    seqlen_k: int
    lower: float
    upper: float


class Tiles(NamedTuple):
    """How many tiles are skipped, need no mask, or need one."""

    skipped: int
    full: int
    masked: int


def causal(seqlen_q: int, seqlen_k: int, corner: str = "bottom_right", left: int | None = None) -> Band:
    """The causal band; ``left`` also bounds how many earlier keys a query sees, and then the corner is bottom-right."""
    upper = seqlen_k - seqlen_q if corner == "bottom_right" else 0
    return Band(seqlen_q, seqlen_k, -math.inf if left is None else upper - left, upper)


def count_pairs(band: Band, block: int) -> tuple[Tiles, int]:
    """Tiles by looking at every pair, and the number of pairs kept."""
    difference = torch.arange(band.seqlen_k)[None, :] - torch.arange(band.seqlen_q)[:, None]
    keep = (difference >= band.lower) & (difference <= band.upper)
    tiles = [tile for rows in torch.split(keep, block, 0) for tile in torch.split(rows, block, 1)]
    full = sum(bool(tile.all()) for tile in tiles)
    skipped = sum(not bool(tile.any()) for tile in tiles)
    return Tiles(skipped, full, len(tiles) - full - skipped), int(keep.sum())


def key_blocks(band: Band, m_block: int, block: int) -> tuple[range, range]:
    """Key blocks that query block ``m_block`` touches, and those among them that need no mask."""
    first, last = m_block * block, min((m_block + 1) * block, band.seqlen_q) - 1
    start, stop = max(0, first + band.lower), min(band.seqlen_k - 1, last + band.upper)
    touched = range(int(start) // block, int(stop) // block + 1) if start <= stop else range(0)
    full_start, full_stop = max(0, last + band.lower), min(band.seqlen_k - 1, first + band.upper)
    ends = [min((n_block + 1) * block, band.seqlen_k) - 1 for n_block in touched]
    inside = [n for n, end in zip(touched, ends, strict=True) if n * block >= full_start and end <= full_stop]
    return touched, range(inside[0], inside[-1] + 1) if inside else range(0)


def count_blocks(band: Band, block: int) -> Tiles:
    """Tiles from the intervals of each query block: no pair is looked at."""
    blocks_q, blocks_k = math.ceil(band.seqlen_q / block), math.ceil(band.seqlen_k / block)
    rows = [key_blocks(band, m_block, block) for m_block in range(blocks_q)]
    touched, full = sum(len(row[0]) for row in rows), sum(len(row[1]) for row in rows)
    return Tiles(blocks_q * blocks_k - touched, full, touched - full)


def closed_form(blocks_q: int, blocks_k: int, corner: str = "bottom_right", window: int | None = None) -> Tiles:
    """Tiles of a causal mask in blocks: lengths are blocks_q and blocks_k blocks of any size above 1.

    ``window`` blocks of earlier keys (0 < window < blocks_q) are seen when given; that form is for equal lengths.
    """
    if window is not None:
        masked = blocks_q + (blocks_q - window)
        touched = blocks_q * (window + 1) - window * (window + 1) // 2
    else:
        square = min(blocks_q, blocks_k)
        masked, touched = square, square * (square + 1) // 2
        if corner == "bottom_right":
            touched += blocks_q * max(0, blocks_k - blocks_q)
        else:
            touched += blocks_k * max(0, blocks_q - blocks_k)
    return Tiles(blocks_q * blocks_k - touched, touched - masked, masked)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, band: Band, block: int) -> tuple[torch.Tensor, int]:
    """One head over the touched tiles only: q (seqlen_q, headdim), k, v (seqlen_k, ...) -> out and tiles done."""
    out, done = q.new_zeros(q.shape[0], v.shape[1]), 0
    for m_block in range(math.ceil(band.seqlen_q / block)):
        touched, full = key_blocks(band, m_block, block)
        rows = torch.arange(m_block * block, min((m_block + 1) * block, band.seqlen_q))
        row_max, row_sum, acc = q.new_full((len(rows),), -torch.inf), q.new_zeros(len(rows)), out[rows]
        for n_block in touched:
            columns = torch.arange(n_block * block, min((n_block + 1) * block, band.seqlen_k))
            scores = q[rows] @ k[columns].T * q.shape[1] ** -0.5
            if n_block not in full:
                difference = columns[None, :] - rows[:, None]
                scores.masked_fill_((difference < band.lower) | (difference > band.upper), -torch.inf)
            new_max = torch.maximum(row_max, scores.amax(1))
            safe = new_max.clamp_min(torch.finfo(q.dtype).min)
            weights, rescale = (scores - safe[:, None]).exp(), (row_max - safe).exp()
            row_sum, acc = row_sum * rescale + weights.sum(1), acc * rescale[:, None] + weights @ v[columns]
            row_max, done = new_max, done + 1
        out[rows] = acc / row_sum.clamp_min(torch.finfo(q.dtype).tiny)[:, None]
    return out, done


# name, blocks of queries, blocks of keys, corner, blocks of earlier keys in the window
CASES = (
    ("causal", 16, 16, "bottom_right", None),
    ("causal, bottom-right", 8, 16, "bottom_right", None),
    ("causal, top-left", 8, 16, "top_left", None),
    ("causal, bottom-right", 16, 8, "bottom_right", None),
    ("causal, top-left", 16, 8, "top_left", None),
    ("causal, window of 4 blocks", 16, 16, "bottom_right", 4),
    ("causal, window of 1 block", 16, 16, "bottom_right", 1),
)
BLOCK = 16


def main() -> None:
    """Print, for every case, the tiles counted by looking, those of the closed form, and the pairs kept."""
    print(f"tiles of {BLOCK} x {BLOCK}; skipped / full / masked")
    print(f"{'mask':<28} {'seqlen_q':>8} {'seqlen_k':>8} {'counted':>15} {'closed form':>15} {'pairs kept':>11}")
    for name, blocks_q, blocks_k, corner, window in CASES:
        band = causal(blocks_q * BLOCK, blocks_k * BLOCK, corner, None if window is None else window * BLOCK)
        counted, pairs = count_pairs(band, BLOCK)
        columns = [" / ".join(map(str, tiles)) for tiles in (counted, closed_form(blocks_q, blocks_k, corner, window))]
        print(f"{name:<28} {band.seqlen_q:>8} {band.seqlen_k:>8} {columns[0]:>15} {columns[1]:>15} {pairs:>11,}")


if __name__ == "__main__":
    main()
