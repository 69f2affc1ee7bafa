"""The backends under test, and what each promises: a new room plugs in by one line."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from tilewise import UnsupportedProblem
from tilewise.testing import FEATURES, Sample, assert_exact

HALF = (torch.bfloat16, torch.float16)


class Room(NamedTuple):
    """``features`` and ``layouts`` it runs, refusing others; ``lse_in_half``: lse is only as exact as plain half."""

    features: frozenset[str]
    layouts: frozenset[str]
    any_headdim_v: bool = True
    bias_gradient: bool = True
    calculus: bool = True
    lse_in_half: bool = False


# torch's kernel excludes pairs before it scales, so a negative scale turns -inf into +inf
TRIANGLES = {"causal", "top_left", "window_right"}
ANY_LAYOUT = frozenset({"contiguous", "heads_first", "last_dim", "sliced", "expanded"})
ROOMS = {
    "reference": Room(frozenset(FEATURES), ANY_LAYOUT),
    "cpu": Room(frozenset(FEATURES), ANY_LAYOUT),
    "sdpa": Room(
        frozenset(
            {"causal", "top_left", "window_right", "mask", "padding", "bias", "bias_shared", "bias_rows", "scale"}
        ),
        ANY_LAYOUT - {"last_dim"},
        any_headdim_v=False,
        bias_gradient=False,
        calculus=False,
        # torch's kernel uses a faster exp for half inputs
        lse_in_half=True,
    ),
}


def promises(sample: Sample, backend: str) -> bool:
    """Whether the room must run the sample (otherwise it must refuse it)."""
    room, spec = ROOMS[backend], sample.spec
    wants_bias = "bias" in sample.differentiable()
    return (
        set(spec.features) <= room.features
        and spec.layout in room.layouts
        and (room.any_headdim_v or spec.headdim == spec.headdim_v)
        and (room.bias_gradient or not wants_bias)
        and not (backend == "sdpa" and "scale" in spec.features and set(spec.features) & TRIANGLES)
    )


def hold(sample: Sample, backend: str, **keywords: object) -> None:
    """The room runs the sample exactly, or refuses what it does not promise, with its reasons."""
    if promises(sample, backend):
        half = ROOMS[backend].lse_in_half and sample.spec.dtype in HALF
        assert_exact(sample, backend, lse_dtype=sample.spec.dtype if half else None, **keywords)
        return
    with pytest.raises(UnsupportedProblem, match=backend) as refusal:
        assert_exact(sample, backend, **keywords)
    reasons = {row.name: row.reasons for row in refusal.value.trace}[backend]
    assert reasons, "a refusal must say why"
