"""No time without a right result: samples of out, dq, dk and dv of the very call that is timed, against fp64.

Whole matrices of the timed sizes would not fit in fp64, so a few query rows and key columns of every head are
recomputed in full: a row of out and dq needs all its keys, a column of dk and dv all queries, taken in blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from tilewise.bench.cases import Case

_SAMPLES = 16
_BLOCK = 512


class GateFailed(RuntimeError):
    """A contender's result is not within its error budget, so it is not timed."""


class Sampled(NamedTuple):
    """Rows of out and dq, columns of dk and dv, one head, in the dtype they were computed in."""

    out: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


class _Head(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor


def _block(case: Case, head: _Head, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """p, ds and out of some rows of one head, by plain operators in the head's dtype."""
    s = (head.q[rows] @ head.k.T) * case.headdim**-0.5
    offset = torch.arange(case.seqlen, device=rows.device) - rows[:, None]
    if case.causal or case.window is not None:
        s = s.masked_fill(offset > 0, -torch.inf)
    if case.window is not None:
        s = s.masked_fill(offset <= -case.window, -torch.inf)
    p = s.softmax(-1)
    dout = head.dout[rows]
    dp = dout @ head.v.T
    out = p @ head.v
    return p, p * (dp - (dout * out).sum(-1, keepdim=True)), out


def _plain(case: Case, heads: list[_Head], rows: torch.Tensor, keys: torch.Tensor) -> Sampled:
    """The samples by plain operators; ``heads`` are the query heads that share one K/V head, the first is sampled."""
    scale = case.headdim**-0.5
    _, ds, out = _block(case, heads[0], rows)
    dq = scale * (ds @ heads[0].k)
    dk, dv = torch.zeros_like(heads[0].k[keys]), torch.zeros_like(heads[0].v[keys])
    for head in heads:
        for start in range(0, case.seqlen, _BLOCK):
            block = torch.arange(start, min(start + _BLOCK, case.seqlen), device=rows.device)
            p, ds, _ = _block(case, head, block)
            dv += p[:, keys].T @ head.dout[block]
            dk += scale * (ds[:, keys].T @ head.q[block])
    return Sampled(out, dq, dk, dv)


def errors(
    case: Case,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    dout: torch.Tensor,
    results: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    seed: int = 0,
) -> dict[str, tuple[float, float]]:
    """For out, dq, dk, dv: (error against fp64, what it may be); both root mean square over the samples.

    The budget is twice the error of the same plain operators in the inputs' dtype, plus one rounding of it.
    """
    generator = torch.Generator().manual_seed(seed)
    count = min(_SAMPLES, case.seqlen)
    rows = torch.randperm(case.seqlen, generator=generator)[:count].to(dout.device)
    keys = torch.randperm(case.seqlen, generator=generator)[:count].to(dout.device)
    batch = int(torch.randint(case.batch, (), generator=generator))
    head_k = int(torch.randint(case.nheads_k or case.nheads, (), generator=generator))
    group = case.nheads // (case.nheads_k or case.nheads)
    q, k, v = (tensor.detach()[batch] for tensor in tensors)
    found = {}
    for dtype in (torch.float64, case.dtype):
        heads = [
            _Head(*(t.to(dtype) for t in (q[:, h], k[:, head_k], v[:, head_k], dout[batch, :, h])))
            for h in range(head_k * group, (head_k + 1) * group)
        ]
        found[dtype] = _plain(case, heads, rows, keys)
    out, dq, dk, dv = (result.detach()[batch] for result in results)
    head_q = head_k * group
    actual = Sampled(out[rows, head_q], dq[rows, head_q], dk[keys, head_k], dv[keys, head_k])
    verdict = {}
    for name, got, exact, plain in zip(Sampled._fields, actual, found[torch.float64], found[case.dtype], strict=True):
        rounding = torch.finfo(case.dtype).eps * _rms(exact)
        verdict[name] = (_rms(got.double() - exact), 2 * _rms(plain.double() - exact) + rounding)
    return verdict


def _rms(tensor: torch.Tensor) -> float:
    return float(tensor.double().square().mean().sqrt())


def check(
    case: Case,
    name: str,
    call: Callable[[], torch.Tensor],
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    dout: torch.Tensor,
) -> None:
    """Run the contender forward and backward once; GateFailed when a sampled result is over its budget."""
    out = call()
    dq, dk, dv = torch.autograd.grad(out, tensors, dout)
    for what, (error, budget) in errors(case, tensors, dout, (out, dq, dk, dv)).items():
        if not error <= budget:
            raise GateFailed(f"{name} on {case.name}: {what} is off by {error:.3e}, may be off by {budget:.3e}")
