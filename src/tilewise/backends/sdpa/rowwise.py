"""Rows whose lse is so large that exp(s - lse) is no longer their probability, nor the weight of a part of their keys.

A block of whole rows at a time: the forward is one call of the kernel that merges nothing, and in the backward P is
normalised anew, in plain torch operators: slower than the kernel's, and right.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from tilewise.backends.sdpa import kernel
from tilewise.backends.sdpa.kernel import Rows, State, Triple, clean_keys

# Scores held at a time: 16 MiB in fp32.
_BLOCK = 2**22


class Pairs(NamedTuple):
    """The scores of rows ``at`` (their numbers, ascending) beside what ``added`` and the band do to them.

    Row i sees the keys j with j - i <= upper (None: all of them).
    """

    at: torch.Tensor
    seqlen_k: int
    added: torch.Tensor | None
    upper: int | None
    dtype: torch.dtype

    def blocks(self, heads: int) -> Iterator[tuple[slice, torch.Tensor]]:
        """Spans of ``at``, and what is added to their scores: bias, and -inf on excluded pairs; broadcastable 4-D."""
        block = max(1, _BLOCK // max(1, heads * self.seqlen_k))
        for start in range(0, len(self.at), block):
            span = slice(start, min(start + block, len(self.at)))
            rows = self.at[span]
            tile = torch.zeros(1, 1, len(rows), self.seqlen_k, dtype=self.dtype, device=rows.device)
            if self.added is not None:
                tile = tile + (self.added if self.added.shape[2] == 1 else self.added[:, :, rows])
            if self.upper is not None:
                keys = torch.arange(self.seqlen_k, device=rows.device)
                tile = tile.masked_fill(keys > rows[:, None] + self.upper, -torch.inf)
            yield span, tile

    def seen(self, heads: int) -> torch.Tensor:
        """Which keys some row sees, (batch or 1, nheads or 1, seqlen_k)."""
        result = torch.zeros(1, 1, self.seqlen_k, dtype=torch.bool, device=self.at.device)
        for _, tile in self.blocks(heads):
            result = result | (tile != -torch.inf).any(2)
        return result


def _grouped(tensor: torch.Tensor, group: int) -> torch.Tensor:
    """(batch, nheads, ...) as (batch, nheads_k, group, ...)."""
    return tensor.reshape(tensor.shape[0], -1, group, *tensor.shape[2:])


def _softmax(s: torch.Tensor) -> torch.Tensor:
    """Probabilities of each row; zeros for a row of -inf."""
    top = s.amax(-1, keepdim=True)
    p = torch.exp(s - top.masked_fill(top == -torch.inf, 0.0))
    total = p.sum(-1, keepdim=True)
    return p / total.masked_fill(total == 0, 1.0)


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pairs: Pairs, scale: float) -> State:
    """(out, lse) of the rows ``pairs.at`` of q: all their keys in one call, the band written into what is added."""
    out = q.new_empty(*q.shape[:2], len(pairs.at), v.shape[-1])
    lse = q.new_empty(out.shape[:3], dtype=pairs.dtype)
    for span, tile in pairs.blocks(q.shape[0] * q.shape[1]):
        out[:, :, span], lse[:, :, span] = kernel.forward(q[:, :, pairs.at[span]], k, v, tile, False, scale)
    return out, lse


def backward(
    rows: Rows, k: torch.Tensor, v: torch.Tensor, added: torch.Tensor | None, upper: int | None, scale: float
) -> Triple:
    """(dq, dk, dv) in the state dtype; row i of ``rows`` sees the keys j with j - i <= upper (None: all of them)."""
    seqlen_k, dtype = k.shape[2], rows.lse.dtype
    heads, group = rows.q.shape[0] * rows.q.shape[1], rows.q.shape[1] // k.shape[1]
    pairs = Pairs(torch.arange(rows.q.shape[2], device=k.device), seqlen_k, added, upper, dtype)
    seen = pairs.seen(heads)
    # k and v as (batch, nheads_k, 1, seqlen_k, dim) beside q as (batch, nheads_k, group, rows, dim)
    k, v = (clean_keys(t, seen).to(dtype)[:, :, None] for t in (k, v))
    dq = rows.q.new_empty(rows.q.shape, dtype=dtype)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    for span, tile in pairs.blocks(heads):
        q, out, dout = (_grouped(t[:, :, span].to(dtype), group) for t in (rows.q, rows.out, rows.dout))
        tile = _grouped(tile, group) if tile.shape[1] > 1 else tile[:, :, None]
        p = _softmax(scale * (q @ k.mT) + tile)
        delta = (dout * out).sum(-1)
        if rows.dlse is not None:
            delta = delta - _grouped(rows.dlse[:, :, span], group)
        ds = scale * p * (dout @ v.mT - delta[..., None])
        dq[:, :, span] = (ds @ k).flatten(1, 2)
        dk += (ds.mT @ q).sum(2, keepdim=True)
        dv += (p.mT @ dout).sum(2, keepdim=True)
    return dq, dk[:, :, 0], dv[:, :, 0]
