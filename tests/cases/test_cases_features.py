"""CASES.md: corners, windows, GQA, bias gradients, ALiBi, softcap, sinks, dropout, dtypes, arguments."""

from __future__ import annotations

import itertools

import pytest
import torch

import tilewise
from tests.rooms import here, sized
from tilewise.testing import assert_exact, attention_oracle, offsets, sample_of

ALL = pytest.mark.rooms("reference", "cpu", "sdpa", "auto")
pytestmark = pytest.mark.rooms("reference", "cpu", "auto")
INF = float("inf")
BF16 = torch.bfloat16


@ALL
def test_case_35_the_two_corners(backend: str) -> None:
    q, k, v = torch.randn(1, 1, 4, 64), torch.randn(1, 16, 4, 64), torch.randn(1, 16, 4, 64)
    top = tilewise.attention(q, k, v, causal="top_left", backend=backend)
    torch.testing.assert_close(top, v[:, :1])
    bottom = tilewise.attention(q, k, v, causal=True, backend=backend)
    torch.testing.assert_close(bottom, attention_oracle(q, k, v)[0].float())


@ALL
def test_case_37_the_backward_has_the_forwards_corner(backend: str) -> None:
    q, k, v = (torch.randn(1, n, h, 128, dtype=BF16) for n, h in ((96, 8), (256, 2), (256, 2)))
    assert_exact(sample_of(q, k, v, causal=True), backend, lse_dtype=BF16)


def test_case_39_a_window_counts_itself_extra(backend: str) -> None:
    q, k, v = (torch.randn(1, 16, 2, 8) for _ in range(3))
    i, j = torch.arange(16)[:, None], torch.arange(16)
    eager = (j <= i) & (i - j < 4)
    assert eager[7].nonzero().flatten().tolist() == [4, 5, 6, 7]
    windowed = tilewise.attention(q, k, v, window_size=(3, 0), causal=True, backend=backend)
    torch.testing.assert_close(windowed, tilewise.attention(q, k, v, mask=eager, backend=backend))
    torch.testing.assert_close(windowed, tilewise.attention(q, k, v, window_size=(3, 0), backend=backend))


@ALL
def test_case_65_heads_share_keys_in_blocks(backend: str) -> None:
    q, k, v = torch.randn(2, 5, 8, 8), torch.randn(2, 7, 2, 8), torch.randn(2, 7, 2, 8)
    mask = torch.rand(5, 7) < 0.6
    for options in ({}, {"causal": True}, {"mask": mask}):
        sample = sample_of(q, k, v, **options)
        assert_exact(sample, backend)
        alone = tilewise.attention(q[:, :, 3:4], k[:, :, :1], v[:, :, :1], **options, backend="reference")
        together = tilewise.attention(q, k, v, **options, backend=backend)
        torch.testing.assert_close(together[:, :, 3:4], alone, atol=1e-6, rtol=1e-5)
    with pytest.raises(tilewise.InvalidInput, match="nheads"):
        tilewise.attention(q[:, :, :7], k, v, backend=backend)


@ALL
def test_case_67_gqa_and_a_bias_of_ones(backend: str) -> None:
    q, k, v = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 2, 8), torch.randn(2, 3, 2, 8)
    with_ones = tilewise.attention(q, k, v, bias=torch.ones(3, 3), backend=backend)
    torch.testing.assert_close(with_ones, tilewise.attention(q, k, v, backend=backend))


@pytest.mark.rooms("cpu", "sdpa", "auto")
@pytest.mark.parametrize("packed", [False, True])
def test_case_69_outlier_channels_in_wide_heads(backend: str, packed: bool) -> None:
    length = sized(256, 512)
    q = torch.randn(2, length, 16, 256)
    k, v = (torch.randn(2, length, 2, 256) for _ in range(2))
    k[..., 7] *= 60
    q[:, 3:9] *= 20
    q, k, v = (t.to(BF16).requires_grad_() for t in (q, k, v))
    dout = torch.randn(2, length, 16, 256, dtype=BF16)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if not packed:
            return tilewise.attention(q, k, v, causal=True, backend=backend)
        flat = [t.flatten(0, 1) for t in (q, k, v)]
        cu = offsets([length] * q.shape[0])
        return tilewise.attention_varlen(*flat, cu_seqlens_q=cu, causal=True, backend=backend).unflatten(0, q.shape[:2])

    grads = torch.autograd.grad(run(q, k, v), (q, k, v), dout)
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    expected = torch.autograd.grad(attention_oracle(*exact, causal=True)[0], exact, dout.double())
    for item in (0, 1):
        one = [t.detach()[item : item + 1].requires_grad_() for t in (q, k, v)]
        alone = torch.autograd.grad(run(*one), one, dout[item : item + 1])
        for name, full, right, single in zip("qkv", grads, expected, alone, strict=True):
            for grad in (full[item], single[0]):
                cosine = torch.nn.functional.cosine_similarity(grad.double().flatten(), right[item].flatten(), dim=0)
                assert float(cosine) > 0.999, name


SUBSETS = [subset for count in range(1, 5) for subset in itertools.combinations(("q", "k", "v", "bias"), count)]


@pytest.mark.parametrize("names", SUBSETS, ids="+".join)
def test_case_81_any_subset_of_gradients(backend: str, names: tuple[str, ...]) -> None:
    q, k, v = (torch.randn(1, 64, 1, 16) for _ in range(3))
    sample = sample_of(q, k, v, bias=torch.randn(1, 1, 64, 64), requires_grad=names)
    assert set(sample.differentiable()) == set(names)
    assert_exact(sample, backend, through_lse=False)


def test_case_81_the_bias_gradient_is_its_formula(backend: str) -> None:
    q, k, v = (torch.randn(1, 64, 1, 16) for _ in range(3))
    bias = torch.randn(1, 1, 64, 64, requires_grad=True)
    out = tilewise.attention(q, k, v, bias=bias, backend=backend)
    out.sum().backward()
    p = ((q[:, :, 0] @ k[:, :, 0].mT) / 4 + bias[0]).softmax(-1).detach()
    expected = p * (v[:, :, 0].sum(-1)[:, None] - out.detach()[:, :, 0].sum(-1)[..., None])
    torch.testing.assert_close(bias.grad[0], expected, atol=1e-6, rtol=1e-4)


def test_case_83_bias_from_a_table_and_a_scalar(backend: str) -> None:
    length = 96
    q, k, v = (torch.randn(2, length, 2, 64) for _ in range(3))
    index = torch.arange(length)[:, None] - torch.arange(length) + length
    tables = [torch.zeros(2 * length, dtype=d, requires_grad=True) for d in (torch.float32, torch.float64)]
    dout = torch.randn(2, length, 2, 64)
    out = tilewise.attention(q, k, v, bias=tables[0][index], backend=backend)
    exact = attention_oracle(q, k, v, bias=tables[1][index])[0]
    mine, right = (torch.autograd.grad(o, t, dout.to(o.dtype))[0] for o, t in ((out, tables[0]), (exact, tables[1])))
    torch.testing.assert_close(mine.double(), right, atol=1e-4, rtol=1e-4)
    scalar = torch.ones(1, 1, 1, 1, requires_grad=True)
    out = tilewise.attention(q, k, v, bias=scalar, backend=backend)
    assert abs(float(torch.autograd.grad(out, scalar, dout)[0])) < 1e-3, "softmax ignores a shift"


@pytest.mark.parametrize("length", [100, 257])
def test_case_85_bias_lengths_that_align_with_nothing(backend: str, length: int) -> None:
    q, k, v = (torch.randn(2, length, 4, 16, dtype=torch.float16) for _ in range(3))
    bias = torch.randn(2, 4, length, length, dtype=torch.float16)
    assert_exact(sample_of(q, k, v, bias=bias, requires_grad="all"), backend, lse_dtype=torch.float16)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("per_batch", [False, True])
def test_case_87_alibi_is_one_thing_in_every_call(backend: str, causal: bool, per_batch: bool) -> None:
    q, k, v = torch.randn(2, 5, 4, 8), torch.randn(2, 9, 4, 8), torch.randn(2, 9, 4, 8)
    slopes = torch.rand(2, 4) if per_batch else torch.rand(4)
    distance = (torch.arange(5)[:, None] + 4 - torch.arange(9)).abs()
    bias = -(slopes if per_batch else slopes.expand(2, 4))[:, :, None, None] * distance
    dense = tilewise.attention_with_lse(q, k, v, alibi_slopes=slopes, causal=causal, backend=backend)
    by_bias = tilewise.attention_with_lse(q, k, v, bias=bias, causal=causal, backend=backend)
    packed = tilewise.attention_varlen_with_lse(
        *(t.flatten(0, 1) for t in (q, k, v)), cu_seqlens_q=offsets([5, 5]), cu_seqlens_k=offsets([9, 9]),
        alibi_slopes=slopes, causal=causal, backend=backend,
    )  # fmt: skip
    torch.testing.assert_close(dense, by_bias)
    torch.testing.assert_close(dense[0], packed[0].unflatten(0, (2, 5)))
    torch.testing.assert_close(dense[1], packed[1].unflatten(1, (2, 5)).transpose(0, 1))


@pytest.mark.parametrize("per_batch", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_case_89_slopes_have_a_gradient(backend: str, per_batch: bool, packed: bool) -> None:
    q, k, v = torch.randn(2, 20, 4, 8), torch.randn(2, 20, 2, 8), torch.randn(2, 20, 2, 8)
    options = {"alibi_slopes": torch.rand(2, 4) if per_batch else torch.rand(4), "window_size": (7, 3), "softcap": 5.0}
    if packed:
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
        options["cu_seqlens_q"] = offsets([25, 15])
    sample = sample_of(q, k, v, requires_grad=("alibi_slopes",), **options)
    assert_exact(sample, backend)


def test_case_91_softcap_is_in_the_backward(backend: str) -> None:
    headdim = sized(64, 256)
    q, k, v = (torch.randn(1, 128, heads, headdim) for heads in (8, 4, 4))
    q, k = q * 12, k * 6
    sample = sample_of(*(t.to(BF16) for t in (q, k, v)), softcap=50.0, causal=True, window_size=(63, 0))
    assert_exact(sample, backend)
    off = tilewise.attention(q, k, v, softcap=0.0, backend=backend)
    assert torch.equal(off, tilewise.attention(q, k, v, backend=backend))


def test_case_93_sinks_have_a_gradient(backend: str) -> None:
    q, k, v = torch.randn(2, 64, 8, 16), torch.randn(2, 64, 2, 16), torch.randn(2, 64, 2, 16)
    assert_exact(
        sample_of(*(t.to(BF16) for t in (q, k, v)), sink=torch.randn(8), causal=True, requires_grad="all"), backend
    )
    nothing = torch.full((8,), -INF, requires_grad=True)
    out = tilewise.attention(q, k, v, sink=nothing, causal=True, backend=backend)
    torch.testing.assert_close(out, tilewise.attention(q, k, v, causal=True, backend=backend))
    assert not torch.autograd.grad(out.sum(), nothing)[0].any()


def test_case_93_the_sink_gradient_is_its_formula(backend: str) -> None:
    q, k, v = (torch.randn(2, 16, 4, 8) for _ in range(3))
    sink = torch.randn(4, requires_grad=True)
    out, lse = tilewise.attention_with_lse(q, k, v, sink=sink, backend=backend)
    dout = torch.randn_like(out)
    (grad,) = torch.autograd.grad(out, sink, dout)
    weight = torch.exp(sink.detach()[:, None] - lse.detach())
    expected = -(weight * (dout * out.detach()).sum(-1).transpose(1, 2)).sum((0, 2))
    torch.testing.assert_close(grad, expected)


@ALL
def test_case_97_no_dropout_leaves_the_generator_alone(backend: str) -> None:
    q, k, v = (torch.randn(1, 20, 2, 8) for _ in range(3))
    before = torch.get_rng_state()
    first = tilewise.attention(q, k, v, dropout_p=0.0, backend=backend)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(first, tilewise.attention(q, k, v, dropout_p=0.0, dropout_seed=5, backend=backend))


def test_case_97_neighbour_a_seed_is_drawn_only_for_dropout(backend: str) -> None:
    q, k, v = (torch.randn(1, 20, 2, 8) for _ in range(3))
    torch.manual_seed(7)
    first = tilewise.attention(q, k, v, dropout_p=0.5, backend=backend)
    second = tilewise.attention(q, k, v, dropout_p=0.5, backend=backend)
    torch.manual_seed(7)
    again = tilewise.attention(q, k, v, dropout_p=0.5, backend=backend)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    assert not tilewise.attention(q, k, v, dropout_p=1.0, backend=backend).any()


@ALL
def test_case_103_autocast_computes_in_its_dtype(backend: str) -> None:
    q, k = (torch.randn(1, 20, 2, 16, requires_grad=True) for _ in range(2))
    v = torch.randn(1, 20, 2, 16, dtype=BF16, requires_grad=True)
    with torch.autocast(here(), dtype=BF16):
        out = tilewise.attention(q, k, v, backend=backend)
    assert out.dtype == BF16
    grads = torch.autograd.grad(out.float().sum(), (q, k, v))
    assert [grad.dtype for grad in grads] == [torch.float32, torch.float32, BF16]
    with pytest.raises(tilewise.InvalidType, match="q float32, k float32, v bfloat16"):
        tilewise.attention(q, k, v, backend=backend)


def test_case_131_tokens_past_the_last_offset(backend: str) -> None:
    packed = torch.randn(946, 3 * 4 * 16, requires_grad=True)
    q, k, v = packed.view(946, 3, 4, 16).unbind(1)
    cu = torch.tensor([0, 144, 432, 944], dtype=torch.int32)
    out = tilewise.attention_varlen(q, k, v, cu_seqlens_q=cu, max_seqlen=512, backend=backend)
    assert not out[944:].any()
    (grad,) = torch.autograd.grad(out, packed, torch.randn_like(out))
    assert bool(grad.isfinite().all())
    assert not grad[944:].any()


@ALL
def test_case_133_rows_of_no_sequence_are_zero(backend: str) -> None:
    q, k, v = (torch.randn(128, 2, 16) for _ in range(3))
    q[90:], k[90:], v[90:] = (float("nan"),) * 3
    out, lse = tilewise.attention_varlen_with_lse(q, k, v, cu_seqlens_q=torch.tensor([0, 50, 90]), backend=backend)
    assert not out[90:].any()
    assert bool((lse[:, 90:] == -INF).all())
    assert bool(out[:90].isfinite().all())


@ALL
def test_case_147_mask_and_causal_intersect(backend: str) -> None:
    q, k, v = (torch.randn(1, 4, 2, 8) for _ in range(3))
    mask = torch.ones(4, 4, dtype=torch.bool)
    both = tilewise.attention(q, k, v, mask=mask, causal=True, backend=backend)
    torch.testing.assert_close(both, tilewise.attention(q, k, v, causal=True, backend=backend))
    mask[:, 1] = False
    assert_exact(sample_of(q, k, v, mask=mask, causal=True), backend)


@pytest.mark.parametrize("names", [("q",), ("k",), ("v",), ("q", "v"), ("q", "k", "v")], ids="+".join)
@pytest.mark.parametrize("causal", [False, True])
def test_case_151_gradients_land_in_the_packed_tensor(backend: str, names: tuple[str, ...], causal: bool) -> None:
    packed = torch.randn(2, 24, 3, 2, 16, requires_grad=True)
    views = dict(zip("qkv", packed.unbind(2), strict=True))
    used = {name: view if name in names else view.detach() for name, view in views.items()}
    out = tilewise.attention(**used, causal=causal, backend=backend)
    dout = torch.randn_like(out)
    (grad,) = torch.autograd.grad(out, packed, dout)
    flat = {name: view.detach().flatten(0, 1).requires_grad_(name in names) for name, view in views.items()}
    varlen = tilewise.attention_varlen(**flat, cu_seqlens_q=offsets([24, 24]), causal=causal, backend=backend)
    torch.testing.assert_close(varlen.unflatten(0, (2, 24)), out)
    parts = torch.autograd.grad(varlen, [flat[name] for name in names], dout.flatten(0, 1))
    for index, name in enumerate("qkv"):
        if name in names:
            torch.testing.assert_close(grad[:, :, index], parts[names.index(name)].unflatten(0, (2, 24)))
        else:
            assert not grad[:, :, index].any()
