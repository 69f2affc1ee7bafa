"""The band's closed forms against every pair counted one by one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilewise import masks
from tilewise.masks import Band
from tilewise.problem import Problem

LENGTH = st.integers(0, 14)
BOUND = st.none() | st.integers(-16, 16)
BLOCK = st.integers(1, 6)
CPU = torch.device("cpu")


def brute(limits: Band, seqlen_q: int, seqlen_k: int) -> list[list[bool]]:
    low, high = limits
    return [
        [(low is None or j - i >= low) and (high is None or j - i <= high) for j in range(seqlen_k)]
        for i in range(seqlen_q)
    ]


@given(
    LENGTH,
    LENGTH,
    st.sampled_from([None, "bottom_right", "top_left"]),
    st.none() | st.integers(0, 15),
    st.none() | st.integers(0, 15),
)
def test_the_band_is_the_semantics(
    seqlen_q: int, seqlen_k: int, causal: str | None, left: int | None, right: int | None
) -> None:
    problem = Problem(1, seqlen_q, seqlen_k, 1, 1, 8, 8, causal=causal, window_left=left, window_right=right)
    kept = brute(masks.band(problem), seqlen_q, seqlen_k)
    shift = seqlen_k - seqlen_q
    for i in range(seqlen_q):
        for j in range(seqlen_k):
            expected = left is None or j >= i + shift - left
            expected &= right is None or j <= i + shift + right
            expected &= causal != "bottom_right" or j <= i + shift
            expected &= causal != "top_left" or j <= i
            assert kept[i][j] == expected


@given(LENGTH, LENGTH, BOUND, BOUND)
def test_kept_pairs_counts_them(seqlen_q: int, seqlen_k: int, lower: int | None, upper: int | None) -> None:
    limits = Band(lower, upper)
    assert masks.kept_pairs(limits, seqlen_q, seqlen_k) == sum(map(sum, brute(limits, seqlen_q, seqlen_k)))


@given(st.integers(1, 14), st.integers(1, 14), BOUND, BOUND, st.data())
def test_ranges_are_tight_and_tiles_right(
    seqlen_q: int, seqlen_k: int, lower: int | None, upper: int | None, data: st.DataObject
) -> None:
    limits, kept = Band(lower, upper), torch.tensor(brute(Band(lower, upper), seqlen_q, seqlen_k))
    start_q = data.draw(st.integers(0, seqlen_q - 1))
    stop_q = data.draw(st.integers(start_q + 1, seqlen_q))
    start_k = data.draw(st.integers(0, seqlen_k - 1))
    stop_k = data.draw(st.integers(start_k + 1, seqlen_k))
    tile = kept[start_q:stop_q, start_k:stop_k]
    assert torch.equal(masks.band_tile(limits, start_q, stop_q, start_k, stop_k, CPU), tile)
    assert masks.tile_is_full(limits, start_q, stop_q, start_k, stop_k) == bool(tile.all())
    for seen, found, other in (
        (kept[start_q:stop_q].any(0), masks.key_range(limits, start_q, stop_q, seqlen_k), seqlen_k),
        (kept[:, start_k:stop_k].any(1), masks.query_range(limits, start_k, stop_k, seqlen_q), seqlen_q),
    ):
        first, last = found
        inside = torch.zeros(other, dtype=torch.bool)
        inside[first:last] = True
        assert not (seen & ~inside).any(), "a visible position lies outside the range"
        if (lower is None or upper is None or lower <= upper) and bool(seen.any()):
            assert torch.equal(seen, inside), "the range is wider than what is visible"


@given(LENGTH, LENGTH, BOUND, BOUND, BLOCK, BLOCK)
def test_tiles_are_counted_as_a_loop_would(
    seqlen_q: int, seqlen_k: int, lower: int | None, upper: int | None, block_m: int, block_n: int
) -> None:
    limits, kept = (
        Band(lower, upper),
        torch.tensor(brute(Band(lower, upper), seqlen_q, seqlen_k)).reshape(seqlen_q, seqlen_k),
    )
    counts = masks.count_tiles(limits, seqlen_q, seqlen_k, block_m, block_n)
    tiles = [
        kept[i : i + block_m, j : j + block_n] for i in range(0, seqlen_q, block_m) for j in range(0, seqlen_k, block_n)
    ]
    assert sum(counts) == len(tiles)
    assert counts.full == sum(bool(tile.all()) for tile in tiles)
    assert counts.skipped <= sum(not bool(tile.any()) for tile in tiles), "no tile with a visible pair is skipped"
    if lower is None or upper is None or lower <= upper:
        assert counts.skipped == sum(not bool(tile.any()) for tile in tiles)


@pytest.mark.parametrize(
    ("causal", "seqlen_q", "seqlen_k", "pairs"),
    [
        ("bottom_right", 3, 5, 12),
        ("top_left", 3, 5, 6),
        ("bottom_right", 5, 3, 6),
        ("top_left", 5, 3, 12),
        (None, 3, 5, 15),
    ],
)
def test_the_two_corners_by_hand(causal: str | None, seqlen_q: int, seqlen_k: int, pairs: int) -> None:
    problem = Problem(1, seqlen_q, seqlen_k, 1, 1, 8, 8, causal=causal)
    assert masks.kept_pairs(masks.band(problem), seqlen_q, seqlen_k) == pairs
