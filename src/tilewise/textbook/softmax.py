"""Softmax three ways: as written, stable, and online, where one pass over the scores is enough.

    m_j = max(m_{j-1}, s_j)
    l_j = l_{j-1} * exp(m_{j-1} - m_j) + exp(s_j - m_j)

After the last score, p_j = exp(s_j - m) / l. The recurrence is Milakov and Gimelshein's, "Online normalizer calculation
for softmax", 2018. Run: ``python -m tilewise.textbook.softmax``.
"""

from __future__ import annotations

import math

import torch

EXAMPLES = ((2.0, 1.0, 4.0, 3.0), (1000.0, 999.0))


def naive_softmax(scores: torch.Tensor) -> torch.Tensor:
    """exp(s) / sum(exp(s)) over the last dimension: a large score overflows and the result is nan."""
    weights = scores.exp()
    return weights / weights.sum(-1, keepdim=True)


def stable_softmax(scores: torch.Tensor) -> torch.Tensor:
    """The same function with the maximum subtracted first: two passes over the scores, no overflow."""
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    return weights / weights.sum(-1, keepdim=True)


def online_states(scores: list[float]) -> list[tuple[float, float]]:
    """(m_j, l_j) after each score; a score of -inf leaves the state as it is."""
    row_max, row_sum = -math.inf, 0.0
    states = []
    for score in scores:
        new_max = max(row_max, score)
        if new_max > -math.inf:
            row_sum = row_sum * math.exp(row_max - new_max) + math.exp(score - new_max)
        row_max = new_max
        states.append((row_max, row_sum))
    return states


def online_softmax(scores: torch.Tensor) -> torch.Tensor:
    """Softmax of a 1-D tensor from the last online state. Scores that are all -inf give zeros."""
    values = [float(score) for score in scores]
    row_max, row_sum = online_states(values)[-1]
    if row_max == -math.inf:
        return torch.zeros_like(scores)
    return torch.tensor([math.exp(value - row_max) / row_sum for value in values], dtype=scores.dtype)


def main() -> None:
    """Print the recurrence and the three softmaxes of each example."""
    for example in EXAMPLES:
        scores = torch.tensor(example, dtype=torch.float64)
        print(f"scores {list(example)}")
        print(f"  {'s_j':>10} {'m_j':>10} {'l_j':>12}")
        for score, (row_max, row_sum) in zip(example, online_states(list(example)), strict=True):
            print(f"  {score:>10.1f} {row_max:>10.1f} {row_sum:>12.8f}")
        for name, softmax in (("naive", naive_softmax), ("stable", stable_softmax), ("online", online_softmax)):
            print(f"  {name:<7}" + " ".join(f"{value:.8f}" for value in softmax(scores).tolist()))


if __name__ == "__main__":
    main()
