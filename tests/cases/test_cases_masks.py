"""CASES.md: rows without keys, empty sizes, biases of the lowest number, masks by blocks."""

from __future__ import annotations

import itertools

import pytest
import torch

import tilewise
from tests.rooms import sized
from tilewise.testing import assert_exact, assert_within_budget, attention_oracle, offsets, sample_of

pytestmark = pytest.mark.rooms("reference", "cpu", "auto")
INF = float("inf")


def bnhd(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """SDPA's (batch, heads, seqlen, dim) numbers in our (batch, seqlen, heads, dim) view."""
    return torch.randn(*shape, dtype=dtype).transpose(1, 2)


@pytest.mark.rooms("reference", "cpu", "sdpa", "auto")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_case_1_rows_that_a_boolean_mask_empties_are_zero(backend: str, dtype: torch.dtype) -> None:
    q, k, v = (torch.rand(1, 8, 1, 8).to(dtype).requires_grad_() for _ in range(3))
    mask = torch.zeros(1, 1, 8, 8, dtype=torch.bool)
    mask[..., :4, :4] = True
    out, lse = tilewise.attention_with_lse(q, k, v, mask=mask, backend=backend)
    alone, alone_lse = tilewise.attention_with_lse(q[:, :4], k[:, :4], v[:, :4], backend="reference")
    torch.testing.assert_close(out[:, :4], alone)
    torch.testing.assert_close(lse[..., :4], alone_lse, atol=1e-3, rtol=0)
    assert not out[:, 4:].any()
    assert bool((lse[..., 4:] == -INF).all())
    grads = torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
    for grad in grads:
        assert bool(grad.isfinite().all())
        assert not grad[:, 4:].any()


@pytest.mark.rooms("reference", "cpu", "sdpa", "auto")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_case_3_a_row_of_the_lowest_number_is_that_softmax(backend: str, dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(1, 3, 1, 4, dtype=dtype) for _ in range(3))
    lowest = torch.finfo(torch.float32).min
    bias = torch.tensor([[lowest] * 3, [1.0] * 3, [1.0] * 3]).to(
        torch.float64 if dtype == torch.float64 else torch.float32
    )
    sample = sample_of(q, k, v, bias=bias)
    out = tilewise.attention(sample.q, sample.k, sample.v, bias=bias, backend=backend)
    torch.testing.assert_close(out[:, 0], v.mean(1), atol=0.02 if dtype == torch.bfloat16 else 1e-6, rtol=0)
    torch.testing.assert_close(out[:, 1:], attention_oracle(q, k, v)[0][:, 1:].to(dtype))
    assert bool(out[:, 0].any())
    assert_exact(sample, backend, lse_dtype=dtype if dtype == torch.bfloat16 else None)


@pytest.mark.rooms("cpu", "sdpa", "auto")
def test_case_5_a_first_key_tile_of_the_lowest_number(backend: str) -> None:
    batch = sized(2, 32)
    q, k, v = (bnhd(batch, 12, 441, 64) for _ in range(3))
    bias = torch.zeros(batch, 12, 441, 441)
    bias[..., :128] = torch.finfo(torch.float32).min
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    out = tilewise.attention(q, k, v, bias=bias, backend=backend)
    torch.testing.assert_close(
        out, tilewise.attention(q, k[:, 128:], v[:, 128:], backend="reference"), atol=2e-6, rtol=1e-5
    )
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
    assert bool(dq.isfinite().all())
    assert not dk[:, :128].any()
    assert not dv[:, :128].any()


def test_case_11_long_queries_over_a_single_causal_key(backend: str) -> None:
    cu_q, cu_k = torch.tensor([0, 76, 110, 256]), torch.tensor([0, 1, 2, 3])
    q, k, v = ((torch.randn(n, 1, 32) * 3).half().requires_grad_() for n in (256, 3, 3))
    out = tilewise.attention_varlen(
        q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen=(256, 3), causal=True, backend=backend
    )
    last = cu_q[1:] - 1
    assert torch.equal(out[last], v)
    others = torch.ones(256, dtype=torch.bool)
    others[last] = False
    assert not out[others].any()
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    torch.testing.assert_close(dv, torch.ones_like(dv))
    assert float(dq.abs().max()) < 0.02, "softmax over one key has no gradient, up to the rounding of out"
    assert not dq[others].any()
    assert bool(dk.isfinite().all())


@pytest.mark.rooms("reference", "cpu", "sdpa", "auto")
@pytest.mark.parametrize("causal", [False, True])
def test_case_13_no_keys_at_all(backend: str, causal: bool) -> None:
    q = torch.randn(2, 128, 8, 64, dtype=torch.bfloat16, requires_grad=True)
    k, v = (torch.randn(2, 0, 8, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    out, lse = tilewise.attention_with_lse(q, k, v, causal=causal, backend=backend)
    assert out.shape == (2, 128, 8, 64)
    assert not out.any()
    assert bool((lse == -INF).all())
    dq, dk, dv = torch.autograd.grad((out, lse), (q, k, v), (torch.ones_like(out), torch.ones_like(lse)))
    assert not dq.any()
    assert dk.shape == dv.shape == (2, 0, 8, 64)


@pytest.mark.rooms("reference", "cpu", "sdpa", "auto")
@pytest.mark.parametrize(
    ("q_shape", "k_shape"),
    [
        ((0, 5, 2, 8), (0, 4, 2, 8)),
        ((2, 0, 2, 8), (2, 4, 2, 8)),
        ((2, 3, 0, 8), (2, 4, 0, 8)),
        ((0, 0, 0, 8), (0, 0, 0, 8)),
        ((2, 3, 0, 8), (2, 4, 1, 8)),
    ],
)
def test_case_13_neighbours_every_empty_size(backend: str, q_shape: tuple, k_shape: tuple) -> None:
    q, k, v = (torch.randn(shape, requires_grad=True) for shape in (q_shape, k_shape, k_shape))
    out, lse = tilewise.attention_with_lse(q, k, v, causal=True, backend=backend)
    assert out.shape == q.shape
    assert lse.shape == (q_shape[0], q_shape[2], q_shape[1])
    for tensor, grad in zip((q, k, v), torch.autograd.grad(out.sum() + lse.sum(), (q, k, v)), strict=True):
        assert grad.shape == tensor.shape
        assert not grad.any()


@pytest.mark.rooms("reference", "cpu", "sdpa", "auto")
def test_case_15_a_sequence_without_keys_in_a_ragged_batch(backend: str) -> None:
    q = torch.randn(160, 4, 128, dtype=torch.bfloat16)
    k, v = (torch.randn(192, 4, 128, dtype=torch.bfloat16) for _ in range(2))
    options = {"cu_seqlens_q": offsets([64, 32, 64]), "cu_seqlens_k": offsets([64, 0, 128])}
    out, lse = tilewise.attention_varlen_with_lse(q, k, v, **options, backend=backend)
    assert not out[64:96].any()
    assert bool((lse[:, 64:96] == -INF).all())
    assert_exact(sample_of(q, k, v, **options), backend, lse_dtype=torch.bfloat16)


def test_case_17_empty_sequences_and_heads_of_256(backend: str) -> None:
    if backend == "reference":
        pytest.skip("materialises 4 x 1208 x 3072 scores in fp64 with every derivative: the other rooms are compared")
    cu_q, cu_k = torch.tensor([0, 0, 1208, 2048, 2048]), torch.tensor([0, 2538, 4280, 5120, 8192])
    q = torch.randn(2048, 4, 256, dtype=torch.bfloat16, requires_grad=True)
    k, v = (torch.randn(8192, 1, 256, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    out = tilewise.attention_varlen(
        q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen=(1208, 3072), backend=backend
    )
    dout = torch.randn_like(out)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    for grad in (dk, dv):
        assert not grad[:2538].any()
        assert not grad[5120:].any()
    for rows, keys in (((0, 1208), (2538, 4280)), ((1208, 2048), (4280, 5120))):
        one = [t.detach()[None, slice(*s)].requires_grad_() for t, s in ((q, rows), (k, keys), (v, keys))]
        alone = tilewise.attention(*one, backend=backend)
        torch.testing.assert_close(out[slice(*rows)], alone[0], atol=2e-3, rtol=1e-2)
        grads = torch.autograd.grad(alone, one, dout[None, slice(*rows)])
        for full, part, span in zip((dq, dk, dv), grads, (rows, keys, keys), strict=True):
            torch.testing.assert_close(full[slice(*span)], part[0], atol=5e-3, rtol=2e-2)


@pytest.mark.rooms("reference", "cpu", "sdpa", "auto")
def test_case_19_one_query_a_sequence_and_some_without_any(backend: str) -> None:
    q = torch.randn(2, 9, 64, dtype=torch.bfloat16)
    k, v = (torch.randn(8, 3, 64, dtype=torch.bfloat16) for _ in range(2))
    out = tilewise.attention_varlen(
        q, k, v, cu_seqlens_q=torch.tensor([0, 1, 1, 2]), cu_seqlens_k=torch.tensor([0, 3, 3, 8]), max_seqlen=(1, 5),
        causal=True, softmax_scale=1.0, backend=backend,
    )  # fmt: skip
    for row, keys in ((0, slice(0, 3)), (1, slice(3, 8))):
        alone = attention_oracle(q[None, row : row + 1], k[None, keys], v[None, keys], softmax_scale=1.0)[0]
        torch.testing.assert_close(out[row].double(), alone[0, 0], atol=0.02, rtol=0.02)


def test_case_21_no_channels_is_refused_by_name(backend: str) -> None:
    q, k, v = torch.randn(1, 16, 16, 0), torch.randn(1, 16, 16, 0), torch.randn(1, 16, 16, 1)
    with pytest.raises(tilewise.InvalidInput, match="headdim"):
        tilewise.attention(q, k, v, softmax_scale=1.0, backend=backend)


def test_case_79_a_block_diagonal_mask_is_separate_calls(backend: str) -> None:
    x = torch.randn(1, 600, 2, 80, dtype=torch.bfloat16)
    mask = torch.zeros(1, 1, 600, 600, dtype=torch.bool)
    edges = (0, 128, 256, 384)
    for start, stop in itertools.pairwise(edges):
        mask[..., start:stop, start:stop] = True
    mask[..., 543:, 543:] = True
    out = tilewise.attention(x, x, x, mask=mask, backend=backend)
    for start, stop in ((0, 128), (128, 256), (256, 384), (543, 600)):
        part = x[:, start:stop]
        assert_within_budget(
            out[:, start:stop],
            attention_oracle(part, part, part)[0],
            attention_oracle(part, part, part, dtype=x.dtype)[0],
        )
    assert not out[:, 384:543].any()


def test_case_111_blocks_of_queries_without_blocks_of_keys(backend: str) -> None:
    mask = torch.zeros(1, 1, 384, 384, dtype=torch.bool)
    mask[..., :128, :64] = True
    mask[..., 256:, 100:] = True
    sample = sample_of(*(torch.randn(2, 384, 2, 32) for _ in range(3)), mask=mask)
    out = tilewise.attention(sample.q, sample.k, sample.v, mask=mask, backend=backend)
    assert not out[:, 128:256].any()
    assert_exact(sample, backend)


def test_case_157_a_float_mask_is_added(backend: str) -> None:
    q, k, v = (torch.randn(3, 5, 2, 4) for _ in range(3))
    bias = torch.randn(5, 5)
    padding = torch.arange(5) < torch.tensor([5, 3, 1])[:, None]
    for mask in (None, padding[:, None, None]):
        assert_exact(sample_of(q, k, v, bias=bias, mask=mask), backend)
    with pytest.raises(tilewise.InvalidType, match="bias="):
        tilewise.attention(q, k, v, mask=bias, backend=backend)


@pytest.mark.rooms("reference", "cpu", "sdpa", "auto")
def test_case_159_a_sequence_that_is_all_padding(backend: str) -> None:
    q, k, v = (torch.randn(4, 5, 2, 8) for _ in range(3))
    keep = (torch.arange(5) < torch.tensor([5, 4, 1, 0])[:, None])[:, None, None]
    sample = sample_of(q, k, v, mask=keep)
    out = tilewise.attention(sample.q, sample.k, sample.v, mask=keep, backend=backend)
    assert not out[3].any()
    assert bool(out[:3].any(-1).all())
    assert_exact(sample, backend)
    with pytest.raises(tilewise.InvalidType, match="True = the pair takes part"):
        tilewise.attention(q, k, v, mask=keep.to(torch.uint8), backend=backend)
