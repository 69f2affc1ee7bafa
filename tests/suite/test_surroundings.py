"""What a thread has switched on around a call (autocast, a default device) changes no number, forward or backward."""

from __future__ import annotations

import pytest
import torch

import tilewise
from tests.rooms import ROOMS, here

BF16 = torch.bfloat16
CALCULUS = pytest.mark.rooms("cpu", "reference")
# hopper sums dq in any order, and has no fp32
BITWISE = pytest.mark.rooms(*(name for name in ROOMS if name != "hopper"))


def _inputs(dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.randn(2, 40, heads, 16, dtype=dtype, requires_grad=True) for heads in (4, 2, 2)]


def _same_bits(actual: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def test_under_autocast_scores_and_state_stay_wide(backend: str) -> None:
    wide = _inputs(torch.float32)
    with torch.autocast(here(), dtype=BF16):
        under = tilewise.attention_with_lse(*wide, causal=True, backend=backend)
    _same_bits(under, tilewise.attention_with_lse(*(t.to(BF16) for t in wide), causal=True, backend=backend))


@BITWISE
def test_a_backward_under_autocast_is_the_backward(backend: str) -> None:
    inputs = _inputs(BF16)
    loss = sum(part.float().square().sum() for part in tilewise.attention_with_lse(*inputs, backend=backend))
    expected = torch.autograd.grad(loss, inputs, retain_graph=True)
    with torch.autocast(here(), dtype=BF16):
        _same_bits(torch.autograd.grad(loss, inputs), expected)


@CALCULUS
def test_second_order_and_forward_mode_under_autocast_are_the_same(backend: str) -> None:
    inputs = _inputs(BF16)

    def derivatives() -> tuple[torch.Tensor, ...]:
        out = tilewise.attention(*inputs, backend=backend)
        grads = torch.autograd.grad(out.float().square().sum(), inputs, create_graph=True)
        second = torch.autograd.grad(sum(grad.float().square().sum() for grad in grads), inputs)
        plain = tuple(t.detach() for t in inputs)
        call = lambda *t: tilewise.attention_with_lse(*t, backend=backend)  # noqa: E731
        return (*second, *torch.func.jvp(call, plain, plain)[1])

    expected = derivatives()
    with torch.autocast(here(), dtype=BF16):
        _same_bits(derivatives(), expected)


@BITWISE
@pytest.mark.parametrize("scale", [0.25, 40.0])
@pytest.mark.parametrize("lengths", [(30, 40), (40, 40), (40, 33)])
def test_a_default_device_is_not_that_of_the_call(backend: str, lengths: tuple[int, int], scale: float) -> None:
    q, k, v = (t[:, :length] for t, length in zip(_inputs(torch.float32), (lengths[0], *lengths[1:] * 2), strict=True))
    mask = torch.rand(1, lengths[1]) > 0.3
    mask[:, :3] = False
    cu_q, cu_k = torch.tensor([0, 7, lengths[0]]), torch.tensor([0, 9, lengths[1]])

    def results() -> tuple[torch.Tensor, ...]:
        packed = (t[0] for t in (q, k, v))
        options = {"causal": True, "softmax_scale": scale, "backend": backend}
        parts = (
            *tilewise.attention_with_lse(q, k, v, mask=mask, **options),
            *tilewise.attention_with_lse(q, k, v, **options),
            tilewise.attention_varlen(*packed, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **options),
        )
        loss = sum(part.masked_fill(part == -torch.inf, 0.0).sum() for part in parts)
        return (*parts, *torch.autograd.grad(loss, (q, k, v)))

    expected = results()
    with torch.device("meta"):
        _same_bits(results(), expected)


def test_explaining_draws_nothing_from_the_generator() -> None:
    q = torch.randn(1, 9, 2, 8)
    before = torch.get_rng_state()
    tilewise.explain(q, q, q, dropout_p=0.5)
    tilewise.explain(q, q, q, dropout_p=0.5, dropout_seed=None)
    tilewise.explain_varlen(q[0], q[0], q[0], cu_seqlens_q=torch.tensor([0, 9]), dropout_p=0.5)
    assert torch.equal(torch.get_rng_state(), before)
