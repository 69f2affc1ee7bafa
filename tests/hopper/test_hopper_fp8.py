"""The fp8 kernel on the device: every length, features, long sums, repeats; against fp64 of the values it was given."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tilewise import attention_varlen, attention_with_lse, quantize_fp8
from tilewise.descale import FP8, blocks_of, real
from tilewise.testing.oracle import attention_oracle

HERE = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.hopper, pytest.mark.skipif(not HERE, reason="needs an sm_90 device")]
BR = {"causal": True}
# batch, nheads, nheads_k, seqlen_q, seqlen_k, headdim, headdim_v; options; whether there are descales, or "block": one
# for each block. Every set of features is compiled on its own, so few kernels serve many cases.
CASES: dict[str, tuple[tuple[int, ...], dict[str, Any], bool | str]] = {
    "full": ((2, 4, 4, 256, 256, 128, 128), {}, False),
    "one query": ((2, 8, 2, 1, 900, 128, 128), {}, True),
    "gqa ragged": ((1, 8, 2, 391, 517, 128, 128), BR, True),
    "empty rows": ((1, 4, 4, 500, 200, 128, 128), BR, True),
    "more tiles than CTAs": ((3, 8, 4, 1500, 1500, 128, 128), BR, True),
    "one key": ((2, 4, 4, 200, 1, 64, 64), {}, False),
    "mqa top left": ((1, 4, 1, 1000, 700, 64, 64), {"causal": "top_left"}, True),
    "window, negative scale": ((1, 4, 2, 777, 1500, 128, 128), {"window_size": (100, 20), "softmax_scale": -0.1}, True),
    "causal window": ((1, 4, 2, 300, 700, 256, 256), BR | {"window_size": (150, 0)}, True),
    "four warpgroups": ((1, 2, 1, 8200, 1000, 64, 64), {}, True),
    "four warpgroups, causal": ((1, 2, 1, 8200, 8300, 64, 64), BR, False),
    "96, softcap": ((1, 4, 4, 500, 500, 96, 96), BR | {"softcap": 5.0}, True),
    "192 and 128": ((1, 4, 4, 700, 700, 192, 128), BR, True),
    "256": ((1, 4, 4, 300, 513, 256, 256), {}, False),
    "256, v transposed ahead": ((2, 8, 2, 1000, 517, 256, 256), {}, True),
    "256, v transposed ahead, ragged": ((1, 8, 1, 900, 777, 208, 240), BR, True),
    "by block": ((2, 4, 2, 391, 517, 128, 128), BR, "block"),
    "by block, full": ((2, 4, 2, 391, 517, 64, 64), {}, "block"),
    "by block, 256, softcap": ((1, 4, 4, 300, 513, 256, 256), {"softcap": 5.0}, "block"),
    "by block, window from the middle of a block on": (
        (1, 4, 2, 200, 777, 128, 128), {"window_size": (100, 20), "softmax_scale": -0.1}, "block"
    ),
    "by block, four warpgroups": ((1, 2, 1, 8200, 1000, 64, 64), {}, "block"),
}


def stored(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(FP8)


def tensors(sizes: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    batch, nheads, nheads_k, seqlen_q, seqlen_k, headdim, headdim_v = sizes
    k, v = stored(batch, seqlen_k, nheads_k, headdim), stored(batch, seqlen_k, nheads_k, headdim_v)
    return stored(batch, seqlen_q, nheads, headdim), k, v


def expected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, descales: dict[str, torch.Tensor], **options: Any):
    """fp64 of the real values, on the CPU."""
    values = [
        real(t, descales.get(f"{name}_descale"), torch.float64).cpu() for name, t in (("q", q), ("k", k), ("v", v))
    ]
    return attention_oracle(*values, dtype=torch.float64, **options)


def relative(actual: torch.Tensor, exact: torch.Tensor) -> float:
    error = (actual.cpu().double() - exact).square().mean().sqrt()
    return float(error / exact.square().mean().sqrt().clamp_min(1e-30))


def descales_of(batch: int, nheads_k: int) -> dict[str, torch.Tensor]:
    return {
        "q_descale": torch.rand(batch, nheads_k, device="cuda") + 0.5,
        "k_descale": torch.tensor(-0.7, device="cuda"),
        "v_descale": torch.rand(batch, nheads_k, device="cuda") * 20,
    }


def descales_by_block(sizes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Of both signs and some zeros for scores; for values far apart, so that some blocks count a lot more."""
    batch, _, nheads_k, seqlen_q, seqlen_k, _, _ = sizes
    of_q, of_k, of_v = (
        torch.rand(batch, nheads_k, blocks_of(n), device="cuda") for n in (seqlen_q, seqlen_k, seqlen_k)
    )
    of_k = torch.where(of_k < 0.1, 0.0, of_k - 0.5)
    return {"q_descale": of_q + 0.5, "k_descale": of_k, "v_descale": 10.0 ** (4 * of_v - 2)}


@pytest.mark.parametrize("name", CASES)
def test_against_fp64_of_the_real_values(name: str) -> None:
    """P in e4m3 is off by 2.6 % rms a weight, and what it is off averages out with the values."""
    sizes, options, scaled = CASES[name]
    q, k, v = tensors(sizes)
    descales = descales_by_block(sizes) if scaled == "block" else descales_of(sizes[0], sizes[2]) if scaled else {}
    out, lse = attention_with_lse(q, k, v, backend="hopper", **descales, **options)
    assert out.dtype == torch.bfloat16
    exact, exact_lse = expected(q, k, v, descales, **options)
    assert torch.equal(lse.cpu().isinf(), exact_lse.isinf())
    assert relative(out, exact) < 0.05
    seen = ~exact_lse.isinf()
    torch.testing.assert_close(lse.cpu()[seen].double(), exact_lse[seen], atol=6e-3, rtol=1e-3)
    assert (out.cpu().transpose(1, 2)[~seen] == 0).all()
    again = attention_with_lse(q, k, v, backend="hopper", **descales, **options)[0]
    assert torch.equal(out, again)


def test_every_length_of_a_cache() -> None:
    """No step where a block of keys begins (case 129)."""
    errors = {}
    for length in range(1, 261):
        q, k, v = tensors((1, 6, 1, 1, length, 128, 128))
        out, _ = attention_with_lse(q, k, v, backend="hopper")
        exact, _ = expected(q, k, v, {})
        cosine = torch.nn.functional.cosine_similarity(out.cpu().double().flatten(), exact.flatten(), dim=0)
        assert cosine >= 0.998, length
        errors[length] = relative(out, exact)
    around, before = max(errors[n] for n in (127, 128, 129, 130)), max(errors[n] for n in range(100, 127))
    assert around < 1.5 * before


@pytest.mark.parametrize("headdim", [64, 128, 256])
def test_long_sums_keep_their_tail(headdim: int) -> None:
    """With values of one, out is one: the products' short accumulators may not lose a share that grows."""
    for length in (1024, 16384, 131072):
        q, k, _ = tensors((1, 2, 2, 128, length, headdim, headdim))
        ones = torch.ones_like(k.float()).to(FP8)
        out, _ = attention_with_lse(q, k, ones, backend="hopper")
        assert (out.float() - 1).abs().mean() < 3e-3, length


@pytest.mark.parametrize("headdim", [64, 128, 256])
def test_maxima_that_creep_and_jump(headdim: int) -> None:
    """Blocks are walked last to first: scores that grow by less than the maximum may lag, by more, and by far more."""
    q, k, v = tensors((1, 2, 2, 128, 1920, headdim, headdim))
    k = torch.zeros_like(k.float())
    steps = torch.tensor([0.0, 0.125, 0.25, 0.375, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 6.0, 12.0, 12.0, 13.0])
    k[..., 0] = steps.flip(0).repeat_interleave(128)[None, :, None].to(k.device)
    q = (q.float() * 0.5).to(FP8)
    k = (k + 0.25 * torch.randn_like(k)).to(FP8)
    out, lse = attention_with_lse(q, k, v, softmax_scale=1.0, backend="hopper")
    exact, exact_lse = expected(q, k, v, {}, softmax_scale=1.0)
    assert relative(out, exact) < 0.05
    torch.testing.assert_close(lse.cpu().double(), exact_lse, atol=6e-3, rtol=1e-3)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("headdim", [64, 128, 256])
def test_maxima_below_zero(headdim: int, causal: bool) -> None:
    """Rows that see no positive score, or none before the last blocks of the walk, beside rows that do."""
    q, k, v = tensors((1, 2, 2, 300, 2500, headdim, headdim))
    rows = torch.arange(300, device="cuda")[None, :, None, None]
    signs = {"all": -1.0, "a third": torch.where(rows % 3 == 0, -1.0, 1.0), "one": torch.where(rows == 77, -1.0, 1.0)}
    positive = k.float().abs() * 0.25
    late = torch.where(torch.arange(2500, device="cuda")[None, :, None, None] < 600, -positive, positive)
    for keys in (positive.to(FP8), late.to(FP8)):
        for name, sign in signs.items():
            signed = (q.float().abs() * sign).to(FP8)
            out, lse = attention_with_lse(signed, keys, v, causal=causal, backend="hopper")
            exact, exact_lse = expected(signed, keys, v, {}, causal=causal)
            assert relative(out, exact) < 0.05, name
            torch.testing.assert_close(lse.cpu().double(), exact_lse, atol=6e-3, rtol=1e-3)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_slopes(dims: tuple[int, int]) -> None:
    """ALiBi takes registers, so its tiles have fewer warpgroups."""
    q, k, v = tensors((1, 4, 2, 391, 517, *dims))
    descales = descales_of(1, 2)
    slopes = 2.0 ** -torch.arange(1.0, 5.0)
    out, lse = attention_with_lse(q, k, v, backend="hopper", alibi_slopes=slopes.cuda(), **BR, **descales)
    exact, exact_lse = expected(q, k, v, descales, alibi_slopes=slopes, **BR)
    assert relative(out, exact) < 0.05
    torch.testing.assert_close(lse.cpu().double(), exact_lse, atol=6e-3, rtol=1e-3)


def test_packed_equals_dense() -> None:
    lengths_q, lengths_k = [40, 5, 128, 300], [700, 5, 0, 100]
    offsets = [torch.tensor([0, *lengths], device="cuda").cumsum(0).int() for lengths in (lengths_q, lengths_k)]
    q, k, v = stored(sum(lengths_q), 4, 128), stored(sum(lengths_k), 2, 128), stored(sum(lengths_k), 2, 128)
    descales = descales_of(4, 2)
    keywords = {"causal": True, "backend": "hopper"}
    out = attention_varlen(q, k, v, cu_seqlens_q=offsets[0], cu_seqlens_k=offsets[1], **descales, **keywords)
    for index in range(4):
        rows, keys = (slice(int(o[index]), int(o[index + 1])) for o in offsets)
        own = {name: t[index : index + 1] if t.ndim else t for name, t in descales.items()}
        dense, _ = attention_with_lse(q[None, rows], k[None, keys], v[None, keys], **own, **keywords)
        assert torch.equal(out[rows], dense[0])


def test_nan_in_keys_that_no_query_sees() -> None:
    q, k, v = tensors((1, 2, 2, 100, 300, 128, 128))
    for tensor in (k, v):
        tensor[:, 100:].view(torch.uint8).fill_(0x7F)
    out, lse = attention_with_lse(q, k, v, causal="top_left", backend="hopper", **descales_of(1, 2))
    assert not out.isnan().any()
    assert not lse.isnan().any()


def test_nan_before_the_first_seen_key_of_a_block() -> None:
    """Blocks of keys begin where those of descales do, which no query sees up to key 477."""
    sizes = (1, 2, 2, 200, 777, 128, 128)
    q, k, v = tensors(sizes)
    for tensor in (k, v):
        tensor[:, :477].view(torch.uint8).fill_(0x7F)
    out, lse = attention_with_lse(q, k, v, window_size=(100, 0), backend="hopper", **descales_by_block(sizes))
    assert not out.isnan().any()
    assert not lse.isnan().any()


def test_blocks_alike_are_a_head() -> None:
    """The same number for every block of a head, or one for the head: what differs is where it is multiplied."""
    q, k, v = tensors((1, 4, 2, 300, 500, 128, 128))
    head = {name: torch.rand(1, 2, device="cuda") + 0.5 for name in ("q_descale", "k_descale", "v_descale")}
    block = {name: head[name][..., None].expand(1, 2, 3 if name[0] == "q" else 4) for name in head}
    out, lse = attention_with_lse(q, k, v, causal=True, backend="hopper", **head)
    same, same_lse = attention_with_lse(q, k, v, causal=True, backend="hopper", **block)
    assert relative(same, out.cpu().double()) < 5e-3
    torch.testing.assert_close(same_lse, lse, atol=1e-4, rtol=1e-5)


def test_quantized_with_a_rotation() -> None:
    """Scattered outliers in q and k: a rotation takes part of the error that plain e4m3 has."""
    q, k, v = (torch.randn(1, 1024, 4, 128, device="cuda") for _ in range(3))
    for tensor in (q, k):
        tensor += 10 * torch.randn_like(tensor) * (torch.rand_like(tensor) < 0.001)
    exact, _ = attention_oracle(*(t.cpu().double() for t in (q, k, v)), dtype=torch.float64)
    errors = []
    for seed in (None, 0):
        x = quantize_fp8(q, k, v, rotation_seed=seed)
        out, _ = attention_with_lse(x.q, x.k, x.v, **x.keywords(), backend="hopper")
        errors.append(relative(out, exact))
    assert errors[1] < 0.9 * errors[0]


def test_repeats_are_bitwise_equal_under_load() -> None:
    q, k, v = tensors((2, 8, 4, 1111, 1313, 128, 128))
    descales = descales_of(2, 4)
    first = attention_with_lse(q, k, v, causal=True, backend="hopper", **descales)
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(300):
        again = attention_with_lse(q, k, v, causal=True, backend="hopper", **descales)
        for one, other in zip(again, first, strict=True):
            different += (one != other).any()
    assert int(different) == 0
