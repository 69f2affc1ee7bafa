"""Long rows, big scores, tensors past 2 ** 31 elements: forward and backward, on every GPU room."""

from __future__ import annotations

import math

import pytest
import torch

import tilewise
from tilewise.bench import gate
from tilewise.bench.cases import Case
from tilewise.testing import Spec, assert_exact, judge, make

pytestmark = pytest.mark.rooms("triton", "hopper")
BF16 = torch.bfloat16
LONG = 131072


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=BF16, requires_grad=True)


@pytest.mark.parametrize("sizes", [(256, LONG), (LONG, 256)], ids=str)
@pytest.mark.parametrize("features", [(), ("causal",)], ids=lambda features: "+".join(features) or "plain")
def test_long_sides_keep_their_precision(backend: str, sizes: tuple[int, int], features: tuple[str, ...]) -> None:
    spec = Spec(batch=1, seqlen_q=sizes[0], seqlen_k=sizes[1], nheads=2, nheads_k=1, headdim=64, headdim_v=64,
                dtype=BF16, features=features, requires_grad=("q", "k", "v"))  # fmt: skip
    lse, *others = sorted(judge(make(spec), backend, poison_value=None), key=lambda verdict: verdict.name != "lse")
    assert all(verdict.ok for verdict in others), others
    # a maximum, a logarithm, their sum and its product with ln 2 are rounded, however many keys are summed up
    assert lse.error <= 4 * torch.finfo(torch.float32).eps * math.log(4 * LONG), lse


@pytest.mark.parametrize("dtype", [torch.float16, BF16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.rooms("triton")  # docs/semantics.md says what hopper makes of them
def test_rows_that_begin_with_scores_of_no_use(backend: str, causal: bool, dtype: torch.dtype) -> None:
    """A walk that meets -4e8 first, or -3e10, and then ordinary scores: their rounding must not become inf - inf."""
    size = 8000 if dtype is torch.float16 else 64000
    q = torch.empty(1, 384, 2, 64, device="cuda").uniform_(0.75 * size, size).to(dtype)
    k = (torch.randn(1, 384, 2, 64, device="cuda") / size).to(dtype)
    for begin in (0, 256):  # from which side it comes, and on either side of the diagonal
        k[:, begin : begin + 128] = -torch.empty(1, 128, 2, 64, device="cuda").uniform_(0.75 * size, size).to(dtype)
    v = torch.randn(1, 384, 2, 64, device="cuda").to(dtype)
    out, lse = tilewise.attention_with_lse(q, k, v, causal=causal, backend=backend)
    exact = tilewise.attention_with_lse(q.double(), k.double(), v.double(), causal=causal, backend="reference")
    torch.testing.assert_close(out.double(), exact[0], atol=0.02, rtol=0.02)
    torch.testing.assert_close(lse.double(), exact[1], atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("causal", [False, True])
def test_long_squares_keep_their_precision(backend: str, causal: bool) -> None:
    case = Case(1, LONG, 2, 128, nheads_k=1, causal=causal, dtype=BF16)
    tensors = case.tensors("cuda")
    gate.check(
        case, backend, lambda: tilewise.attention(*tensors, causal=causal, backend=backend), tensors,
        torch.randn_like(tensors[0]),
    )  # fmt: skip


@pytest.mark.parametrize("spread", [30.0, 300.0])
@pytest.mark.parametrize("headdim", [64, 128, 256])
def test_big_scores_and_their_gradients(backend: str, headdim: int, spread: float) -> None:
    spec = Spec(seqlen_q=300, seqlen_k=300, headdim=headdim, headdim_v=headdim, dtype=BF16, spread=spread,
                features=("causal",), requires_grad=("q", "k", "v"))  # fmt: skip
    assert_exact(make(spec), backend, lse_dtype=BF16)


def test_backward_past_2_31_elements(backend: str) -> None:
    if torch.cuda.mem_get_info()[0] < 60 * 2**30:
        pytest.skip("needs 60 GiB")
    q, k, v = (bf16(1, 140000, 128, 128) for _ in range(3))
    assert q.numel() > 2**31
    out = tilewise.attention(q, k, v, window_size=(100, 0), backend=backend)
    grads = torch.autograd.grad(out, (q, k, v), out.detach())
    tail = [t[:, -600:, -2:].detach().requires_grad_() for t in (q, k, v)]
    alone = tilewise.attention(*tail, window_size=(100, 0), backend=backend)
    expected = torch.autograd.grad(alone, tail, alone.detach())
    assert torch.allclose(out[:, -400:, -2:].float(), alone[:, -400:].float(), atol=2e-2)
    for whole, one in zip(grads, expected, strict=True):
        assert torch.allclose(whole[:, -400:, -2:].float(), one[:, -400:].float(), atol=3e-2)


def test_batch_times_heads_past_2_16(backend: str) -> None:
    q, k, v = (bf16(70000, 5, 1, 16) for _ in range(3))
    out = tilewise.attention(q, k, v, causal=True, backend=backend)
    part = slice(69000, 70000)
    small = [t[part].detach().requires_grad_() for t in (q, k, v)]
    alone = tilewise.attention(*small, causal=True, backend=backend)
    assert torch.equal(out[part], alone)
    grads = torch.autograd.grad(out, (q, k, v), out.detach())
    for whole, one in zip(grads, torch.autograd.grad(alone, small, alone.detach()), strict=True):
        torch.testing.assert_close(whole[part], one)


def test_memory_beside_the_results_is_a_few_numbers_a_row(backend: str) -> None:
    """lse, delta and what they are read from; hopper adds up dq in fp32."""
    q, k, v = (bf16(1, 16384, 8, 64) for _ in range(3))
    dout = torch.randn_like(q)
    rows = 16384 * 8

    def step() -> tuple[torch.Tensor, ...]:
        out = tilewise.attention(q, k, v, causal=True, backend=backend)
        return (out, *torch.autograd.grad(out, (q, k, v), dout))

    step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results = step()
    extra = torch.cuda.max_memory_allocated() - before - sum(t.numel() * t.element_size() for t in results)
    assert extra <= 4 * rows * 4 + (4 * q.numel() if backend == "hopper" else 0) + 2**20
