"""Every backend, forward and backward, against fp64: features x dtypes x layouts x shapes, in memory full of NaN."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.rooms import ROOMS, SINGLE, hold, usual_dtype
from tilewise import attention
from tilewise.testing import FEATURES, LAYOUTS, Spec, compatible, make

DTYPES = (*SINGLE, torch.float64)
SHAPES = (
    {"seqlen_q": 17, "seqlen_k": 23, "headdim": 16, "headdim_v": 16},
    {"seqlen_q": 24, "seqlen_k": 9, "headdim": 8, "headdim_v": 24},
    {"seqlen_q": 33, "seqlen_k": 33, "headdim": 5, "headdim_v": 5, "nheads": 3, "nheads_k": 3},
    {"seqlen_q": 1, "seqlen_k": 40, "headdim": 16, "headdim_v": 16, "nheads": 6, "nheads_k": 1},
    {"seqlen_q": 7, "seqlen_k": 1, "headdim": 1, "headdim_v": 3},
    {"seqlen_q": 20, "seqlen_k": 20, "headdim": 32, "headdim_v": 32, "batch": 1},
)
SINGLES = ("plain", *FEATURES)
PAIRS = [pair for pair in itertools.combinations(FEATURES, 2) if compatible(pair)]
TRIPLES = [
    ("causal", "segments", "mask"),
    ("causal", "window_left", "padding", "bias", "softcap", "alibi", "sink", "dropout", "scale"),
    ("top_left", "window", "segments", "mask", "bias_shared", "softcap", "alibi_batch", "sink_batch", "dropout"),
    ("window", "padding", "bias_rows", "sink"),
    ("causal", "padding", "bias_shared"),
    ("top_left", "mask", "bias_rows"),
]


def name_of(features: tuple[str, ...]) -> str:
    return "+".join(features)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("feature", SINGLES)
def test_each_feature_in_each_dtype_is_exact_forward_and_backward(
    feature: str, dtype: torch.dtype, backend: str
) -> None:
    features = () if feature == "plain" else (feature,)
    for shape in SHAPES[:3]:
        sample = make(Spec(dtype=dtype, features=features, requires_grad=("q", "k", "v"), **shape), seed=1)
        hold(sample, backend)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("feature", SINGLES)
def test_each_feature_in_each_layout_is_exact_without_a_copy_by_the_caller(
    feature: str, layout: str, backend: str
) -> None:
    features = () if feature == "plain" else (feature,)
    shape = SHAPES[(0, 3, 5)[(len(feature) + len(layout)) % 3]]
    spec = Spec(layout=layout, features=features, dtype=usual_dtype(backend), requires_grad=("q", "k", "v"), **shape)
    hold(make(spec, seed=2), backend, through_lse=False)


@pytest.mark.parametrize("features", [*PAIRS, *TRIPLES], ids=name_of)
def test_features_together_are_exact_with_every_gradient(features: tuple[str, ...], backend: str) -> None:
    index = sum(map(len, features))
    shape = SHAPES[index % len(SHAPES)]
    dtypes = ROOMS[backend].dtypes
    dtype = dtypes[index % len(dtypes)]
    spec = Spec(dtype=dtype, layout=LAYOUTS[index % 3], features=features, requires_grad="all", **shape)
    hold(make(spec, seed=index), backend, through_lse=bool(index % 2))


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    "features", [("causal",), ("top_left",), ("mask",), ("padding",), ("segments",), ("window",)], ids=name_of
)
def test_keys_that_no_query_sees_may_hold_anything(features: tuple[str, ...], poison: float, backend: str) -> None:
    for shape in SHAPES[:2]:
        spec = Spec(features=features, dtype=usual_dtype(backend), requires_grad=("q", "k", "v"), **shape)
        hold(make(spec, seed=3), backend, poison_value=poison)


@pytest.mark.rooms(*(name for name, room in ROOMS.items() if "mask" in room.features))
@pytest.mark.parametrize("scale", [0.25, 30.0])
def test_a_nan_that_comes_back_through_a_row_that_sees_nothing_goes_no_further(backend: str, scale: float) -> None:
    q, k, v = (torch.randn(2, 9, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    mask = torch.rand(9, 9) > 0.3
    mask[3] = False
    out = attention(q, k, v, mask=mask, softmax_scale=scale, backend=backend)
    dout = torch.randn_like(out)
    dout[:, 3] = 0.0
    expected = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    dout[:, 3] = float("nan")
    for actual, other in zip(torch.autograd.grad(out, (q, k, v), dout, retain_graph=True), expected, strict=True):
        assert torch.equal(actual, other)
    if ROOMS[backend].calculus:
        (dq,) = torch.autograd.grad(out, q, dout, create_graph=True)
        for second in torch.autograd.grad(dq.square().sum(), (q, k, v)):
            assert bool(second.isfinite().all())


LONG = (
    {"seqlen_q": 300, "seqlen_k": 700, "features": ("causal",)},
    {"seqlen_q": 700, "seqlen_k": 300, "features": ("causal",)},
    {"seqlen_q": 641, "seqlen_k": 1100, "features": ()},
    {"seqlen_q": 520, "seqlen_k": 1030, "features": ("mask",)},
    {"seqlen_q": 257, "seqlen_k": 1300, "features": ("padding", "causal")},
    {"seqlen_q": 600, "seqlen_k": 600, "features": ("window", "sink", "alibi")},
    {"seqlen_q": 530, "seqlen_k": 530, "features": ("segments", "causal", "softcap")},
    {"seqlen_q": 300, "seqlen_k": 530, "features": ("bias", "dropout")},
    {"seqlen_q": 300, "seqlen_k": 530, "features": ("bias_rows", "top_left")},
    {"seqlen_q": 513, "seqlen_k": 513, "features": ("window_right", "bias_shared")},
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "shape", LONG, ids=lambda shape: f"{shape['seqlen_q']}x{shape['seqlen_k']}-{name_of(shape['features'])}"
)
@pytest.mark.rooms("cpu", "sdpa", "hopper")
def test_lengths_over_several_tiles_are_exact(shape: dict, dtype: torch.dtype, backend: str) -> None:
    spec = Spec(batch=1, nheads=4, nheads_k=2, headdim=24, headdim_v=24, dtype=dtype, requires_grad="all", **shape)
    hold(make(spec, seed=4), backend)


PACKED = (
    {"lengths_q": (17, 0, 5, 33), "lengths_k": (23, 4, 0, 33), "spare": 3},
    {"lengths_q": (64, 1, 0), "lengths_k": (64, 40, 7)},
    {"lengths_q": (0, 0, 9), "lengths_k": (0, 3, 12), "spare": 1},
    {"lengths_q": (12,), "spare": 2},
)
PACKED_FEATURES = [
    (),
    ("causal",),
    ("top_left",),
    ("window",),
    ("window_right",),
    ("softcap", "scale"),
    ("alibi_batch", "sink"),
    ("alibi", "sink_batch", "causal"),
    ("dropout", "window_left"),
]


@pytest.mark.parametrize("features", PACKED_FEATURES, ids=name_of)
@pytest.mark.parametrize("number", range(len(PACKED)))
def test_packed_sequences_are_exact_and_spare_tokens_are_zero(
    number: int, features: tuple[str, ...], backend: str
) -> None:
    dtypes = ROOMS[backend].dtypes
    for dtype in (dtypes[number % len(dtypes)], usual_dtype(backend)):
        spec = Spec(dtype=dtype, features=features, requires_grad="all", layout=LAYOUTS[number % 2], **PACKED[number])
        hold(make(spec, seed=number), backend)


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_packed_sequences_take_any_strides(layout: str, backend: str) -> None:
    dtype = usual_dtype(backend)
    spec = Spec(layout=layout, features=("causal",), dtype=dtype, requires_grad="all", **PACKED[0])
    hold(make(spec, seed=5), backend)
