"""First and second derivatives, reverse and forward, against finite differences in fp64."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import tilewise
from tests.rooms import ROOMS
from tilewise.testing import FEATURES, Sample, Spec, compatible, make

pytestmark = pytest.mark.rooms(*(name for name, room in ROOMS.items() if room.calculus))
TINY = {
    "batch": 1, "seqlen_q": 3, "seqlen_k": 4, "nheads": 2, "nheads_k": 1, "headdim": 2, "headdim_v": 3,
    "dtype": torch.float64, "requires_grad": "all",
}  # fmt: skip
PACKED = {**TINY, "lengths_q": (3, 0, 2), "lengths_k": (5, 2, 1), "spare": 1}
PAIRS = [pair for pair in itertools.combinations(FEATURES, 2) if compatible(pair)]
# The packed form has these; the others are dense.
PACKED_FEATURES = [
    "causal",
    "top_left",
    "window",
    "softcap",
    "alibi_batch",
    "sink_batch",
    "alibi",
    "sink",
    "dropout",
    "scale",
]


def call_of(sample: Sample, backend: str):
    """The call as a function of the tensors that require grad, returning what is finite of out and lse."""
    names = list(sample.differentiable())
    run = tilewise.attention_varlen_with_lse if sample.spec.varlen else tilewise.attention_with_lse

    def call(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        given = dict(zip(names, tensors, strict=True))
        options = {name: given.get(name, value) for name, value in sample.options.items()}
        out, lse = run(given["q"], given["k"], given["v"], **options, backend=backend)
        return out, lse[lse.isfinite()]

    return call, tuple(sample.differentiable().values())


def check(sample: Sample, backend: str, *, fast: bool = True, mixed: bool = False) -> None:
    call, tensors = call_of(sample, backend)
    assert gradcheck(call, tensors, fast_mode=fast, check_forward_ad=True)
    assert gradgradcheck(call, tensors, fast_mode=True, check_fwd_over_rev=mixed)


@pytest.mark.parametrize("feature", ["plain", *FEATURES])
def test_each_feature_has_right_first_and_second_derivatives(feature: str, backend: str) -> None:
    features = () if feature == "plain" else (feature,)
    check(make(Spec(features=features, **TINY), seed=1), backend, fast=False, mixed=True)


@pytest.mark.rooms("cpu")
@pytest.mark.parametrize("feature", ["plain", *FEATURES])
@pytest.mark.usefixtures("small_tiles")
def test_each_feature_has_right_derivatives_over_many_tiles(feature: str, backend: str) -> None:
    features = () if feature == "plain" else (feature,)
    check(make(Spec(features=features, **TINY), seed=1), backend)


@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_each_pair_of_features_has_right_derivatives(pair: tuple[str, str], backend: str) -> None:
    check(make(Spec(features=pair, **TINY), seed=2), backend)


@pytest.mark.parametrize("feature", ["plain", *PACKED_FEATURES])
def test_packed_sequences_have_right_derivatives(feature: str, backend: str) -> None:
    features = () if feature == "plain" else (feature,)
    check(make(Spec(features=features, **PACKED), seed=3), backend)


@pytest.mark.usefixtures("small_tiles")
def test_everything_at_once_has_right_derivatives(backend: str) -> None:
    features = (
        "causal",
        "window_left",
        "segments",
        "mask",
        "bias",
        "softcap",
        "alibi_batch",
        "sink",
        "dropout",
        "scale",
    )
    check(make(Spec(features=features, **TINY), seed=4), backend, mixed=True)


@pytest.mark.parametrize(
    "names", [("q",), ("k",), ("v",), ("bias",), ("sink",), ("alibi_slopes",), ("q", "sink")], ids="+".join
)
def test_derivatives_by_some_of_the_tensors(names: tuple[str, ...], backend: str) -> None:
    sample = make(Spec(features=("bias", "sink", "alibi"), **{**TINY, "requires_grad": names}), seed=5)
    fixed = {"q": sample.q, "k": sample.k, "v": sample.v, **sample.options}

    def call(*tensors: torch.Tensor) -> torch.Tensor:
        given = fixed | dict(zip(sample.differentiable(), tensors, strict=True))
        return tilewise.attention(**given, backend=backend)

    tensors = tuple(sample.differentiable().values())
    assert gradcheck(call, tensors, check_forward_ad=True)
    assert gradgradcheck(call, tensors, fast_mode=True, check_fwd_over_rev=True)


def test_case_115_a_gradient_penalty_is_double_backward(backend: str) -> None:
    sample = make(Spec(seqlen_q=24, seqlen_k=24, requires_grad=("q", "k", "v"), features=("causal",)))
    exact = sample.converted(torch.float64)

    def penalty(out: torch.Tensor, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        grads = torch.autograd.grad(out, tensors[0], torch.ones_like(out), create_graph=True)
        return torch.autograd.grad(grads[0].square().sum(), tensors)

    from tilewise.testing import attention_oracle

    tensors = (sample.q, sample.k, sample.v)
    mine = penalty(tilewise.attention(*tensors, causal=True, backend=backend), tensors)
    tensors = (exact.q, exact.k, exact.v)
    right = penalty(attention_oracle(*tensors, causal=True)[0], tensors)
    for a, b in zip(mine, right, strict=True):
        torch.testing.assert_close(a.double(), b, atol=2e-4, rtol=2e-4)


def test_a_third_derivative_is_refused(backend: str) -> None:
    x = torch.randn(1, 3, 1, 2, dtype=torch.float64, requires_grad=True)
    value = tilewise.attention(x, x, x, backend=backend).square().sum()
    for _ in range(2):
        (grad,) = torch.autograd.grad(value, x, create_graph=True)
        value = grad.square().sum()
    with pytest.raises(NotImplementedError, match="third"):
        torch.autograd.grad(value, x)


@pytest.mark.parametrize("feature", ["plain", "causal", "bias", "softcap", "alibi", "sink", "dropout"])
def test_hvp_by_the_double_backward_trick_is_vhp(feature: str, backend: str) -> None:
    sample = make(Spec(features=() if feature == "plain" else (feature,), **TINY), seed=6)
    call, tensors = call_of(sample, backend)

    def loss(*given: torch.Tensor) -> torch.Tensor:
        out, lse = call(*given)
        return out.sin().sum() + lse.square().sum()

    inputs = tuple(t.detach() for t in tensors)
    along = tuple(torch.randn_like(t) for t in inputs)
    mine = torch.autograd.functional.hvp(loss, inputs, along)
    torch.testing.assert_close(mine, torch.autograd.functional.vhp(loss, inputs, along))
