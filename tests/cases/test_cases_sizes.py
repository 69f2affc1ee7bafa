"""CASES.md: strides, large sizes, odd head widths, windows at length."""

from __future__ import annotations

import pytest
import torch

import tilewise
from tests.rooms import here, sized
from tilewise.testing import assert_exact, assert_within_budget, attention_oracle, offsets, sample_of

ALL = pytest.mark.rooms("reference", "cpu", "sdpa", "auto")
pytestmark = pytest.mark.rooms("reference", "cpu", "auto")
BF16 = torch.bfloat16


def free_memory_gib() -> float:
    """Memory of the device that tensors are made on; 0 where that cannot be read."""
    if here() == "cuda":
        torch.cuda.empty_cache()  # what earlier tests gave back to the allocator
        return torch.cuda.mem_get_info()[0] / 2**30
    try:
        with open("/proc/meminfo") as lines:
            available = next(line for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return 0.0
    return int(available.split()[1]) / 2**20


@pytest.mark.rooms("cpu", "auto")
def test_case_41_a_window_needs_no_memory_of_its_own(backend: str) -> None:
    length, window = sized(8192, 32768), 63
    q, k, v = (torch.randn(1, length, sized(2, 6), 64) for _ in range(3))
    if here() == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    out = tilewise.attention(q, k, v, window_size=(window, 0), backend=backend)
    if here() == "cuda":
        assert torch.cuda.max_memory_allocated() - before < length * length // 8
    rows = torch.tensor([0, 1, 63, 64, 4097, length - 1])
    for row in rows.tolist():
        first = max(0, row - window)
        one = attention_oracle(q[:, row : row + 1], k[:, first : row + 1], v[:, first : row + 1])[0]
        torch.testing.assert_close(out[:, row : row + 1].double(), one, atol=2e-6, rtol=1e-5)


@ALL
@pytest.mark.parametrize("keys", [33, 65, 289, 290])
def test_case_43_expanded_keys_and_values(backend: str, keys: int) -> None:
    q = torch.randn(1, 33, 8, 512, dtype=BF16)
    k, v = (torch.randn(1, keys, 1, 512, dtype=BF16).expand(1, keys, 8, 512) for _ in range(2))
    i, j = torch.arange(33)[:, None], torch.arange(keys)
    mask = ((j <= i + keys - 33) & (j >= 3)).expand(1, 1, 33, keys)
    assert_exact(sample_of(q, k, v, mask=mask), backend, lse_dtype=BF16, poison_value=None)


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_case_45_the_last_stride_may_be_anything(backend: str, dtype: torch.dtype, masked: bool) -> None:
    q, k, v = (torch.randn(2, 3, 16, 24, dtype=dtype).permute(0, 3, 1, 2) for _ in range(3))
    assert q.stride(-1) == 24
    mask = torch.rand(24, 24) < 0.7 if masked else None
    sample = sample_of(q, k, v, mask=mask)
    assert sample.q.stride(-1) == 24
    assert_exact(sample, backend)
    ours = tilewise.attention(q, k, v, mask=mask, backend="cpu")
    assert torch.equal(
        ours, tilewise.attention(q.contiguous(), k.contiguous(), v.contiguous(), mask=mask, backend="cpu")
    )


@ALL
def test_case_47_a_transposed_bias_after_a_contiguous_one(backend: str) -> None:
    q, k, v = (torch.randn(2, 24, 4, 16) for _ in range(3))
    bias = torch.randn(2, 1, 24, 24)
    straight = tilewise.attention(q, k, v, bias=bias, backend=backend)
    turned = bias.transpose(-1, -2).contiguous().transpose(-1, -2)
    assert turned.stride(-1) == 24
    torch.testing.assert_close(straight, tilewise.attention(q, k, v, bias=turned, backend=backend))
    assert_exact(sample_of(q, k, v, bias=turned), backend)


def test_case_51_bias_strides_beyond_32_bits(backend: str) -> None:
    if free_memory_gib() < 40:
        pytest.skip("needs 40 GiB of memory")
    q, k, v = (torch.randn(2, 12180, 16, 64, dtype=torch.float16) for _ in range(3))
    bias = torch.randn(32, 12180, 12184, dtype=torch.float16)[:, :, :12180].view(2, 16, 12180, -1)
    out = tilewise.attention(q, k, v, bias=bias, backend=backend)
    expected = attention_oracle(q[1:, -2:, -1:], k[1:, :, -1:], v[1:, :, -1:], bias=bias[1:, -1:, -2:])[0]
    torch.testing.assert_close(out[1:, -2:, -1:].double(), expected, atol=1e-3, rtol=1e-2)


@pytest.mark.rooms("cpu", "sdpa", "auto")
@pytest.mark.parametrize("shape", [(100_000, 10, 1, 4), (65_536, 4, 2, 4), (1, 3, 2**17, 2)], ids=str)
def test_case_53_55_batches_and_heads_beyond_65535(backend: str, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, requires_grad=True)
    out = tilewise.attention(x, x, x, backend=backend)
    (grad,) = torch.autograd.grad(out, x, torch.ones_like(out))
    cut = (slice(-7, None), slice(None), slice(-7, None))
    part = x.detach()[cut].requires_grad_()
    alone = tilewise.attention(part, part, part, backend=backend)
    torch.testing.assert_close(out[cut], alone)
    torch.testing.assert_close(
        grad[cut], torch.autograd.grad(alone, part, torch.ones_like(alone))[0], atol=1e-5, rtol=1e-4
    )


def test_case_57_masks_of_more_than_2_31_numbers(backend: str) -> None:
    if here() == "cpu":
        pytest.skip("8 x 28 x 4096 x 4096 pairs of bf16 take minutes on two cores: a case for a GPU")
    if free_memory_gib() < 16:
        pytest.skip("needs 16 GiB of memory")
    q, k, v = (torch.randn(8, 4096, 28, 128, dtype=BF16, requires_grad=True) for _ in range(3))
    mask = torch.ones(4096, 4096, dtype=torch.bool).tril().expand(8, 28, -1, -1).contiguous()
    assert mask.numel() > 2**31
    out = tilewise.attention(q, k, v, mask=mask, backend=backend)
    grads = torch.autograd.grad(out, (q, k, v), out.detach())
    for item, head in ((0, 0), (7, 27)):
        cut = (slice(item, item + 1), slice(None), slice(head, head + 1))
        one = [t.detach()[cut].contiguous().requires_grad_() for t in (q, k, v)]
        alone = tilewise.attention(*one, causal=True, backend="triton")
        torch.testing.assert_close(out[cut], alone, atol=1e-2, rtol=1e-2)
        expected = torch.autograd.grad(alone, one, out.detach()[cut].contiguous())
        for grad, right in zip(grads, expected, strict=True):
            torch.testing.assert_close(grad[cut], right, atol=2e-2, rtol=2e-2)


@pytest.mark.rooms("cpu", "sdpa", "auto")
def test_case_59_key_strides_beyond_2_31(backend: str) -> None:
    if free_memory_gib() < 16:
        pytest.skip("needs 16 GiB of memory")
    batch, length = 700, 24000
    base = torch.empty(length, batch, 128, dtype=BF16)
    k = base.transpose(0, 1)[:, :, None]
    base[:, -1] = torch.randn(length, 128)
    assert k.stride(1) * length > 2**31
    q = torch.randn(1, 16, 1, 128, dtype=BF16)
    sample = sample_of(q, k[-1:], k[-1:].clone())
    assert_exact(sample, backend, lse_dtype=BF16)


def test_case_63_offsets_beyond_32_bits(backend: str) -> None:
    if here() == "cpu" or free_memory_gib() < 64:
        pytest.skip("200000 x 128 x 128 fp16 q, k, v, out and their gradients: needs a GPU with 64 GiB")
    lengths = [1500] * 133 + [500]
    q, k, v = (torch.randn(sum(lengths), 128, 128, dtype=torch.float16, requires_grad=True) for _ in range(3))
    assert q.numel() > 2**31
    options = {"causal": True, "max_seqlen": 1500, "backend": backend}
    out = tilewise.attention_varlen(q, k, v, cu_seqlens_q=offsets(lengths), **options)
    grads = torch.autograd.grad(out, (q, k, v), out.detach())
    one = [t.detach()[None, -500:].requires_grad_() for t in (q, k, v)]
    alone = tilewise.attention(*one, causal=True, backend=backend)
    torch.testing.assert_close(out[-500:], alone[0], atol=2e-3, rtol=1e-2)
    for grad, right in zip(grads, torch.autograd.grad(alone, one, alone.detach()), strict=True):
        torch.testing.assert_close(grad[-500:], right[0], atol=5e-3, rtol=2e-2)


@pytest.mark.parametrize(("heads", "length"), [(32, 8192), (1, 65536)])
def test_case_153_float_biases_of_2_31_numbers(backend: str, heads: int, length: int) -> None:
    if here() == "cpu" or free_memory_gib() < 40:
        pytest.skip("a bias of 2**31 bf16 numbers and its gradient: needs a GPU with 40 GiB")
    q, k, v = (torch.randn(1, length, heads, 64, dtype=BF16, requires_grad=True) for _ in range(3))
    bias = torch.randn(1, heads, length, length, dtype=BF16, requires_grad=True)
    assert bias.numel() >= 2**31
    out = tilewise.attention(q, k, v, bias=bias, backend=backend)
    dq, _, dv, dbias = torch.autograd.grad(out, (q, k, v, bias), out.detach())
    # the last rows, where offsets are largest, of the last head
    rows, head = slice(length - 64, length), slice(heads - 1, heads)
    part = [q[:, rows, head], k[:, :, head], v[:, :, head], bias[:, head, rows]]
    part = [t.detach().double().requires_grad_() for t in part]
    exact, _ = attention_oracle(*part[:3], bias=part[3])
    rights = (exact, *torch.autograd.grad(exact, (part[0], part[3]), out.detach()[:, rows, head].double()))
    for actual, right in zip((out[:, rows, head], dq[:, rows, head], dbias[:, head, rows]), rights, strict=True):
        assert float((actual.double() - right).norm() / right.norm()) < 4 * torch.finfo(BF16).eps
    assert bool(dv.isfinite().all())


@ALL
@pytest.mark.parametrize(("headdim", "headdim_v"), [(32, 24), (4, 2), (8, 64), (1, 5)])
def test_case_71_out_has_the_width_of_v(backend: str, headdim: int, headdim_v: int) -> None:
    q, k, v = torch.randn(1, 16, 1, headdim), torch.randn(1, 16, 1, headdim), torch.randn(1, 16, 1, headdim_v)
    if backend == "sdpa":
        with pytest.raises(tilewise.UnsupportedProblem, match="headdim_v"):
            tilewise.attention(q, k, v, backend=backend)
        return
    out = tilewise.attention(q, k, v, backend=backend)
    assert out.shape == (1, 16, 1, headdim_v)
    assert torch.equal(out, tilewise.attention(q, k, v, backend=backend))
    assert_exact(sample_of(q, k, v), backend)


@ALL
@pytest.mark.parametrize("headdim", [1, 3, 16, 40, 64, 72, 80, 96, 128, 160, 192, 256, 300])
def test_case_73_every_channel_takes_part(backend: str, headdim: int) -> None:
    q, k, v = (torch.randn(1, 96, 2, headdim, dtype=torch.float16) for _ in range(3))
    for tensor in (q, k):
        tensor[..., -1] *= 30**0.5
    assert_exact(sample_of(q, k, v), backend, lse_dtype=torch.float16)


@ALL
@pytest.mark.parametrize("length", [192, 127, 129, 255, 257])
def test_case_75_tails_of_blocks_are_masked(backend: str, length: int) -> None:
    x = torch.randn(1, length, 8, 16, dtype=BF16)
    out = tilewise.attention(x, x, x, backend=backend)
    assert_within_budget(out, attention_oracle(x, x, x)[0], attention_oracle(x, x, x, dtype=BF16)[0])
    assert_exact(sample_of(x, x, x), backend, lse_dtype=BF16)
