"""e4m3 with descales: what is stored, and the errors that scales and rotation leave, against plain e4m3."""

from __future__ import annotations

import pytest
import torch

import tilewise
from tilewise import InvalidInput, InvalidType, attention, quantize_fp8
from tilewise.descale import FP8, real
from tilewise.quantize import LARGEST, rotation
from tilewise.testing.oracle import attention_oracle


def normal(*shape: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(*shape, generator=generator) for _ in range(3))
    return q, k, v


def error_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object) -> float:
    """rms error of attention over rms of the exact, from what the quantised tensors stand for."""
    exact, _ = attention_oracle(q.double(), k.double(), v.double(), dtype=torch.float64)
    x = quantize_fp8(q, k, v, **options)  # type: ignore[arg-type]
    out = attention(x.q, x.k, x.v, **x.keywords(), backend="cpu").double()
    return float((out - exact).square().mean().sqrt() / exact.square().mean().sqrt())


@pytest.mark.parametrize("scales", ["tensor", "head", "block"])
def test_stored_times_descale_is_the_tensor(scales: str) -> None:
    q, k, v = normal(2, 300, 4, 64)
    k, v = k[:, :, :2], v[:, :, :2] * torch.tensor([1e-3, 1e3])[:, None]
    x = quantize_fp8(q, k, v, scales=scales)
    shape = {"tensor": (), "head": (2, 2), "block": (2, 2, 3)}[scales]
    for stored, descale, given in ((x.q, x.q_descale, q), (x.k, x.k_descale, k), (x.v, x.v_descale, v)):
        assert stored.dtype == FP8
        assert descale.shape == shape
        assert stored.float().abs().max() == LARGEST
        if scales != "tensor":
            torch.testing.assert_close(real(stored, descale), given, rtol=1 / 16, atol=1e-3 * float(given.abs().max()))


def test_packed_tensors_have_one_descale_a_head() -> None:
    q, k, v = normal(30, 4, 32)
    x = quantize_fp8(q, k[:, :2], v[:, :2])
    assert x.q_descale.shape == x.k_descale.shape == (2,)
    torch.testing.assert_close(real(x.q, x.q_descale), q, rtol=1 / 16, atol=1e-2)


def test_zeros_have_descale_one() -> None:
    zeros = torch.zeros(1, 3, 2, 8)
    x = quantize_fp8(zeros, zeros, zeros)
    assert (x.k_descale == 1).all()
    assert (x.k.float() == 0).all()


@pytest.mark.parametrize("headdim", [1, 64, 96, 80])
def test_rotation_is_orthogonal_and_repeatable(headdim: int) -> None:
    matrix = rotation(headdim, 3)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(headdim), atol=1e-6, rtol=0)
    assert torch.equal(matrix, rotation(headdim, 3))


def test_rotation_pays_for_scattered_outliers() -> None:
    """0.1 % of the numbers with ten times the spread, as in Shah et al. 2024: 0.077 becomes 0.052."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (
        t + 10 * torch.randn(t.shape, generator=generator) * (torch.rand(t.shape, generator=generator) < 0.001)
        for t in normal(1, 512, 4, 128)
    )
    plain, rotated = error_of(q, k, v), error_of(q, k, v, rotation_seed=0)
    assert rotated < 0.8 * plain


def test_rotation_costs_where_one_channel_holds_the_outliers() -> None:
    """A large channel of k alone meets small numbers of q: its roundings are few until they are spread: 0.12, 0.23."""
    q, k, v = normal(1, 512, 4, 128)
    q[..., 3] *= 30
    k[..., 7] *= 30
    assert error_of(q, k, v) < 0.8 * error_of(q, k, v, rotation_seed=0)


def test_blocks_pay_where_numbers_grow_along_the_sequence() -> None:
    """What is 2**15 times smaller than the largest of its scale is lost: 0.43 and 0.04 a row, on the average."""
    q, k, v = normal(1, 512, 4, 128)
    v *= torch.logspace(-8, 0, 512)[:, None, None]
    exact, _ = attention_oracle(q.double(), k.double(), v.double(), dtype=torch.float64, causal=True)
    errors = []
    for scales in ("head", "block"):
        x = quantize_fp8(q, k, v, scales=scales)
        out = attention(x.q, x.k, x.v, causal=True, **x.keywords(), backend="cpu").double()
        errors.append(float(((out - exact).norm(dim=-1) / exact.norm(dim=-1)).mean()))
    assert errors[1] < 0.2 * errors[0]


def test_rotation_changes_little_of_plain_numbers() -> None:
    q, k, v = normal(1, 512, 4, 128)
    assert error_of(q, k, v, rotation_seed=0) == pytest.approx(error_of(q, k, v), rel=0.1)


def test_what_is_refused() -> None:
    q, k, v = normal(1, 3, 2, 8)
    with pytest.raises(InvalidInput, match="scales: is 'row'"):
        quantize_fp8(q, k, v, scales="row")
    with pytest.raises(InvalidInput, match="scales: is 'block', must be 'tensor' or 'head' for packed tensors"):
        quantize_fp8(q[0], k[0], v[0], scales="block")
    with pytest.raises(InvalidType, match="k: is torch"):
        quantize_fp8(q, k.int(), v)


def test_padding_of_nan_and_inf_sets_no_scale():
    q, k, v = (1e-3 * torch.randn(1, 8, 2, 16) for _ in range(3))
    padded_k = torch.cat([k, torch.full_like(k[:, :2], torch.nan)], 1)
    padded_v = torch.cat([v, torch.full_like(v[:, :2], torch.inf)], 1)
    clean, padded = tilewise.quantize_fp8(q, k, v), tilewise.quantize_fp8(q, padded_k, padded_v)
    assert torch.equal(clean.k_descale, padded.k_descale)
    assert torch.equal(clean.v_descale, padded.v_descale)
    assert bool(padded.k[:, 8:].isnan().all())
    assert bool(padded.v[:, 8:].isnan().all())
    out = tilewise.attention(padded.q, padded.k, padded.v, mask=torch.arange(10) < 8, **padded.keywords())
    assert torch.equal(out, tilewise.attention(clean.q, clean.k, clean.v, **clean.keywords()))


def test_tiny_numbers_stay_numbers():
    x = torch.full((1, 4, 1, 8), 1e-44)
    assert bool(tilewise.quantize_fp8(x, x, x).k.float().isfinite().all())


@pytest.mark.parametrize("scales", ["tensor", "head", "block"])
@pytest.mark.parametrize("shape", [(0, 3, 2, 8), (2, 0, 2, 8), (2, 3, 0, 8), (0, 2, 8)])
def test_empty_sizes(shape, scales):
    x = torch.randn(shape)
    if scales == "block" and len(shape) == 3:
        return
    stored = tilewise.quantize_fp8(x, x, x, scales=scales)
    assert stored.q.shape == shape
    if len(shape) == 4:
        assert tilewise.attention(stored.q, stored.k, stored.v, **stored.keywords()).shape == shape


@pytest.mark.parametrize("seed", [True, 1.5, "a", 2**70])
def test_a_wrong_rotation_seed_is_named(seed):
    x = torch.randn(1, 4, 1, 8)
    with pytest.raises((tilewise.InvalidInput, tilewise.InvalidType), match="rotation_seed"):
        tilewise.quantize_fp8(x, x, x, rotation_seed=seed)


@pytest.mark.parametrize(
    ("q", "k", "v"),
    [((1, 4, 3, 8), (1, 4, 2, 8), (1, 4, 2, 8)), ((1, 4, 8, 8), (1, 4, 4, 8), (1, 4, 8, 8)),
     ((1, 4, 2, 8), (4, 2, 8), (4, 2, 8)), ((1, 4, 2, 8), (1, 4, 2, 4), (1, 4, 2, 8))],
)  # fmt: skip
def test_shapes_that_do_not_belong_together_are_refused(q, k, v):
    with pytest.raises(tilewise.InvalidInput, match="q, k, v: shapes"):
        tilewise.quantize_fp8(torch.randn(q), torch.randn(k), torch.randn(v))


def test_the_rotation_does_not_depend_on_torchs_defaults():
    x = torch.randn(1, 4, 1, 8)
    expected = tilewise.quantize_fp8(x, x, x, rotation_seed=3).q.float()
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(tilewise.quantize_fp8(x, x, x, rotation_seed=3).q.float(), expected)
    finally:
        torch.set_default_dtype(torch.float32)


def test_what_is_stored_asks_for_no_gradient():
    x = torch.randn(1, 4, 1, 8, requires_grad=True)
    stored = tilewise.quantize_fp8(x, x, x)
    assert not stored.q_descale.requires_grad
    tilewise.attention(stored.q, stored.k, stored.v, **stored.keywords())
