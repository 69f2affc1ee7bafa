"""The Hopper kernels compile for sm_90a, fit the device, and keep their matrix products asynchronous, without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from tests.compile.hopper_kernels import SHARED_MEMORY, launches, machine
from tests.compile.spills import MEASURED

BF16, FP16 = torch.bfloat16, torch.float16
SEGMENTS = {name: torch.zeros(2, 300, dtype=torch.int64) for name in ("segments_q", "segments_k")}
SLOPES = {"alibi_slopes": True, "needs_grad": ("q", "k", "v", "alibi_slopes")}
# every feature that a kernel is specialised on; the registers are what a combination can run out of
FEATURES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": "bottom_right"},
    "window": {"window_left": 100, "window_right": 20},
    "softcap": {"causal": "bottom_right", "softcap": 30.0},
    "alibi_sink": {"causal": "bottom_right", "alibi_slopes": True, "sink": True},
    "ranges": {"causal": "bottom_right", "sink": True, "keys": 20000},
    "packed": {"causal": "bottom_right", "varlen": True},
    "segments": SEGMENTS | {"causal": "bottom_right"},
    "segments_full": SEGMENTS,
    "slopes": SLOPES | {"causal": "bottom_right"},
    "every_gradient": SEGMENTS | SLOPES | {"window_left": 100, "window_right": 20, "sink": True},
    "everything": {
        "causal": "top_left",
        "window_left": 100,
        "softcap": 30.0,
        "alibi_slopes": True,
        "sink": True,
        "varlen": True,
    },
}
# the same for sizes at which headdims of 64 to 96 take three warpgroups
MANY_KEYS: dict[str, dict[str, Any]] = {
    "many_full": {"rows": 1100, "keys": 2100},
    "many_causal": FEATURES["causal"] | {"rows": 1100, "keys": 2100},
    "many_window": {"window_left": 900, "window_right": 20, "rows": 1100, "keys": 2100},
    "many_alibi_sink": FEATURES["alibi_sink"] | {"rows": 1100, "keys": 2100},
    "many_ranges": FEATURES["ranges"] | {"rows": 384},
    "many_packed": FEATURES["packed"] | {"rows": 3000},
}
# and for windows of a few blocks: more than that, and with a sink
WINDOWS: dict[str, dict[str, Any]] = {
    "window_1000": FEATURES["causal"] | {"window_left": 1000, "rows": 1100, "keys": 2100},
    "window_sink": FEATURES["causal"] | {"window_left": 100, "sink": True},
}
# and for sizes at which 128 channels take three warpgroups
LONG: dict[str, dict[str, Any]] = {
    "long_full": {"rows": 6200, "keys": 6200},
    "long_causal": FEATURES["causal"] | {"rows": 6200, "keys": 6200},
    "long_sink": FEATURES["causal"] | {"sink": True, "rows": 6200, "keys": 6200},
}
# and under a softcap; with more than 128 channels the slopes' gradient has a launch of its own there
CAPPED: dict[str, dict[str, Any]] = {
    "capped_slopes": FEATURES["slopes"] | {"softcap": 30.0},
    "capped_every_gradient": FEATURES["every_gradient"] | {"softcap": 30.0},
    "capped_segments": FEATURES["segments"] | {"softcap": 30.0},
}
QUICK = ("causal", "long_full", "everything", "many_causal", "capped_slopes", "capped_segments")
# local memory accesses in the hot loops that a combination may cost; without a row here none
HOT_SPILLS = {
    "window": 8, "window_1000": 8, "window_sink": 8, "alibi_sink": 16, "everything": 166,
    "segments": 32, "segments_full": 30, "slopes": 50, "every_gradient": 250,
    "capped_slopes": 55, "capped_every_gradient": 150, "capped_segments": 462,
}  # fmt: skip
COLD_SPILLS = 64  # bytes that a forward may store and load around its loop, once a tile; full 192/128 and segments more
SEGMENTS_COLD = {"segments": 128, "segments_full": 192, "every_gradient": 224, "capped_every_gradient": 192}
WITH_PRODUCTS = ("forward_kernel", "backward_kernel", "backward_wide_kernel", "slopes_kernel")
DIMS = ((64, 64), (80, 80), (96, 96), (128, 128), (160, 160), (256, 256), (192, 128), (192, 192))


def cases() -> list[Any]:
    """Every tile with every feature; those that only repeat what a quick one shows are slow."""
    rows = [(*dims, BF16, name) for dims in DIMS for name in FEATURES]
    rows += [(128, 128, FP16, "causal"), *((dim, dim, BF16, name) for dim in (64, 80, 96) for name in MANY_KEYS)]
    rows += [(dim, dim, BF16, name) for dim in (64, 128) for name in WINDOWS]
    rows += [(128, 128, BF16, name) for name in LONG]
    rows += [(dim, dim, BF16, "capped_slopes") for dim in (64, 128, 256)]
    rows += [(dim, dim, BF16, "capped_segments") for dim in (64, 128)]
    rows += [(*dims, BF16, "capped_every_gradient") for dims in DIMS[4:]]
    return [
        pytest.param(*row, id=f"{row[0]}-{row[1]}-{str(row[2]).removeprefix('torch.')}-{row[3]}",
                     marks=[] if row[3] in QUICK and row[2] == BF16 else [pytest.mark.slow])
        for row in rows
    ]  # fmt: skip


@pytest.mark.parametrize(("headdim", "headdim_v", "dtype", "name"), cases())
def test_machine_code(headdim: int, headdim_v: int, dtype: torch.dtype, name: str, tmp_path: Path) -> None:
    """Shared memory fits, no product waits for the one before it, and no hot loop of a plain problem spills."""
    for wanted in launches(headdim, headdim_v, dtype, **(FEATURES | MANY_KEYS | WINDOWS | LONG | CAPPED)[name]):
        found = machine(wanted, tmp_path)
        where = f"{wanted.kernel.__name__}: {found}"
        assert found.shared <= SHARED_MEMORY, where
        assert not MEASURED or not found.serialized, where
        kernel = wanted.kernel.__name__
        hot = 0 if kernel == "slopes_kernel" else HOT_SPILLS.get(name.removeprefix("many_"), 0)
        assert not MEASURED or found.hot_spills <= hot, where
        if MEASURED and kernel == "forward_kernel" and name != "everything":
            cold = SEGMENTS_COLD.get(name, COLD_SPILLS + 96 * ((headdim, headdim_v, name) == (192, 128, "full")))
            assert found.spilled <= cold, where
        assert (found.products > 0) == (kernel in WITH_PRODUCTS), where
