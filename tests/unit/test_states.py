"""(out, lse) is an algebra: merging is commutative and associative, with an identity, and differentiable."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck

import tilewise
from tilewise import merge_states
from tilewise.testing import attention_oracle

INF = float("inf")
FP64 = torch.float64
LSE = st.sampled_from([-INF, -1e30, -700.0, -1.0, 0.0, 3.0, 700.0, 1e30])


def state(lse: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.randn(1, 1, 1, 4, dtype=FP64, generator=torch.Generator().manual_seed(seed))
    return (out if lse > -INF else torch.zeros_like(out)), torch.full((1, 1, 1), lse, dtype=FP64)


@given(LSE, LSE, LSE)
def test_merging_is_commutative_and_associative(a: float, b: float, c: float) -> None:
    one, two, three = state(a, 1), state(b, 2), state(c, 3)
    for left, right in (
        (merge_states(*one, *two), merge_states(*two, *one)),
        (merge_states(*merge_states(*one, *two), *three), merge_states(*one, *merge_states(*two, *three))),
    ):
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-12)
        assert not left[0].isnan().any()


@given(LSE)
def test_the_empty_state_is_the_identity(lse: float) -> None:
    one = state(lse, 1)
    for merged in (merge_states(*one, *state(-INF, 2)), merge_states(*state(-INF, 2), *one)):
        torch.testing.assert_close(merged, one, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP64], ids=str)
@pytest.mark.parametrize("cuts", [(8,), (1, 19), (5, 10, 15), (0, 20)])
def test_parts_of_the_keys_merge_to_the_whole(cuts: tuple[int, ...], dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(2, n, h, 8, dtype=dtype) for n, h in ((6, 4), (20, 2), (20, 2)))
    edges = (0, *cuts, 20)
    merged: tuple[torch.Tensor, torch.Tensor] | None = None
    for start, stop in itertools.pairwise(edges):
        part = tilewise.attention_with_lse(q, k[:, start:stop], v[:, start:stop], backend="cpu")
        merged = part if merged is None else merge_states(*merged, *part)
    assert merged is not None
    out, lse = attention_oracle(q, k, v)
    assert merged[0].dtype == dtype
    scale = 30 * torch.finfo(dtype).eps
    assert float((merged[0].double() - out).abs().max()) < scale
    assert float((merged[1].double() - lse).abs().max()) < 30 * torch.finfo(merged[1].dtype).eps * 4


def test_packed_states_merge() -> None:
    out_a, out_b = torch.randn(5, 3, 4), torch.randn(5, 3, 4)
    lse_a, lse_b = torch.randn(3, 5), torch.randn(3, 5)
    packed = merge_states(out_a, lse_a, out_b, lse_b)
    dense = merge_states(out_a[None], lse_a[None], out_b[None], lse_b[None])
    torch.testing.assert_close(packed, (dense[0][0], dense[1][0]))


def test_gradients_are_right_to_second_order_also_at_empty_states() -> None:
    out_a, out_b = (torch.randn(1, 3, 1, 2, dtype=FP64, requires_grad=True) for _ in range(2))
    lse_a, lse_b = (torch.randn(1, 1, 3, dtype=FP64, requires_grad=True) for _ in range(2))
    assert gradcheck(merge_states, (out_a, lse_a, out_b, lse_b), check_forward_ad=True)
    assert gradgradcheck(merge_states, (out_a, lse_a, out_b, lse_b))
    empty = torch.full((1, 1, 3), -INF, dtype=FP64, requires_grad=True)
    out, _ = merge_states(out_a, empty, out_b, empty)
    for grad in torch.autograd.grad(out.sum(), (out_a, out_b, empty)):
        assert not grad.any()


def test_a_merged_gradient_is_the_gradient_of_the_whole() -> None:
    q, k, v = (torch.randn(1, 6, 2, 4, dtype=FP64, requires_grad=True) for _ in range(3))
    halves = [tilewise.attention_with_lse(q, k[:, s], v[:, s]) for s in (slice(0, 2), slice(2, 6))]
    merged = merge_states(*halves[0], *halves[1])
    whole = tilewise.attention_with_lse(q, k, v)
    sent = (torch.randn_like(whole[0]), torch.randn_like(whole[1]))
    torch.testing.assert_close(
        torch.autograd.grad(merged, (q, k, v), sent), torch.autograd.grad(whole, (q, k, v), sent)
    )


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("out_a", None, "out_a: must be a torch.Tensor, got NoneType"),
        ("lse_b", 1.0, "lse_b: must be a torch.Tensor, got float"),
        ("out_b", torch.zeros(1, 3, 2, 4, dtype=torch.int32), "out_b: is int32, must be"),
        ("lse_a", torch.zeros(1, 2, 3).to_sparse(), "lse_a: is sparse_coo, must be"),
        ("lse_b", torch.zeros(1, 2, 3, device="meta"), "lse_b: is on meta, must be on cpu"),
    ],
)
def test_parts_of_a_state_are_tensors_of_numbers_on_one_device(name: str, value: Any, words: str) -> None:
    parts = {"out_a": torch.zeros(1, 3, 2, 4), "lse_a": torch.zeros(1, 2, 3), "out_b": torch.zeros(1, 3, 2, 4)}
    parts["lse_b"] = parts["lse_a"]
    with pytest.raises(tilewise.InvalidInput, match=words):
        merge_states(**parts | {name: value})


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        (((1, 3, 2, 4), (1, 2, 3), (1, 3, 2, 5), (1, 2, 3)), "out_b"),
        (((1, 3, 2, 4), (1, 3, 2), (1, 3, 2, 4), (1, 3, 2)), "lse_a"),
        (((4,), (1,), (4,), (1,)), "lse_a"),
    ],
)
def test_states_that_do_not_belong_together_are_refused(shapes: tuple, words: str) -> None:
    with pytest.raises(tilewise.InvalidInput, match=words):
        merge_states(*(torch.zeros(shape) for shape in shapes))
