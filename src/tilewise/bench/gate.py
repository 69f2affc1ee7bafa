"""No time without a right result: samples of out and of every gradient of the very call that is timed, against fp64.

Whole matrices of the timed sizes would not fit in fp64, so a few query rows and key columns of one head are recomputed
in full: a row of out and dq needs all its keys, a column of dk and dv all queries, taken in blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from tilewise.bench.cases import Case
from tilewise.descale import out_dtype

_SAMPLES = 16
_BLOCK = 512
# A peer whose result is further than this share of its size from fp64 computes another function.
ANOTHER_FUNCTION = 0.1

Results = Mapping[str, torch.Tensor]


class GateFailed(RuntimeError):
    """A contender's result is not within its error budget, so it is not timed."""


class Verdict(NamedTuple):
    """Root mean squares over the samples: the error against fp64, what it may be, the exact result's size."""

    error: float
    budget: float
    size: float

    @property
    def ok(self) -> bool:
        """Whether the error is within its budget; a NaN is not."""
        return self.error <= self.budget


class _Head(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    bias: torch.Tensor | None


def _block(case: Case, head: _Head, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """p, ds and out of some rows of one head, by plain operators in the head's dtype."""
    s = (head.q[rows] @ head.k.T) * case.headdim**-0.5
    if head.bias is not None:
        s = s + head.bias[rows].to(s.dtype)
    offset = torch.arange(len(head.k), device=rows.device) - rows[:, None]
    lower, upper = case.band
    if upper is not None:
        s = s.masked_fill(offset > upper, -torch.inf)
    if lower is not None:
        s = s.masked_fill(offset < lower, -torch.inf)
    p = s.softmax(-1)
    dout = head.dout[rows]
    dp = dout @ head.v.T
    out = p @ head.v
    return p, p * (dp - (dout * out).sum(-1, keepdim=True)), out


class Samples:
    """What the sampled rows and columns of a call must be; made once for all contenders of a case.

    ``heads`` are the query heads that share one K/V head, the first is sampled; of packed sequences one is taken.
    """

    def __init__(
        self,
        case: Case,
        tensors: tuple[torch.Tensor, ...],
        dout: torch.Tensor,
        bias: torch.Tensor | None = None,
        seed: int = 0,
    ) -> None:
        self.case, self.generator, self.device = case, torch.Generator("cpu").manual_seed(seed), dout.device
        self.where = self._sequence()
        self.head_k = self._draw(case.nheads_k or case.nheads)
        self.head_q = self.head_k * (case.nheads // (case.nheads_k or case.nheads))
        q, k, v = (self._part(tensor.detach()) for tensor in tensors)
        self.rows, self.keys = self._choose(len(q)), self._choose(len(k))
        self.found = {}
        self.plain = out_dtype(case.dtype)
        for dtype in dict.fromkeys((torch.float64, self.plain)):
            key, value = (t[:, self.head_k].to(dtype) for t in (k, v))
            heads = [
                _Head(
                    q[:, h].to(dtype),
                    key,
                    value,
                    self._part(dout)[:, h].to(dtype),
                    None if bias is None else bias.detach()[h],
                )
                for h in range(self.head_q, self.head_q + case.nheads // (case.nheads_k or case.nheads))
            ]
            self.found[dtype] = self._plain(heads)

    def _draw(self, end: int) -> int:
        return int(torch.randint(end, (), generator=self.generator, device="cpu"))

    def _choose(self, length: int) -> torch.Tensor:
        return torch.randperm(length, generator=self.generator, device="cpu")[:_SAMPLES].to(self.device)

    def _sequence(self) -> int | slice:
        """The batch item, or the tokens of the packed sequence, that is looked at."""
        if self.case.lengths is None:
            return self._draw(self.case.batch)
        offsets = torch.tensor([0, *self.case.lengths]).cumsum(0).tolist()
        return slice(*list(pairwise(offsets))[self._draw(len(self.case.lengths))])

    def _part(self, tensor: torch.Tensor) -> torch.Tensor:
        """(seqlen, nheads, dim) of the sequence that is looked at."""
        return tensor[self.where]

    def _plain(self, heads: list[_Head]) -> dict[str, torch.Tensor]:
        """The samples by plain operators."""
        case, scale = self.case, self.case.headdim**-0.5
        _, ds, out = _block(case, heads[0], self.rows)
        found = {"out": out, "dq": scale * (ds @ heads[0].k)}
        if heads[0].bias is not None:
            found["dbias"] = ds
        wide = torch.promote_types(heads[0].k.dtype, torch.float32)  # as a product of all rows at once would add up
        dk, dv = (torch.zeros_like(t[self.keys], dtype=wide) for t in (heads[0].k, heads[0].v))
        for head in heads:
            for start in range(0, len(head.q), _BLOCK):
                block = torch.arange(start, min(start + _BLOCK, len(head.q)), device=self.device)
                p, ds, _ = _block(case, head, block)
                dv += p[:, self.keys].T @ head.dout[block]
                dk += scale * (ds[:, self.keys].T @ head.q[block])
        return found | {"dk": dk.to(heads[0].k.dtype), "dv": dv.to(heads[0].v.dtype)}

    def _taken(self, name: str, result: torch.Tensor) -> torch.Tensor:
        """The sampled part of one of a contender's results."""
        result = result.detach()
        if name == "dbias":
            return result[self.head_q, self.rows]
        own = self._part(result)
        return own[self.keys, self.head_k] if name in ("dk", "dv") else own[self.rows, self.head_q]

    def verdicts(self, results: Results) -> dict[str, Verdict]:
        """For each of out, dq, dk, dv, dbias that ``results`` has.

        The budget is twice the error of the same plain operators in the inputs' dtype, plus one rounding of it; for fp8
        the operators are bf16's.
        """
        found = {}
        for name, result in results.items():
            exact, plain = self.found[torch.float64][name], self.found[self.plain][name]
            size = _rms(exact)
            budget = 2 * _rms(plain.double() - exact) + torch.finfo(self.case.dtype).eps * size
            found[name] = Verdict(_rms(self._taken(name, result).double() - exact), budget, size)
        return found


def _rms(tensor: torch.Tensor) -> float:
    return float(tensor.double().square().mean().sqrt())


def run(
    call: Callable[[], torch.Tensor], leaves: Mapping[str, torch.Tensor], dout: torch.Tensor
) -> dict[str, torch.Tensor]:
    """out and the gradients of the leaves, by name: "dq" of "q"."""
    out = call()
    grads = torch.autograd.grad(out, list(leaves.values()), dout)
    return {"out": out, **{f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}}


def require(name: str, case: Case, verdicts: Mapping[str, Verdict]) -> None:
    """GateFailed when a sampled result is over its budget."""
    for what, verdict in verdicts.items():
        if not verdict.ok:
            raise GateFailed(
                f"{name} on {case.name}: {what} is off by {verdict.error:.3e}, may be off by {verdict.budget:.3e}"
            )


def check(
    case: Case,
    name: str,
    call: Callable[[], torch.Tensor],
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    dout: torch.Tensor,
) -> None:
    """Run the contender forward and backward once; GateFailed when a sampled result is over its budget."""
    leaves: dict[str, Any] = dict(zip("qkv", tensors, strict=True))
    require(name, case, Samples(case, tensors, dout).verdicts(run(call, leaves, dout)))
