"""CASES.md: extreme logits, lse and merging, precision, determinism, NaN."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import tilewise
from tests.rooms import here, sized
from tilewise.testing import assert_exact, attention_oracle, sample_of

ALL = pytest.mark.rooms("reference", "cpu", "sdpa", "auto")
pytestmark = pytest.mark.rooms("reference", "cpu", "auto")
INF, NAN = float("inf"), float("nan")
BF16 = torch.bfloat16


@ALL
@pytest.mark.parametrize("length", [704, 129, 191, 192, 193])
@pytest.mark.parametrize("masked", ["tril", "ones", "none"])
def test_case_23_very_negative_lse_beside_a_padded_tile(backend: str, length: int, masked: str) -> None:
    if backend == "reference" and length == 704:
        pytest.skip("the same at 129 to 193; 704 is for tiles")
    q, k, v = (torch.randn(1, length, 1, 64) * 0.1 for _ in range(3))
    q[..., 0], k[..., 0], v = 1, -120 * 8, torch.randn(1, length, 1, 64)
    mask = None if masked == "none" else torch.ones(1, 1, length, length, dtype=torch.bool)
    if mask is not None and masked == "tril":
        mask = mask.tril()
    assert_exact(sample_of(q.to(BF16), k.to(BF16), v.to(BF16), mask=mask), backend, lse_dtype=BF16)


@ALL
@pytest.mark.parametrize("packed", [False, True])
def test_case_25_logits_below_every_sentinel(backend: str, packed: bool) -> None:
    q, k, v = (torch.full((1, 1, 32, 128), x, dtype=BF16, requires_grad=True) for x in (64.0, -64.0, 1.0))
    if packed:
        cu = torch.tensor([0, 1])
        out, lse = tilewise.attention_varlen_with_lse(q[0], k[0], v[0], cu_seqlens_q=cu, backend=backend)
    else:
        out, lse = tilewise.attention_with_lse(q, k, v, backend=backend)
    assert bool((out == 1).all())
    torch.testing.assert_close(lse, torch.full_like(lse, -524288 / math.sqrt(128)))
    for grad in torch.autograd.grad(out.sum(), (q, k, v)):
        assert bool(grad.isfinite().all())


@ALL
@pytest.mark.parametrize("keys", [1, 4])
def test_case_27_huge_inputs(backend: str, keys: int) -> None:
    if here() == "cuda" and backend == "auto":
        backend = "triton"  # what `auto` takes on sm_90 gives NaN past scores of 2**31: docs/semantics.md, Numbers
    q, k = (torch.full((1, n, 1, 64), 133120.0, dtype=BF16) for n in (1, keys))
    assert bool((tilewise.attention(q, k, k, backend=backend) == 133120).all())


@pytest.mark.rooms("reference")
def test_case_29_merging_states_overflows_nowhere(backend: str) -> None:
    out_a, out_b = torch.randn(1, 1, 4, 8, requires_grad=True), torch.randn(1, 1, 4, 8, requires_grad=True)
    lse_a = torch.tensor([[[-200.0], [200.0], [-INF], [-INF]]], requires_grad=True)
    lse_b = torch.tensor([[[200.0], [-200.0], [-INF], [3.0]]], requires_grad=True)
    out, lse = tilewise.merge_states(out_a, lse_a, out_b, lse_b)
    assert torch.equal(lse.flatten(), torch.tensor([200.0, 200.0, -INF, 3.0]))
    expected = torch.stack([out_b[0, 0, 0], out_a[0, 0, 1], torch.zeros(8), out_b[0, 0, 3]])
    assert torch.equal(out[0, 0], expected)
    loss = out.square().sum() + lse[lse.isfinite()].sum()
    for grad in torch.autograd.grad(loss, (out_a, lse_a, out_b, lse_b)):
        assert bool(grad.isfinite().all())


@pytest.mark.parametrize("packed", [False, True])
def test_case_31_lse_is_natural_in_every_layout(backend: str, packed: bool) -> None:
    q, k, v = torch.randn(2, 1, 1, 576), torch.randn(2, 1600, 1, 576), torch.randn(2, 1600, 1, 512)
    q, k, v = (t.to(BF16) for t in (q, k, v))
    if packed:
        cu_q, cu_k = torch.tensor([0, 1, 2]), torch.tensor([0, 1600, 3200])
        flat = [t.flatten(0, 1) for t in (q, k, v)]
        out, lse = tilewise.attention_varlen_with_lse(*flat, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, backend=backend)
        out, lse = out[:, None], lse.T[..., None]
    else:
        out, lse = tilewise.attention_with_lse(q, k, v, backend=backend)
    scores = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) * 576**-0.5
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-4)
    assert out.shape == (2, 1, 1, 512)


@ALL
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("padded", [False, True])
def test_case_33_a_loss_on_lse_alone_has_its_gradient(backend: str, dtype: torch.dtype, padded: bool) -> None:
    q, k, v = (torch.randn(2, 64, 4, 32, dtype=dtype, requires_grad=True) for _ in range(3))
    mask = torch.ones(2, 1, 64, 64, dtype=torch.bool)
    mask[1, :, 10:20] = not padded
    sample = sample_of(q, k, v, causal=True, mask=mask)
    out, lse = tilewise.attention_with_lse(sample.q, sample.k, sample.v, causal=True, mask=mask, backend=backend)
    seen = lse.isfinite()
    assert bool(seen.all()) != padded
    loss = out.sum() * 0 + lse.square()[seen].sum()
    grads = torch.autograd.grad(loss, (sample.q, sample.k, sample.v))
    assert all(bool(grad.isfinite().all()) for grad in grads), "rows without keys contribute nothing"
    assert not grads[2].any()
    sample.dout = torch.zeros_like(sample.dout)
    sample.dlse = torch.where(seen, 2 * lse.detach(), 0.0)
    assert_exact(sample, backend, lse_dtype=dtype)


def test_case_33_neighbour_the_whole_lse_squared_stays_clean_on_empty_rows(backend: str) -> None:
    q, k, v = (torch.randn(1, 8, 2, 8, requires_grad=True) for _ in range(3))
    mask = torch.ones(8, 8, dtype=torch.bool)
    mask[3] = False
    lse = tilewise.attention_with_lse(q, k, v, mask=mask, backend=backend)[1]
    for grad in torch.autograd.grad(lse.square().sum(), (q, k, v)):
        assert bool(grad.isfinite().all()), "a row whose lse is -inf contributes nothing"


@pytest.mark.parametrize("causal", [False, True])
def test_case_77_a_bias_that_grows_to_1024(backend: str, causal: bool) -> None:
    length = 1025
    q, k, v = (torch.randn(1, length, 1, 64, dtype=BF16) for _ in range(3))
    bias = torch.arange(length)[:, None].float() - torch.arange(length)
    assert_exact(sample_of(q, k, v, bias=bias[None, None], causal=causal), backend, lse_dtype=BF16)


@ALL
@pytest.mark.parametrize("causal", [False, True])
def test_case_91_neighbour_outlier_channels_and_a_large_spread(backend: str, causal: bool) -> None:
    q, k, v = (torch.randn(2, 96, 4, 32) for _ in range(3))
    k[..., 7] *= 60
    q[:, ::13] *= 20
    assert_exact(sample_of(q, k, v, causal=causal), backend)


@ALL
@pytest.mark.parametrize("seed_of_gradient", [False, True])
def test_case_101_deterministic_means_bitwise(backend: str, seed_of_gradient: bool) -> None:
    length = sized(300, 2048)
    q = torch.randn(2, length, 8, 128, dtype=BF16)
    k, v = (torch.randn(2, length, 2, 128, dtype=BF16) for _ in range(2))
    bias = torch.randn(1, 8, length, length)
    sample = sample_of(q, k, v, bias=bias, causal=True, requires_grad="all" if backend != "sdpa" else ("q", "k", "v"))
    runs = []
    for _ in range(sized(3, 30)):
        out = tilewise.attention(
            sample.q, sample.k, sample.v, bias=sample.options["bias"], causal=True, deterministic=True, backend=backend
        )
        runs.append([out, *torch.autograd.grad(out, list(sample.differentiable().values()), sample.dout)])
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))
    assert all(bool(t.isfinite().all()) for t in runs[0])


@ALL
def test_case_101_many_small_calls_never_give_nan(backend: str) -> None:
    x = torch.randn(20, 4, 4, 32, dtype=BF16, requires_grad=True)
    first = None
    for _ in range(sized(60, 500)):
        out = tilewise.attention(x, x, x, causal=True, deterministic=True, backend=backend)
        (grad,) = torch.autograd.grad(out, x, torch.ones_like(out))
        first = grad if first is None else first
        assert torch.equal(first, grad)
    assert bool(first is not None and first.isfinite().all())


@ALL
@pytest.mark.parametrize("rows", ["all", "one"])
@pytest.mark.parametrize("keys", [16, 5])
def test_case_145_nan_in_a_query_is_nan_in_its_row(backend: str, rows: str, keys: int) -> None:
    q, k, v = torch.randn(2, 16, 4, 8), torch.randn(2, keys, 4, 8), torch.randn(2, keys, 4, 8)
    q[1, 3 if rows == "one" else slice(None)] += NAN
    out, lse = tilewise.attention_with_lse(q, k, v, backend=backend)
    assert torch.equal(out.isnan(), q.isnan())
    assert torch.equal(lse.isnan(), q.isnan().any(-1).transpose(1, 2))


@ALL
@pytest.mark.parametrize("tensor", ["k", "v"])
def test_case_145_neighbour_nan_in_a_key_reaches_every_row_that_sees_it(backend: str, tensor: str) -> None:
    q, k, v = (torch.randn(1, 20, 2, 8) for _ in range(3))
    {"k": k, "v": v}[tensor][0, 4, 1] = NAN
    out = tilewise.attention(q, k, v, causal=True, backend=backend)
    assert bool(out[:, 4:, 1].isnan().all())
    assert bool(out[:, :, 0].isfinite().all())


@pytest.mark.parametrize("scale", [0.0, -1.0])
@pytest.mark.parametrize("feature", ["causal", "mask", "window", "none"])
def test_case_149_masks_come_after_the_scale(backend: str, scale: float, feature: str) -> None:
    q, k, v = (torch.randn(1, 9, 2, 16) for _ in range(3))
    mask = torch.rand(9, 9) < 0.5
    mask[4] = False
    options = {"causal": {"causal": True}, "mask": {"mask": mask}, "window": {"window_size": (2, 1)}, "none": {}}[
        feature
    ]
    sample = sample_of(q, k, v, softmax_scale=scale, **options)
    assert_exact(sample, backend)
    if scale == 0 and feature == "causal":
        out = tilewise.attention(q, k, v, softmax_scale=0.0, causal=True, backend=backend)
        torch.testing.assert_close(out, v.cumsum(1) / torch.arange(1, 10)[:, None, None])


@pytest.mark.rooms("cpu", "auto")
def test_case_155_a_random_dense_mask_errs_no_more_at_length(backend: str) -> None:
    errors = []
    for length in (512, sized(6128, 17776)):
        q, k, v = (torch.randn(1, length, 2, 64, dtype=torch.float16) for _ in range(3))
        mask = torch.randint(0, 2, (1, 1, length, length)).bool()
        out = tilewise.attention(q, k, v, mask=mask, backend=backend)
        rows = torch.tensor([0, 1, length // 2, length - 112, length - 1])
        expected = attention_oracle(q[:, rows], k, v, mask=mask[:, :, rows])[0]
        error = (out[:, rows].double() - expected).norm() / expected.norm()
        errors.append(float(error))
    assert errors[1] < 2 * errors[0]
    assert errors[1] < 1e-3


def test_case_165_a_sink_is_a_denominator_and_no_key(backend: str) -> None:
    q, k, v = torch.randn(1, 300, 8, 16), torch.randn(1, 300, 2, 16), torch.randn(1, 300, 2, 16)
    sink = torch.full((8,), 2.0)
    sample = sample_of(q, k, v, sink=sink, window_size=(20, 20), requires_grad="all")
    assert_exact(sample, backend)
    bias = torch.zeros(1, 1, 1, 300)
    bias[..., 0] = 2
    other = tilewise.attention(q, k, v, bias=bias, window_size=(20, 20), backend=backend)
    mine = tilewise.attention(q, k, v, sink=sink, window_size=(20, 20), backend=backend)
    assert float((mine - other).abs().max()) > 0.01


@pytest.mark.parametrize(("features", "length"), list(itertools.product(["window", "mask"], [128, 300])))
def test_case_165_neighbour_rows_that_miss_a_whole_visited_block(backend: str, features: str, length: int) -> None:
    q, k, v = (torch.randn(1, length, 2, 16) for _ in range(3))
    mask = torch.zeros(length, length, dtype=torch.bool)
    mask[:, -1] = True
    mask[5, 0] = True
    options = {"window_size": (3, 0)} if features == "window" else {"mask": mask}
    assert_exact(sample_of(q, k, v, sink=torch.randn(2), requires_grad="all", **options), backend)


@ALL
@pytest.mark.parametrize("lowest", [torch.finfo(torch.float64).min, -1e39, 1e39])
@pytest.mark.parametrize("shape", [(5, 5), (1, 5), (5, 1), "expanded"], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_a_finite_bias_beyond_fp32_excludes_nothing(
    backend: str, lowest: float, shape: tuple[int, int] | str, dtype: torch.dtype
) -> None:
    q, k, v = (torch.randn(2, 5, 2, 8, dtype=dtype) for _ in range(3))
    bias = torch.full((1, 1) if shape == "expanded" else shape, lowest, dtype=torch.float64)
    bias = bias.expand(5, 5) if shape == "expanded" else bias
    out, lse = tilewise.attention_with_lse(q, k, v, bias=bias, backend=backend)
    torch.testing.assert_close(out, v.float().mean(1, keepdim=True).expand_as(v).to(dtype))
    assert bool(lse.isfinite().all())


@ALL
def test_infinities_and_nan_of_an_fp64_bias_stay_what_they_are(backend: str) -> None:
    q, k, v = (torch.randn(1, 20, 2, 8) for _ in range(3))
    bias = torch.zeros(20, 20, dtype=torch.float64)
    bias[2], bias[3, :5], bias[4, 7] = -INF, -INF, NAN
    out, lse = tilewise.attention_with_lse(q, k, v, bias=bias, backend=backend)
    right, right_lse = tilewise.attention_with_lse(q, k, v, bias=bias.float(), backend="reference")
    torch.testing.assert_close(out, right, equal_nan=True)
    torch.testing.assert_close(lse, right_lse, equal_nan=True)
    assert not out[0, 2].any()


def test_the_gradient_of_a_bias_beyond_fp32_has_its_dtype_and_its_sum(backend: str) -> None:
    q, k, v = (torch.randn(1, 5, 2, 8) for _ in range(3))
    bias = torch.full((5, 5), -1e39, dtype=torch.float64, requires_grad=True)
    plain = torch.zeros(5, 5, dtype=torch.float64, requires_grad=True)
    grads = []
    for one in (bias, plain):
        out = tilewise.attention(q * 0, k, v, bias=one, backend=backend)
        grads.append(torch.autograd.grad(out.square().sum(), one)[0])
    assert grads[0].dtype == torch.float64
    torch.testing.assert_close(*grads)


def test_slopes_and_sinks_beyond_fp32_are_the_largest_numbers(backend: str) -> None:
    q, k, v = (torch.randn(1, 5, 2, 8) for _ in range(3))
    huge = torch.full((2,), 1e300, dtype=torch.float64)
    torch.testing.assert_close(tilewise.attention(q, k, v, alibi_slopes=huge, backend=backend), v)
    out, lse = tilewise.attention_with_lse(q, k, v, sink=huge, backend=backend)
    assert not out.any()
    assert bool(lse.isfinite().all())


def test_explain_names_the_copy_that_brings_a_bias_into_range(backend: str) -> None:
    q = torch.randn(1, 5, 2, 8)
    bias = torch.zeros(5, 1, dtype=torch.float64).expand(5, 5)
    told = tilewise.explain(q, q, q, bias=bias, backend=backend)
    assert told.as_dict()["copied_bytes"] == {"bias, in the range of fp32": 40}
    assert tilewise.explain(q, q, q, bias=bias.float(), backend=backend).as_dict()["copied_bytes"] == {}
