"""Part 1: the handbook's worked row, block by block, against softmax and against tilewise itself."""

from __future__ import annotations

import torch

import tilewise
from tilewise.demo.page import Section
from tilewise.textbook import block_merge

# Both sides are fp64 sums of four terms; what remains are the last bits.
ROUNDING = 1e-12


def _numbers(values: torch.Tensor) -> str:
    return "  ".join(f"{value:.8f}" for value in values.flatten().tolist())


def _state(name: str, state: block_merge.State) -> list[str]:
    return [name, f"{state.row_max:.1f}", f"{state.row_sum:.8f}", _numbers(state.acc)]


def run() -> tuple[Section, bool]:
    """The section, and whether every way gives softmax's result."""
    scores, values = block_merge.worked_row()
    states = block_merge.split_states(scores, values, [block_merge.BLOCK] * (len(scores) // block_merge.BLOCK))
    rows = [_state(f"block {index}", state) for index, state in enumerate(states)]
    total = states[0]
    for state in states[1:]:
        total = block_merge.merge(total, state)
    merged = block_merge.finish(total)
    rows.append(_state("merged", total))
    rows.append(["o = a / l", "", "", _numbers(merged)])

    expected = scores.softmax(0) @ values
    # One query of one channel against keys that are the scores themselves: s = 1 * score.
    q, k, v = torch.ones(1, 1, 1, 1, dtype=scores.dtype), scores.view(1, -1, 1, 1), values.view(1, -1, 1, 2)
    out, lse = tilewise.attention_with_lse(q, k, v, softmax_scale=1.0)
    rows.append(["softmax(s) v", "", "", _numbers(expected)])
    rows.append(["tilewise", "", "", _numbers(out)])
    worst = max(float((found.flatten() - expected).abs().max()) for found in (merged, out))
    same_lse = abs(float(lse) - float(total.row_max + total.row_sum.log()))
    exact = max(worst, same_lse) < ROUNDING
    section = Section(
        title="One row, block by block",
        words=[
            f"Scores {list(block_merge.SCORES)} and their values {[list(value) for value in block_merge.VALUES]}, seen "
            f"{block_merge.BLOCK} keys at a time. Each block keeps its maximum m, its sum l = sum exp(s - m) and its "
            "weighted values a = sum exp(s - m) v; two blocks merge after a rescale, and o = a / l comes last.",
        ],
        head=["", "m", "l", "a, then o"],
        rows=rows,
        verdict=f"Largest difference from softmax {worst:.1e}; lse = m + ln l within {same_lse:.1e}: "
        + ("the same function." if exact else "NOT the same."),
    )
    return section, exact
