"""CASES.md: strides, large sizes, odd head widths, windows at length."""

from __future__ import annotations

import pytest
import torch

import tilewise
from tilewise.testing import assert_exact, assert_within_budget, attention_oracle, sample_of

ALL = pytest.mark.rooms("reference", "cpu", "sdpa", "auto")
pytestmark = pytest.mark.rooms("reference", "cpu", "auto")
BF16 = torch.bfloat16


def free_memory_gib() -> float:
    """Memory this machine can give, from /proc/meminfo; 0 where that cannot be read."""
    try:
        with open("/proc/meminfo") as lines:
            available = next(line for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return 0.0
    return int(available.split()[1]) / 2**20


@pytest.mark.rooms("cpu", "auto")
def test_case_41_a_window_needs_no_memory_of_its_own(backend: str) -> None:
    length, window = 8192, 63
    q, k, v = (torch.randn(1, length, 2, 64) for _ in range(3))
    out = tilewise.attention(q, k, v, window_size=(window, 0), backend=backend)
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
    pytest.skip("8 x 28 x 4096 x 4096 pairs of bf16 take minutes on two cores; the triton suite runs it on a GPU")


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
    pytest.skip("200000 x 128 x 128 fp16 q, k, v and out need 26 GB before any gradient")


def test_case_153_float_biases_of_2_31_numbers(backend: str) -> None:
    pytest.skip("a bias of 2**31 bf16 numbers and its copy need more than 16 GB")


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
