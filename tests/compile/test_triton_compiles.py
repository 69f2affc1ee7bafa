"""What the tile tables can choose compiles for every device named, inside its shared memory, without a GPU.

By default a covering subset runs; TILEWISE_COMPILE=all compiles every feature for every device.
"""

from __future__ import annotations

import os

import pytest
import torch

from tests.compile.kernels import TARGETS, build, launches
from tests.compile.spills import loops, serialised
from tilewise.backends.triton.facts import INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
FEATURES: dict[str, dict[str, object]] = {
    "plain": {},
    "causal": {"causal": "bottom_right"},
    "window": {"window_left": 100, "window_right": 0, "causal": "top_left"},
    "softcap": {"softcap": 30.0},
    "dropout": {"dropout_p": 0.1, "dropout_seed": torch.zeros((), dtype=torch.int64)},
    "bias": {"bias": torch.zeros(2, 2, 64, 96)},
    "bias_shared": {"bias": torch.zeros(1, 1, 64, 96)},
    "mask": {"mask": torch.ones(2, 1, 64, 96, dtype=torch.bool)},
    "alibi": {"alibi_slopes": torch.zeros(2), "sink": torch.zeros(2)},
}
HEADDIMS = ((64, 64), (128, 128), (256, 256), (192, 128), (576, 512), (33, 33))
ALL = os.environ.get("TILEWISE_COMPILE") == "all"
# (arch, head dimensions, dtype, features): each device, each row of its tables, each feature at least once
CASES = [
    *[("sm_90", dims, torch.bfloat16, "causal") for dims in HEADDIMS],
    *[("sm_90", (64, 64), torch.bfloat16, features) for features in FEATURES if features != "causal"],
    ("sm_90", (128, 128), torch.float32, "plain"),
    ("sm_80", (128, 128), torch.float16, "causal"),
    ("sm_80", (256, 256), torch.bfloat16, "plain"),
    ("sm_86", (128, 128), torch.bfloat16, "causal"),
    ("sm_89", (64, 64), torch.bfloat16, "mask"),
    ("sm_100", (64, 64), torch.bfloat16, "plain"),
    ("sm_120", (256, 256), torch.bfloat16, "causal"),
    ("gfx942", (128, 128), torch.bfloat16, "causal"),
    ("gfx942", (256, 256), torch.float16, "plain"),
    ("gfx950", (64, 64), torch.bfloat16, "window"),
]
if ALL:
    CASES = [
        (arch, dims, dtype, features)
        for arch in TARGETS
        for dims in HEADDIMS
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
        for features in FEATURES
    ]


@pytest.mark.parametrize(("arch", "headdims", "dtype", "features"), CASES, ids=str)
def test_every_launch_of_a_call_compiles_and_fits(arch, headdims, dtype, features):
    sides = ((64, headdims[0]), (96, headdims[0]), (96, headdims[1]))
    q, k, v = (torch.zeros(2, seqlen, 2, dim, dtype=dtype) for seqlen, dim in sides)
    for backward in (False, True):
        for wanted in launches(arch, q, k, v, backward, **FEATURES[features]):
            compiled = build(wanted, arch)
            assert compiled.metadata.shared <= TARGETS[arch][1], wanted.kernel.__name__


SPILLS = 8  # moves to and from local memory in one turn of several hundred instructions


@pytest.mark.parametrize("headdim", [64, 128, 256])
@pytest.mark.parametrize("features", ["plain", "causal", "window"])
def test_the_main_loops_hardly_spill_and_do_not_wait_after_every_product(headdim, features):
    q, k, v = (torch.zeros(2, seqlen, 2, headdim, dtype=torch.bfloat16) for seqlen in (64, 96, 96))
    for backward in (False, True):
        for wanted in launches("sm_90", q, k, v, backward, **FEATURES[features]):
            compiled = build(wanted, "sm_90")
            assert not serialised(compiled), wanted.kernel.__name__
            found = loops(compiled)
            if found:  # the first is the one over full tiles
                assert found[0].products >= 8, wanted.kernel.__name__
                assert found[0].spills <= SPILLS, wanted.kernel.__name__
