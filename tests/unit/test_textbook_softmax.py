"""Handbook row 2: one pass over the scores gives softmax, and [1000, 999] does not overflow."""

from __future__ import annotations

import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise.textbook import softmax

FLOATS = st.floats(-700, 700, allow_nan=False)


@settings(deadline=None, max_examples=50)
@given(st.lists(FLOATS, min_size=1, max_size=20))
def test_online_and_stable_equal_torch(scores):
    row = torch.tensor(scores, dtype=torch.float64)
    torch.testing.assert_close(softmax.online_softmax(row), row.softmax(0))
    torch.testing.assert_close(softmax.stable_softmax(row), row.softmax(0))


@settings(deadline=None, max_examples=50)
@given(st.lists(FLOATS, min_size=1, max_size=20))
def test_every_online_state_is_that_of_its_prefix(scores):
    for j, (row_max, row_sum) in enumerate(softmax.online_states(scores), start=1):
        assert row_max == max(scores[:j])
        assert row_sum == pytest.approx(math.fsum(math.exp(score - row_max) for score in scores[:j]))


def test_excluded_scores_change_nothing():
    row = torch.tensor([-math.inf, 2.0, -math.inf, 1.0], dtype=torch.float64)
    torch.testing.assert_close(softmax.online_softmax(row), row.softmax(0))
    assert softmax.online_softmax(row[:1]).tolist() == [0.0]


def test_every_printed_number(capsys):
    softmax.main()
    blocks = capsys.readouterr().out.split("scores ")[1:]
    assert len(blocks) == len(softmax.EXAMPLES)
    for text, example in zip(blocks, softmax.EXAMPLES, strict=True):
        head, *lines = text.splitlines()
        assert head == str(list(example))
        rows, exact = lines[1 : 1 + len(example)], torch.tensor(example, dtype=torch.float64).softmax(0).tolist()
        for j, line in enumerate(rows):
            score, row_max, row_sum = map(float, line.split())
            assert (score, row_max) == (example[j], max(example[: j + 1]))
            assert row_sum == pytest.approx(sum(math.exp(s - row_max) for s in example[: j + 1]), abs=1e-8)
        printed = {
            line.split()[0]: list(map(float, re.findall(r"nan|[\d.]+", line))) for line in lines[1 + len(example) :]
        }
        assert printed["stable"] == pytest.approx(exact, abs=1e-8)
        assert printed["online"] == pytest.approx(exact, abs=1e-8)
        if max(example) > 700:
            assert all(map(math.isnan, printed["naive"]))
        else:
            assert printed["naive"] == pytest.approx(exact, abs=1e-8)
