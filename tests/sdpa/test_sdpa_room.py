"""The sdpa room: which pairs it hands to torch's kernel, what it repairs, what it refuses and why."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tilewise
from tilewise.backends.sdpa import BACKEND
from tilewise.backends.sdpa.kernel import parts
from tilewise.device import DeviceFacts
from tilewise.problem import Problem
from tilewise.testing import Spec, assert_exact, attention_oracle, make

FACTS = DeviceFacts(type="cpu")
INF, NAN = float("inf"), float("nan")
LENGTHS = st.integers(1, 12)
GOOD = Problem(batch=2, seqlen_q=32, seqlen_k=32, nheads=4, nheads_k=2, headdim=16, headdim_v=16, softmax_scale=0.25)


@given(LENGTHS, LENGTHS, st.sampled_from([None, "bottom_right", "top_left"]), st.none() | st.integers(0, 14))
def test_the_parts_are_exactly_the_pairs_of_the_band(
    seqlen_q: int, seqlen_k: int, causal: str | None, right: int | None
) -> None:
    problem = GOOD.replace(seqlen_q=seqlen_q, seqlen_k=seqlen_k, causal=causal, window_right=right)
    count = torch.zeros(seqlen_q, seqlen_k, dtype=torch.int64)
    for part in parts(problem):
        assert part.last > part.first, "torch's kernel must never get an empty part"
        assert part.row < seqlen_q
        block = torch.ones(seqlen_q - part.row, part.last - part.first, dtype=torch.int64)
        count[part.row :, part.first : part.last] += block.tril() if part.causal else block
    i, j = torch.arange(seqlen_q)[:, None], torch.arange(seqlen_k)
    expected = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    if causal:
        expected &= j <= i + (seqlen_k - seqlen_q if causal == "bottom_right" else 0)
    if right is not None:
        expected &= j <= i + seqlen_k - seqlen_q + right
    assert torch.equal(count, expected.long())


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"device_type": "cuda"}, "device"),
        ({"headdim_v": 8}, "headdim_v"),
        ({"inner_contiguous": False}, "last stride"),
        ({"window_left": 3}, "window_left"),
        ({"segments": True}, "segments"),
        ({"softcap": 5.0}, "softcap"),
        ({"alibi": True}, "alibi"),
        ({"sink": True}, "sink"),
        ({"dropout_p": 0.1}, "dropout"),
        ({"bias_shape": (1, 1, 32, 32), "bias_dtype": torch.float32, "needs_grad": ("bias",)}, "bias"),
        ({"derivative": "jvp"}, "derivative"),
        ({"derivative": "second"}, "derivative"),
        ({"causal": "bottom_right", "softmax_scale": 0.0}, "softmax_scale"),
        ({"mask_shape": (2, 1, 1, 32), "bias_shape": (1, 4, 32, 1), "bias_dtype": torch.float32}, "mask and bias"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_thing_it_would_get_wrong_is_one_reason(changes: dict, what: str) -> None:
    assert BACKEND.supports(GOOD, FACTS) == ()
    reasons = BACKEND.supports(GOOD.replace(**changes), FACTS)
    assert [reason.what for reason in reasons if what in reason.what], reasons
    assert len(reasons) == 1


def test_every_reason_is_listed_at_once() -> None:
    reasons = BACKEND.supports(GOOD.replace(sink=True, alibi=True, softcap=1.0, headdim_v=3), FACTS)
    assert {reason.what for reason in reasons} == {"headdim_v", "softcap", "alibi_slopes", "sink"}


def test_a_window_wider_than_the_keys_is_no_window() -> None:
    assert BACKEND.supports(GOOD.replace(window_left=31, window_right=31), FACTS) == ()


@pytest.mark.parametrize("keys", [1, 5, 16, 40])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_a_nan_query_gives_a_nan_row_and_no_other(keys: int, causal: bool, masked: bool) -> None:
    q, k, v = torch.randn(2, 6, 4, 8), torch.randn(2, keys, 2, 8), torch.randn(2, keys, 2, 8)
    q[1, 5, 2] = NAN
    mask = torch.rand(2, 1, 6, keys) < 0.8 if masked else None
    if mask is not None:
        mask[:, :, :, 0] = True
        mask[:, :, 5] = True
    options = {"causal": "top_left" if causal else False, "mask": mask}
    out, lse = tilewise.attention_with_lse(q, k, v, **options, backend="sdpa")
    expected, expected_lse = attention_oracle(q, k, v, **options)
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(lse.isnan(), expected_lse.isnan())
    assert int(lse.isnan().sum()) == 1


def test_nan_in_a_query_that_sees_nothing_reaches_neither_out_nor_gradients() -> None:
    sample = make(Spec(features=("mask",), requires_grad=("q", "k", "v")))
    empty = ~sample.options["mask"].any(-1)[:, 0]
    assert bool(empty.any())
    clean = make(sample.spec)
    with torch.no_grad():
        sample.q[empty] = NAN
    for one in (sample, clean):
        one.out, one.lse = tilewise.attention_with_lse(one.q, one.k, one.v, **one.options, backend="sdpa")
    assert torch.equal(sample.out, clean.out)
    assert torch.equal(sample.lse, clean.lse)
    grads = [torch.autograd.grad((s.out, s.lse), (s.q, s.k, s.v), (s.dout, s.dlse)) for s in (sample, clean)]
    for name, dirty, right in zip("qkv", *grads, strict=True):
        torch.testing.assert_close(dirty, right, msg=name)


def test_bias_of_minus_infinity_empties_a_row() -> None:
    sample = make(Spec(features=("bias",), requires_grad=("q", "k", "v")))
    sample.options["bias"].detach()[:, :, 2] = -INF
    sample.options["bias"].detach()[1, :, :, 4] = -INF
    assert_exact(sample, "sdpa")


@pytest.mark.parametrize("features", [("bias",), ("bias", "causal"), ("bias", "mask"), ("bias", "top_left", "padding")])
@pytest.mark.parametrize("through_lse", [False, True])
def test_rows_whose_lse_swallows_their_scores_have_right_gradients(
    features: tuple[str, ...], through_lse: bool
) -> None:
    sample = make(Spec(features=features, requires_grad=("q", "k", "v"), seqlen_q=23, seqlen_k=17), seed=1)
    lowest = torch.finfo(torch.float32).min
    sample.options["bias"].detach()[0, :, 5:9] = lowest
    sample.options["bias"].detach()[1, 1] = 3e5
    assert_exact(sample, "sdpa", through_lse=through_lse)


def test_large_scores_have_right_gradients_without_bias() -> None:
    assert_exact(make(Spec(spread=250.0, headdim=8, headdim_v=8, requires_grad=("q", "k", "v"))), "sdpa")


def test_rows_without_gradient_keep_the_fast_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewise.backends.sdpa import rowwise

    monkeypatch.setattr(rowwise, "backward", lambda *_: pytest.fail("padding rows took the slow way"))
    sample = make(Spec(features=("bias",), requires_grad=("q", "k", "v")))
    sample.options["bias"].detach()[:, :, :4] = torch.finfo(torch.float32).min
    sample.dout[:, :4] = 0
    out = tilewise.attention(sample.q, sample.k, sample.v, **sample.options, backend="sdpa")
    assert all(bool(g.isfinite().all()) for g in torch.autograd.grad(out, (sample.q, sample.k, sample.v), sample.dout))


def test_expanded_masks_and_biases_are_not_written_out() -> None:
    from tilewise.backends.sdpa.backend import _additive
    from tilewise.inputs import Inputs

    q = torch.randn(3, 20, 4, 8)
    mask = torch.ones(3, 1, 1, 20, dtype=torch.bool).expand(3, 4, 20, 20)
    bias = torch.zeros(1, 1, 20, 20, dtype=torch.float64).expand(3, 4, 20, 20)
    for changes in ({"mask": mask}, {"bias": bias}):
        added = _additive(GOOD, Inputs(q=q, k=q, v=q, **changes))
        assert added is not None
        assert added.numel() <= 400


def test_the_same_call_gives_the_same_bits() -> None:
    results = []
    for _ in range(5):
        sample = make(
            Spec(seqlen_q=200, seqlen_k=333, headdim=32, headdim_v=32, features=("causal",), requires_grad="all")
        )
        out = tilewise.attention(sample.q, sample.k, sample.v, **sample.options, deterministic=True, backend="sdpa")
        results.append([out, *torch.autograd.grad(out, (sample.q, sample.k, sample.v), sample.dout)])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
