"""A hunt for races: the same call again and again at odd sizes, beside other work, gives the same bits each time."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch

import tilewise

HERE = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.hopper, pytest.mark.skipif(not HERE, reason="needs an sm_90 device")]
FEW, MANY = 400, 10_000

# (batch, seqlen_q, seqlen_k, nheads, nheads_k, headdim, options)
DENSE: tuple[tuple[int, int, int, int, int, int, dict[str, Any]], ...] = (
    (2, 1111, 1313, 8, 4, 128, {"causal": True}),
    (1, 129, 4097, 8, 8, 64, {}),
    (3, 777, 513, 4, 1, 256, {"causal": "top_left"}),
    (1, 2050, 2050, 6, 2, 96, {"window_size": (300, 17)}),
    (5, 65, 191, 12, 12, 64, {"causal": True}),
    (1, 333, 900, 16, 2, 192, {}),
    (1, 391, 1111, 8, 8, 128, {}),
    (2, 1700, 1555, 5, 5, 128, {}),
    (1, 1700, 3900, 10, 5, 128, {"causal": True}),
)
LENGTHS = [1, 700, 0, 129, 64, 1025, 3, 300]


def _dense(index: int) -> tuple[Any, list[torch.Tensor]]:
    batch, seqlen_q, seqlen_k, nheads, nheads_k, headdim, options = DENSE[index]
    shapes = ((seqlen_q, nheads), (seqlen_k, nheads_k), (seqlen_k, nheads_k))
    tensors = [_draw(batch, seqlen, heads, headdim) for seqlen, heads in shapes]
    return (lambda *t: tilewise.attention(*t, **options, backend="hopper")), tensors


def _packed() -> tuple[Any, list[torch.Tensor]]:
    offsets = torch.tensor([0, *accumulate(LENGTHS)], dtype=torch.int32, device="cuda")
    tensors = [_draw(sum(LENGTHS) + 5, heads, 128) for heads in (8, 2, 2)]
    options = {"cu_seqlens_q": offsets, "max_seqlen": max(LENGTHS), "causal": True}
    return (lambda *t: tilewise.attention_varlen(*t, **options, backend="hopper")), tensors


def _draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)


def _hunt(call: Any, tensors: list[torch.Tensor], repeats: int) -> None:
    """out, dk and dv bit for bit; dq, which is summed in any order, within its rounding."""
    first = call(*tensors)
    dout = torch.randn_like(first)
    dq, *others = torch.autograd.grad(first, tensors, dout)
    rounding = 2**-6 * dq.abs().max()
    different = torch.zeros(4, dtype=torch.int64, device="cuda")
    beside, matrix = torch.cuda.Stream(), torch.randn(1536, 1536, device="cuda", dtype=torch.bfloat16)
    for repeat in range(repeats):
        if repeat % 3 == 0:  # now and then some multiprocessors are taken, so that CTAs meet in another order
            with torch.cuda.stream(beside):
                matrix @ matrix
        out = call(*tensors)
        again = torch.autograd.grad(out, tensors, dout)
        different[0] += (out != first).any()
        different[1] += ((again[0] - dq).abs() > rounding).any()
        different[2] += (again[1] != others[0]).any()
        different[3] += (again[2] != others[1]).any()
    assert different.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("repeats", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
@pytest.mark.parametrize("index", range(len(DENSE)))
def test_dense_calls_repeat_their_bits(index: int, repeats: int) -> None:
    _hunt(*_dense(index), repeats)


@pytest.mark.parametrize("repeats", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_packed_calls_repeat_their_bits(repeats: int) -> None:
    _hunt(*_packed(), repeats)
