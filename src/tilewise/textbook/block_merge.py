"""Attention of one row, block by block: each block of keys becomes a state (m, l, a), and states merge in any order.

    m = max_j s_j        l = sum_j exp(s_j - m)        a = sum_j exp(s_j - m) v_j        o = a / l

    merge:  m = max(m_1, m_2)    l = l_1 exp(m_1 - m) + l_2 exp(m_2 - m)    a likewise

The division waits until the end, so a merge is one rescale and one addition; it is associative and commutative, and a
block without keys is its identity (-inf, 0, 0). Run: ``python -m tilewise.textbook.block_merge``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

SCORES = (2.0, 1.0, 4.0, 3.0)
VALUES = ((1.0, 0.0), (0.0, 1.0), (2.0, 0.0), (0.0, 2.0))
BLOCK = 2


class State(NamedTuple):
    """row_max () and row_sum () of the scores seen, acc (headdim_v,) of the values weighted by exp(score - row_max)."""

    row_max: torch.Tensor
    row_sum: torch.Tensor
    acc: torch.Tensor


def block_state(scores: torch.Tensor, values: torch.Tensor) -> State:
    """The state of one block: scores (keys,), values (keys, headdim_v); zero keys give the identity."""
    if scores.numel() == 0:
        zero = scores.new_zeros(())
        return State(zero - torch.inf, zero, values.new_zeros(values.shape[1]))
    row_max = scores.max()
    weights = _exp_difference(scores, row_max)
    return State(row_max, weights.sum(), weights @ values)


def merge(first: State, second: State) -> State:
    """The state of two blocks together."""
    row_max = torch.maximum(first.row_max, second.row_max)
    left, right = (_exp_difference(state.row_max, row_max) for state in (first, second))
    return State(row_max, first.row_sum * left + second.row_sum * right, first.acc * left + second.acc * right)


def finish(state: State) -> torch.Tensor:
    """o = a / l; a row that has seen no key is 0."""
    return torch.where(state.row_sum > 0, state.acc / state.row_sum, torch.zeros_like(state.acc))


def split_states(scores: torch.Tensor, values: torch.Tensor, sizes: Sequence[int]) -> list[State]:
    """The state of each block, for blocks of the given sizes."""
    pairs = zip(torch.split(scores, list(sizes)), torch.split(values, list(sizes)), strict=True)
    return [block_state(block_scores, block_values) for block_scores, block_values in pairs]


def worked_row(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """The handbook's scores (4,) and values (4, 2)."""
    return torch.tensor(SCORES, dtype=dtype), torch.tensor(VALUES, dtype=dtype)


def _exp_difference(score: torch.Tensor, row_max: torch.Tensor) -> torch.Tensor:
    # exp(-inf - -inf) would be nan; a row that has seen nothing yet weighs nothing.
    return torch.where(score == -torch.inf, torch.zeros_like(score), (score - row_max).exp())


def _row(name: str, state: State) -> str:
    acc = " ".join(f"{value:.8f}" for value in state.acc.tolist())
    return f"{name:<9} {state.row_max:>5.1f} {state.row_sum:>11.8f}   {acc}"


def main() -> None:
    """Print the states of the worked row's blocks, their merge, and o beside softmax's."""
    scores, values = worked_row()
    states = split_states(scores, values, [BLOCK] * (len(SCORES) // BLOCK))
    print(f"scores {list(SCORES)}  values {[list(value) for value in VALUES]}")
    print(f"{'':<9} {'m':>5} {'l':>11}   a")
    for index, state in enumerate(states):
        print(_row(f"block {index}", state))
    total = merge(states[0], states[1])
    print(_row("merged", total))
    for name, out in (("o = a / l", finish(total)), ("softmax", scores.softmax(0) @ values)):
        print(f"{name:<9} {' '.join(f'{value:.8f}' for value in out.tolist())}")


if __name__ == "__main__":
    main()
