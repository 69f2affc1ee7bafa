"""Handbook row 11: counted tiles equal the closed form, for both corners and for windows."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise.textbook import causal_tiles
from tilewise.textbook.causal_tiles import BLOCK, CASES, causal, closed_form, count_blocks, count_pairs

BLOCKS = st.integers(1, 8)


@settings(deadline=None, max_examples=60)
@given(BLOCKS, BLOCKS, st.integers(2, 9), st.sampled_from(["bottom_right", "top_left"]))
def test_causal_tiles_equal_the_closed_form(blocks_q, blocks_k, block, corner):
    counted, _ = count_pairs(causal(blocks_q * block, blocks_k * block, corner), block)
    assert counted == closed_form(blocks_q, blocks_k, corner)


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 9), st.integers(2, 9), st.data())
def test_window_tiles_equal_the_closed_form(blocks, block, data):
    window = data.draw(st.integers(1, blocks - 1))
    counted, _ = count_pairs(causal(blocks * block, blocks * block, left=window * block), block)
    assert counted == closed_form(blocks, blocks, window=window)


@settings(deadline=None, max_examples=150)
@given(
    st.integers(1, 40), st.integers(1, 40), st.integers(1, 9), st.one_of(st.none(), st.integers(0, 45)), st.booleans()
)
def test_two_intervals_answer_for_every_tile(seqlen_q, seqlen_k, block, left, bottom_right):
    band = causal(seqlen_q, seqlen_k, "bottom_right" if bottom_right or left is not None else "top_left", left)
    assert count_blocks(band, block) == count_pairs(band, block)[0]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]} {case[1]}x{case[2]}")
def test_attention_over_the_touched_tiles_only(case):
    _, blocks_q, blocks_k, corner, window = case
    band = causal(blocks_q * BLOCK, blocks_k * BLOCK, corner, None if window is None else window * BLOCK)
    torch.manual_seed(0)
    q = torch.randn(band.seqlen_q, 8, dtype=torch.float64)
    k, v = (torch.randn(band.seqlen_k, 8, dtype=torch.float64) for _ in range(2))
    out, done = causal_tiles.attend(q, k, v, band, BLOCK)
    difference = torch.arange(band.seqlen_k)[None, :] - torch.arange(band.seqlen_q)[:, None]
    scores = (q @ k.T * 8**-0.5).masked_fill((difference < band.lower) | (difference > band.upper), -torch.inf)
    torch.testing.assert_close(out, scores.softmax(1).nan_to_num(0.0) @ v)
    skipped, full, masked = closed_form(blocks_q, blocks_k, corner, window)
    assert done == full + masked == blocks_q * blocks_k - skipped


def test_every_printed_number(capsys):
    causal_tiles.main()
    head, _, *lines = capsys.readouterr().out.splitlines()
    assert head == f"tiles of {BLOCK} x {BLOCK}; skipped / full / masked"
    assert len(lines) == len(CASES)
    for line, (name, blocks_q, blocks_k, corner, window) in zip(lines, CASES, strict=True):
        assert line[:28].strip() == name
        numbers = [int(word.replace(",", "")) for word in re.findall(r"[\d,]+", line[28:])]
        seqlen_q, seqlen_k = blocks_q * BLOCK, blocks_k * BLOCK
        assert numbers[:2] == [seqlen_q, seqlen_k]
        assert tuple(numbers[2:5]) == tuple(numbers[5:8]) == closed_form(blocks_q, blocks_k, corner, window)
        shift = seqlen_k - seqlen_q if corner == "bottom_right" else 0
        left = seqlen_q + seqlen_k if window is None else window * BLOCK
        pairs = sum(max(0, min(seqlen_k - 1, i + shift) - max(0, i + shift - left) + 1) for i in range(seqlen_q))
        assert numbers[8] == pairs
