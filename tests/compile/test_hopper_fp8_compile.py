"""The fp8 kernel compiles for sm_90a, fits the device, and keeps its matrix products asynchronous, without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
from tests.compile.hopper_kernels import SHARED_MEMORY, launches, machine
from tests.compile.spills import MEASURED
from tests.compile.test_hopper_compile import DIMS, FEATURES
from tilewise.backends.hopper.tiles import block_of
from tilewise.descale import FP8

QUICK = ("causal", "long")
# channels of the tile's v -> local memory accesses in the loops with products: four warpgroups leave 112 registers for
# 64 channels, three leave 160, and a cap takes two more
HOT_SPILLS = {
    (64, "long"): 37,
    (64, "long, full"): 18,
    (128, "by block, window"): 3,
    (128, "softcap"): 2,
    (256, "softcap"): 3,
    (256, "everything"): 2,
    (256, "by block, window"): 2,
    (256, "by block, everything"): 3,
}


PLAIN = {name: options for name, options in FEATURES.items() if "segments_q" not in options}  # fp8 takes none
FP8_FEATURES: dict[str, dict[str, Any]] = PLAIN | {
    "long": {"causal": "bottom_right", "rows": 9000, "keys": 9000},
    "long, full": {"rows": 9000, "keys": 9000},
    "by block": {"causal": "bottom_right", "by_block": True},
    "by block, long": {"rows": 9000, "keys": 9000, "by_block": True},
    "by block, window": {"window_left": 100, "window_right": 0, "by_block": True},
    "by block, everything": {
        "causal": "bottom_right", "softcap": 30.0, "alibi_slopes": True, "sink": True, "by_block": True
    },
}  # fmt: skip


def cases() -> list[Any]:
    """Every tile with every feature; most are slow."""
    return [
        pytest.param(*dims, name, id=f"{dims[0]}-{dims[1]}-{name}", marks=[] if name in QUICK else [pytest.mark.slow])
        for dims in DIMS
        for name in FP8_FEATURES
    ]


@pytest.mark.parametrize(("headdim", "headdim_v", "name"), cases())
def test_machine_code(headdim: int, headdim_v: int, name: str, tmp_path: Path) -> None:
    """Shared memory fits, no product waits for the one before it, and the products are fp8's."""
    for wanted in launches(headdim, headdim_v, FP8, **FP8_FEATURES[name]):
        found = machine(wanted, tmp_path)
        where = f"{wanted.kernel.__name__}: {found}"
        assert found.shared <= SHARED_MEMORY, where
        assert not MEASURED or not found.serialized, where
        assert not MEASURED or found.hot_spills <= HOT_SPILLS.get((block_of(headdim_v), name), 0), where
        assert (found.products > 0) == wanted.kernel.__name__.startswith("forward_fp8"), where
