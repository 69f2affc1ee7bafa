"""Handbook row 4: the worked row's exact numbers, and a merge that is associative, commutative and has an identity."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise.textbook import block_merge


def test_the_handbooks_numbers():
    first, second = block_merge.split_states(*block_merge.worked_row(), [2, 2])
    total = block_merge.merge(first, second)
    assert total.row_max.item() == 4.0
    assert total.row_sum.item() == pytest.approx(1.55300179, abs=5e-9)
    assert total.acc.tolist() == pytest.approx([2.13533528, 0.78554595], abs=5e-9)
    assert block_merge.finish(total).tolist() == pytest.approx([1.37497284, 0.50582424], abs=5e-9)


@pytest.mark.parametrize("sizes", [[4], [2, 2], [1, 3], [3, 1], [1, 1, 1, 1], [0, 4], [2, 0, 2]])
def test_any_block_sizes_give_softmax(sizes):
    scores, values = block_merge.worked_row()
    states = block_merge.split_states(scores, values, sizes)
    total = states[0]
    for state in states[1:]:
        total = block_merge.merge(total, state)
    torch.testing.assert_close(block_merge.finish(total), scores.softmax(0) @ values)


SCORE = st.one_of(st.floats(-500, 500, allow_nan=False), st.just(-math.inf))


@settings(deadline=None, max_examples=100)
@given(st.lists(st.lists(SCORE, max_size=4), min_size=3, max_size=3), st.integers(0, 2**31))
def test_merge_is_associative_and_commutative(blocks, seed):
    generator = torch.Generator().manual_seed(seed)
    states = []
    for scores in blocks:
        values = torch.randn(len(scores), 3, generator=generator, dtype=torch.float64)
        states.append(block_merge.block_state(torch.tensor(scores, dtype=torch.float64), values))
    a, b, c = states
    left = block_merge.merge(block_merge.merge(a, b), c)
    for other in (block_merge.merge(a, block_merge.merge(b, c)), block_merge.merge(c, block_merge.merge(b, a))):
        for x, y in zip(left, other, strict=True):
            torch.testing.assert_close(x, y)
    empty = block_merge.block_state(torch.empty(0, dtype=torch.float64), torch.empty(0, 3, dtype=torch.float64))
    for x, y in zip(block_merge.merge(empty, left), left, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)
    assert block_merge.finish(empty).tolist() == [0.0] * 3


def test_every_printed_number(capsys):
    block_merge.main()
    head, _, *lines = capsys.readouterr().out.splitlines()
    assert head == "scores [2.0, 1.0, 4.0, 3.0]  values [[1.0, 0.0], [0.0, 1.0], [2.0, 0.0], [0.0, 2.0]]"
    e = math.exp(-1)
    expected = {
        "block 0": [2, 1 + e, 1, e],
        "block 1": [4, 1 + e, 2, 2 * e],
        "merged": [4, (1 + e) * (1 + math.exp(-2)), 2 + math.exp(-2), 2 * e + math.exp(-3)],
        "o = a / l": [1.37497284, 0.50582424],
        "softmax": [1.37497284, 0.50582424],
    }
    printed = {line[:9].strip(): [float(word) for word in line[9:].split()] for line in lines}
    assert printed.keys() == expected.keys()
    for name, numbers in expected.items():
        assert printed[name] == pytest.approx(numbers, abs=1e-8), name
