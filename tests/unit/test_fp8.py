"""fp8 inputs on the backends that compute them anywhere: exact for the values that the stored numbers stand for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tilewise import (
    InvalidInput,
    InvalidType,
    UnsupportedProblem,
    attention,
    attention_varlen_with_lse,
    attention_with_lse,
    explain,
    quantize_fp8,
)
from tilewise.descale import FP8, real
from tilewise.testing.oracle import attention_oracle

BACKENDS = ("reference", "cpu")
DESCALE_NAMES = ("q_descale", "k_descale", "v_descale")
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (9, 3)},
    "softcap and sink": {"softcap": 5.0, "sink": torch.tensor([0.1, -1.0, 0.5, 2.0])},
    "mask": {"mask": torch.rand(2, 1, 40, 50, generator=torch.Generator().manual_seed(3)) < 0.5},
}
DESCALES: dict[str, dict[str, Any]] = {
    "none": {},
    "numbers": {"q_descale": 0.5, "k_descale": torch.tensor(-2.0), "v_descale": torch.tensor([3.0])},
    "heads": {"k_descale": torch.tensor([0.3, 2.0]), "v_descale": torch.tensor([[1.0, 20.0], [0.1, 0.0]])},
    "items": {"q_descale": torch.tensor([[1.0, 0.2], [3.0, 0.5]])},
    "blocks": {name: torch.rand(2, 2, 1, generator=torch.Generator().manual_seed(5)) + 0.5 for name in DESCALE_NAMES},
}


def stored(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(FP8)


def tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return stored(2, 40, 4, 32), stored(2, 50, 2, 32, seed=1), stored(2, 50, 2, 48, seed=2)


def exact(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, descales: dict[str, Any], **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """fp64 of the real values."""
    given = {name: torch.as_tensor(value) for name, value in descales.items()}
    values = [real(t, given.get(f"{name}_descale"), torch.float64) for name, t in (("q", q), ("k", k), ("v", v))]
    state: tuple[torch.Tensor, torch.Tensor] = attention_oracle(*values, dtype=torch.float64, **options)
    return state


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("descales", DESCALES)
def test_exact_for_the_real_values(name: str, options: str, descales: str) -> None:
    """Computed in fp32, then one rounding to bf16."""
    q, k, v = tensors()
    out, lse = attention_with_lse(q, k, v, backend=name, **DESCALES[descales], **OPTIONS[options])
    expected, expected_lse = exact(q, k, v, DESCALES[descales], **OPTIONS[options])
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=2**-8)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("which", DESCALE_NAMES)
def test_a_descale_for_every_block_of_rows(name: str, which: str) -> None:
    """The last block is short."""
    q, k, v = stored(2, 300, 4, 32), stored(2, 260, 2, 32, seed=1), stored(2, 260, 2, 32, seed=2)
    descale = {which: torch.rand(2, 2, 3, generator=torch.Generator().manual_seed(0)) * 2 - 0.5}
    out, lse = attention_with_lse(q, k, v, causal=True, backend=name, **descale)
    expected, expected_lse = exact(q, k, v, descale, causal=True)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=2**-8)
    assert f"by block {which[0]}" in str(explain(q, k, v, **descale))
    assert torch.equal(attention(q, k, v, causal=True, backend=name, **descale), out)


def test_descales_of_blocks_must_fit() -> None:
    q, k, v = tensors()
    with pytest.raises(InvalidInput, match=r"q_descale: shape is \(2, 2, 2\), must be .* with 1 blocks"):
        attention(q, k, v, q_descale=torch.ones(2, 2, 2))
    offsets = torch.tensor([0, 80])
    packed = (t.flatten(0, 1)[:80] for t in tensors())
    with pytest.raises(InvalidInput, match=r"k_descale: shape is \(1, 2, 1\)"):
        attention_varlen_with_lse(*packed, cu_seqlens_q=offsets, cu_seqlens_k=offsets, k_descale=torch.ones(1, 2, 1))


@pytest.mark.parametrize("name", BACKENDS)
def test_packed_sequences_have_descales_of_their_own(name: str) -> None:
    lengths = [7, 0, 30]
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    q, k, v = stored(40, 4, 32), stored(40, 2, 32, seed=1), stored(40, 2, 48, seed=2)
    descale = torch.rand(3, 2, generator=torch.Generator().manual_seed(0)) + 0.5
    out, lse = attention_varlen_with_lse(q, k, v, cu_seqlens_q=offsets, k_descale=descale, causal=True, backend=name)
    assert (out[37:] == 0).all()
    assert (lse[:, 37:] == -torch.inf).all()
    for index, length in enumerate(lengths):
        rows = slice(int(offsets[index]), int(offsets[index]) + length)
        given = {"k_descale": descale[index : index + 1]}
        expected, _ = exact(q[None, rows], k[None, rows], v[None, rows], given, causal=True)
        torch.testing.assert_close(out[rows].double(), expected[0], atol=1e-5, rtol=2**-8)


def test_nan_in_keys_that_no_query_sees() -> None:
    q, k, v = tensors()
    for tensor in (k, v):
        tensor[:, 40:].view(torch.uint8).fill_(0x7F)
    for backend in BACKENDS:
        assert not attention(q, k, v, causal="top_left", backend=backend, v_descale=2.0).isnan().any()


def test_auto_takes_it_and_explain_says_what_it_is() -> None:
    q, k, v = tensors()
    assert attention(q, k, v, k_descale=0.1).dtype == torch.bfloat16
    explanation = explain(q, k, v, k_descale=0.1)
    assert explanation.backend == "cpu"
    assert explanation.problem.descales == ("k",)
    assert "fp8" in str(explanation)
    assert "descale k" in str(explanation)


def test_autocast_leaves_it_as_it_is_stored() -> None:
    q, k, v = tensors()
    plain = attention(q, k, v, k_descale=0.1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(attention(q, k, v, k_descale=0.1), plain)


def test_compiled_and_mapped() -> None:
    q, k, v = tensors()
    descale = torch.tensor([[1.0, 0.2], [3.0, 0.5]])

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, descale: torch.Tensor) -> torch.Tensor:
        return attention(q, k, v, k_descale=descale)

    plain = call(q, k, v, descale)
    assert torch.equal(torch.compile(call, backend="eager", fullgraph=True)(q, k, v, descale), plain)
    mapped = torch.func.vmap(call)(q[:, None], k[:, None], v[:, None], descale)
    torch.testing.assert_close(mapped[:, 0], plain)
    x = quantize_fp8(*(t.float() for t in (q, k, v)))
    assert call(x.q.to("meta"), x.k.to("meta"), x.v.to("meta"), x.k_descale.to("meta")).dtype == torch.bfloat16


def test_a_gradient_is_refused() -> None:
    q, k, v = tensors()
    with pytest.raises(UnsupportedProblem, match="gradient: has q, needs none for fp8"):
        attention(q.requires_grad_(), k, v)
    with pytest.raises(UnsupportedProblem, match="gradient: has q, needs none for fp8"):
        attention(q, k, v, v_descale=2.0)
    q = q.detach()
    with pytest.raises(InvalidInput, match="k_descale: requires grad"):
        attention(q, k, v, k_descale=torch.ones(2, requires_grad=True))
    with pytest.raises(UnsupportedProblem, match="gradient: has sink"):
        attention(q, k, v, sink=torch.ones(4, requires_grad=True))


def test_wrong_descales() -> None:
    q, k, v = tensors()
    with pytest.raises(InvalidInput, match="q_descale: is for float8_e4m3fn inputs, q is float32"):
        attention(q.float(), k.float(), v.float(), q_descale=1.0)
    with pytest.raises(InvalidInput, match=r"k_descale: shape is \(3,\), must be one number, \(nheads_k,\)"):
        attention(q, k, v, k_descale=torch.ones(3))
    with pytest.raises(InvalidInput, match=r"q_descale: shape is \(2, 4\)"):
        attention(q, k, v, q_descale=torch.ones(2, 4))
    with pytest.raises(InvalidType, match="v_descale: dtype is float64, must be float32"):
        attention(q, k, v, v_descale=torch.ones(2).double())
    with pytest.raises(InvalidType, match=r"v_descale: must be a torch\.Tensor, a number or None"):
        attention(q, k, v, v_descale="1")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="k_descale: is on meta, must be on q's device"):
        attention(q, k, v, k_descale=torch.ones(2, device="meta"))
    with pytest.raises(InvalidType, match="must have one dtype"):
        attention(q, k, v.float())


@pytest.mark.parametrize("name", ["sdpa", "triton", "hopper"])
def test_others_refuse_on_a_cpu(name: str) -> None:
    with pytest.raises(UnsupportedProblem):
        attention(*tensors(), backend=name)


def test_a_tangent_is_refused_and_not_lost():
    x = torch.randn(1, 8, 2, 16).to(FP8)
    with pytest.raises(NotImplementedError, match="forward mode"):
        torch.func.jvp(lambda sink: attention(x, x, x, k_descale=1.0, sink=sink), (torch.zeros(2),), (torch.ones(2),))
    with pytest.raises(NotImplementedError, match="forward mode"):
        torch.func.jvp(lambda scale: attention(x, x, x, k_descale=scale), (torch.ones(()),), (torch.ones(()),))


@pytest.mark.parametrize("descale", [10**400, 1e300, float("nan"), float("inf"), torch.ones(2).to_sparse()])
def test_a_descale_that_is_no_number_is_named(descale):
    x = torch.randn(1, 8, 2, 16).to(FP8)
    with pytest.raises((InvalidInput, InvalidType), match="k_descale"):
        attention(x, x, x, k_descale=descale)


@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_no_heads(name):
    x = torch.zeros(1, 4, 0, 16).to(FP8)
    assert attention(x, x, x, k_descale=1.0, backend=name).shape == (1, 4, 0, 16)
