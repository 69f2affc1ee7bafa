"""The backends under test, and what each promises: a new room plugs in by one line."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from tilewise import UnsupportedProblem
from tilewise.testing import DENSE_ONLY, FEATURES, Sample, assert_exact

HALF = (torch.bfloat16, torch.float16)
SINGLE = (torch.float32, *HALF)


class Room(NamedTuple):
    """``features``, ``layouts`` and ``dtypes`` it runs, refusing others; where it runs, and how exact its lse is.

    ``lse_in_half``: lse is only as exact as plain half. ``gradients``: the options whose gradient it gives, "packed"
    among them if in the packed form too. ``headdim``: (multiple of, at most). ``share``: one in so many of the suite's
    parametrisations is run without ``-m slow``, where every one of them compiles kernels of its own.
    """

    features: frozenset[str]
    layouts: frozenset[str]
    dtypes: tuple[torch.dtype, ...] = (*SINGLE, torch.float64)
    any_headdim_v: bool = True
    headdim: tuple[int, int] = (1, 2**31)
    gradients: frozenset[str] = frozenset({"bias", "alibi_slopes", "sink", "packed"})
    calculus: bool = True
    lse_in_half: bool = False
    device: str = "cpu"
    share: int = 1


# torch's kernel excludes pairs before it scales, so a negative scale turns -inf into +inf
TRIANGLES = {"causal", "top_left", "window_right"}
ANY_LAYOUT = frozenset({"contiguous", "heads_first", "last_dim", "sliced", "expanded"})
EVERYWHERE = {
    "reference": Room(frozenset(FEATURES), ANY_LAYOUT),
    "cpu": Room(frozenset(FEATURES), ANY_LAYOUT),
    "sdpa": Room(
        frozenset(
            {"causal", "top_left", "window_right", "mask", "padding", "bias", "bias_shared", "bias_rows", "scale"}
        ),
        ANY_LAYOUT - {"last_dim"},
        any_headdim_v=False,
        gradients=frozenset({"packed"}),
        calculus=False,
        # torch's kernel uses a faster exp for half inputs
        lse_in_half=True,
    ),
}
ON_CUDA = {
    "triton": Room(frozenset(FEATURES), ANY_LAYOUT, SINGLE, calculus=False, device="cuda", share=4),
    "hopper": Room(
        frozenset(FEATURES) - (set(DENSE_ONLY) - {"segments"}) - {"dropout"},
        ANY_LAYOUT - {"last_dim"},
        HALF,
        headdim=(8, 256),
        gradients=frozenset({"alibi_slopes", "sink", "packed"}),
        calculus=False,
        device="cuda",
    ),
}


def absence(name: str) -> str:
    """What this machine lacks for a room on CUDA; empty if nothing."""
    if not torch.cuda.is_available():
        return "needs a CUDA device"
    hopper = torch.version.hip is None and torch.cuda.get_device_capability() == (9, 0)
    return "needs an sm_90 device" if name == "hopper" and not hopper else ""


ROOMS = EVERYWHERE | {name: room for name, room in ON_CUDA.items() if not absence(name)}


def here() -> str:
    """The type of the device that the running test's tensors are made on."""
    return torch.get_default_device().type


def sized(on_cpu: int, on_gpu: int) -> int:
    """A size that CASES.md lists, or a smaller one where two cores would take too long."""
    return on_gpu if here() == "cuda" else on_cpu


def usual_dtype(backend: str) -> torch.dtype:
    """fp32 where the room runs it."""
    return torch.float32 if torch.float32 in ROOMS[backend].dtypes else ROOMS[backend].dtypes[0]


def promises(sample: Sample, backend: str) -> bool:
    """Whether the room must run the sample (otherwise it must refuse it)."""
    room, spec = ROOMS[backend], sample.spec
    multiple, most = room.headdim
    wanted = set(sample.differentiable()) - {"q", "k", "v"}
    return (
        set(spec.features) <= room.features
        and spec.layout in room.layouts
        and spec.dtype in room.dtypes
        and (room.any_headdim_v or spec.headdim == spec.headdim_v)
        and all(dim % multiple == 0 and dim <= most for dim in (spec.headdim, spec.headdim_v))
        and wanted <= room.gradients
        and (not (wanted and spec.varlen) or "packed" in room.gradients)
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
