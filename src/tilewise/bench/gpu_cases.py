"""What is measured on a GPU: the square problems that peers publish, and what models ask beside them; bf16, and fp8."""

from __future__ import annotations

from random import Random
from typing import Any

import torch

from tilewise.bench.cases import Case
from tilewise.descale import FP8

FORWARD = ("forward",)
BOTH = ("forward", "backward")
HALF: dict[str, Any] = {"dtype": torch.bfloat16}


def _square() -> tuple[Case, ...]:
    """16k to 1k tokens at a constant total, heads of 64, 128 and 256 at a constant width, grouped heads."""
    cases = []
    for headdim, nheads in ((128, 16), (64, 32), (256, 8)):
        for batch, seqlen in ((1, 16384), (4, 4096), (16, 1024)):
            cases += [Case(batch, seqlen, nheads, headdim, causal=causal, **HALF) for causal in (False, True)]
    cases += [Case(2, 8192, 32, 128, nheads_k=8, causal=causal, **HALF) for causal in (False, True)]
    return tuple(cases)


def _lognormal(count: int, total: int, seed: int = 0) -> tuple[int, ...]:
    """Lengths as documents have them: a few long ones, many short ones."""
    random = Random(seed)
    drawn = [random.lognormvariate(0.0, 1.0) for _ in range(count)]
    lengths = [max(1, int(total * one / sum(drawn))) for one in drawn]
    lengths[lengths.index(max(lengths))] += total - sum(lengths)
    return tuple(lengths)


SQUARE = _square()
WINDOWS = tuple(Case(1, 16384, 16, 128, window=width, **HALF) for width in (128, 1024, 4096))
PACKED = tuple(
    Case(1, 32768, 16, 128, lengths=_lognormal(21, 32768), causal=causal, **HALF) for causal in (False, True)
)
WIDE_KEYS = Case(1, 16384, 16, 192, headdim_v=128, causal=True, **HALF)
NARROW = Case(1, 16384, 16, 96, causal=True, **HALF)
CHUNK = Case(1, 2048, 32, 128, nheads_k=8, seqlen_k=32768, causal=True, **HALF)
BIAS = Case(1, 4096, 16, 128, bias=True, **HALF)
FP8_FORWARD = tuple(
    Case(1, 16384, nheads, headdim, causal=causal, dtype=FP8)
    for headdim, nheads in ((64, 32), (128, 16), (256, 8))
    for causal in (False, True)
)
HOST = Case(1, 128, 8, 64, **HALF)

# case -> the passes that are timed
CASES: dict[Case, tuple[str, ...]] = {
    **dict.fromkeys(SQUARE, BOTH),
    **dict.fromkeys(WINDOWS, FORWARD),
    **dict.fromkeys(PACKED, BOTH),
    **dict.fromkeys((WIDE_KEYS, NARROW, CHUNK), FORWARD),
    BIAS: BOTH,
    **dict.fromkeys(FP8_FORWARD, FORWARD),
}

# compiled anew for every shape, which takes longer than all that is timed, so on these alone
COMPILED_PER_SHAPE = frozenset(
    {case for case in SQUARE if case.headdim == 128 and case.seqlen >= 4096 and case.nheads_k is None}
    | {case for case in SQUARE if case.headdim == 64 and case.seqlen == 16384}
    | {WINDOWS[1], BIAS}
)


def dense_twin(case: Case) -> Case:
    """One length for all at about the tokens and FLOPs of the packed ``case``."""
    lengths = case.lengths or (case.seqlen,)
    seqlen = round(sum(length * length for length in lengths) / sum(lengths))
    batch = max(1, round(case.seqlen / seqlen))
    return Case(batch, seqlen, case.nheads, case.headdim, nheads_k=case.nheads_k, causal=case.causal, dtype=case.dtype)
