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


FEW = {"q": (1, 2, 1, 4), "k": (1, 4, 1, 4)}
BANDS = [{"causal": True}, {"window_size": (None, 1)}, {"causal": "top_left", "window_size": (None, 0)}]


@pytest.mark.parametrize("options", BANDS, ids=str)
@pytest.mark.parametrize("lowest", [-1e8, -1e30, torch.finfo(torch.float32).min, 1e8])
@pytest.mark.parametrize("shape", [(2, 4), (1, 4), (2, 1)])
def test_a_large_lse_of_two_parts_keeps_the_number_of_their_keys(
    options: dict, lowest: float, shape: tuple[int, int]
) -> None:
    q, k = torch.zeros(1, 2, 1, 4).requires_grad_(), torch.randn(1, 4, 1, 4).requires_grad_()
    v = torch.arange(4.0).reshape(1, 4, 1, 1).expand(1, 4, 1, 4).clone().requires_grad_()
    bias = torch.full(shape, lowest)
    out = tilewise.attention(q, k, v, bias=bias, backend="sdpa", **options)
    plain = tilewise.attention(q, k, v, backend="reference", **options)
    torch.testing.assert_close(out, plain)
    grads, expected = (torch.autograd.grad(one.sum(), (q, k, v)) for one in (out, plain))
    for name, grad, right in zip("qkv", grads, expected, strict=True):
        torch.testing.assert_close(grad, right, msg=name)


def test_large_equal_scores_of_two_parts_without_bias_weigh_the_same() -> None:
    q, k = torch.full(FEW["q"], 1e4), torch.full(FEW["k"], 1e4)
    v = torch.arange(4.0).reshape(1, 4, 1, 1).expand(1, 4, 1, 4).contiguous()
    out = tilewise.attention(q, k, v, causal=True, backend="sdpa")
    torch.testing.assert_close(out[0, :, 0, 0], torch.tensor([1.0, 1.5]))


def test_large_and_small_rows_of_two_parts_stand_side_by_side() -> None:
    spec = Spec(features=("bias", "causal", "mask"), requires_grad=("q", "k", "v"), seqlen_q=11, seqlen_k=29)
    sample = make(spec, seed=4)
    bias = sample.options["bias"].detach()
    bias[0, :, 3:6] = torch.finfo(torch.float32).min
    bias[1, 1, 7] = -1e8
    sample.k.detach()[:, -1] = NAN  # only the last query could see it, and the mask hides it
    sample.options["mask"] = sample.options["mask"].clone()
    sample.options["mask"][..., -1] = False
    out = tilewise.attention(sample.q, sample.k, sample.v, **sample.options, backend="sdpa")
    right = tilewise.attention(sample.q, sample.k, sample.v, **sample.options, backend="cpu")
    torch.testing.assert_close(out, right)


def test_moderate_rows_are_merged_without_a_second_look(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewise.backends.sdpa import rowwise

    monkeypatch.setattr(rowwise, "forward", lambda *_: pytest.fail("ordinary rows took the slow way"))
    sample = make(Spec(features=("bias", "causal", "mask"), seqlen_q=11, seqlen_k=29))
    assert bool((~sample.options["mask"]).any())
    tilewise.attention(sample.q, sample.k, sample.v, **sample.options, backend="sdpa")


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("options", [{"causal": True}, {"causal": "top_left"}, {"window_size": (None, 2)}], ids=str)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(4, 4), (24, 40), (40, 24), (40, 40)])
@pytest.mark.parametrize("masked", [False, True])
def test_what_the_bias_holds_where_the_band_excludes_does_not_matter(
    options: dict, seqlen_q: int, seqlen_k: int, bad: float, masked: bool
) -> None:
    q = torch.randn(2, seqlen_q, 4, 8, requires_grad=True)
    k, v = (torch.randn(2, seqlen_k, 2, 8, requires_grad=True) for _ in range(2))
    upper = (0 if options.get("causal") == "top_left" else seqlen_k - seqlen_q) + options.get("window_size", (0, 0))[1]
    clean = torch.randn(seqlen_q, seqlen_k)
    dirty = clean.masked_fill(torch.ones_like(clean, dtype=torch.bool).triu(upper + 1), bad)
    options = {**options, "mask": torch.ones(1, 1, seqlen_q, seqlen_k, dtype=torch.bool) if masked else None}
    results = []
    for bias in (dirty, clean):
        out, lse = tilewise.attention_with_lse(q, k, v, bias=bias, backend="sdpa", **options)
        grads = torch.autograd.grad((out, lse), (q, k, v), (torch.ones_like(out), lse.isfinite().float()))
        results.append((out, lse, *grads))
    for name, one, right in zip(("out", "lse", "dq", "dk", "dv"), *results, strict=True):
        torch.testing.assert_close(one, right, msg=name)


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("keys", [5, 40])
def test_a_nan_of_the_bias_reaches_the_rows_that_see_it_alone(keys: int, bad: float) -> None:
    q, k, v = (torch.randn(1, keys, 2, 8) for _ in range(3))
    of_keys, of_pairs = torch.zeros(1, keys), torch.zeros(keys, keys)
    of_keys[0, 3] = bad
    of_pairs[:, 3] = bad
    for bias in (of_keys, of_pairs):
        out, lse = tilewise.attention_with_lse(q, k, v, bias=bias, causal=True, backend="sdpa")
        right, right_lse = tilewise.attention_with_lse(q, k, v, bias=bias, causal=True, backend="reference")
        torch.testing.assert_close(out, right, equal_nan=True)
        torch.testing.assert_close(lse, right_lse, equal_nan=True)
        assert int(lse.isnan().sum()) == 2 * (keys - 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("scale", [1e-46, 1e-300, 5e-324])
@pytest.mark.parametrize("packed", [False, True])
def test_a_scale_that_fp32_cannot_hold_is_refused_beside_a_band(scale: float, dtype: torch.dtype, packed: bool) -> None:
    q, k, v = (torch.randn(1, 20, 2, 8, dtype=dtype) for _ in range(3))
    options = {"causal": True}
    if packed:
        offsets = torch.tensor([0, 7, 20], dtype=torch.int32)
        q, k, v, options = q[0], k[0], v[0], {"causal": True, "cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
    call, explain = (
        (tilewise.attention_varlen, tilewise.explain_varlen) if packed else (tilewise.attention, tilewise.explain)
    )
    out, right = (call(q, k, v, softmax_scale=number, **options) for number in (scale, 0.0))
    torch.testing.assert_close(out, right)
    reasons = explain(q, k, v, softmax_scale=scale, **options).as_dict()["refused"]["sdpa"]
    assert [reason["what"] for reason in reasons] == ["softmax_scale with causal"]
