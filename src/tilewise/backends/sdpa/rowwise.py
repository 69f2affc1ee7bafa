"""The backward for rows whose lse is so large that exp(s - lse) is no longer their probability.

P is normalised anew, a block of whole rows at a time, in plain torch operators: slower than the kernel, and right.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tilewise.backends.sdpa.kernel import Rows, Triple, clean_keys

# Scores held at a time: 16 MiB in fp32.
_BLOCK = 2**22


def _blocks(
    rows: Rows, seqlen_k: int, added: torch.Tensor | None, upper: int | None
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Spans of rows, and what is added to their scores: bias, and -inf on excluded pairs; broadcastable 4-D."""
    batch, nheads, seqlen_q, _ = rows.q.shape
    block = max(1, _BLOCK // max(1, batch * nheads * seqlen_k))
    for start in range(0, seqlen_q, block):
        span = slice(start, min(start + block, seqlen_q))
        tile = rows.lse.new_zeros(1, 1, span.stop - start, seqlen_k)
        if added is not None:
            tile = tile + (added if added.shape[2] == 1 else added[:, :, span])
        if upper is not None:
            above = torch.ones_like(tile[0, 0], dtype=torch.bool).triu(start + upper + 1)
            tile = tile.masked_fill(above, -torch.inf)
        yield span, tile


def _grouped(tensor: torch.Tensor, group: int) -> torch.Tensor:
    """(batch, nheads, ...) as (batch, nheads_k, group, ...)."""
    return tensor.reshape(tensor.shape[0], -1, group, *tensor.shape[2:])


def _softmax(s: torch.Tensor) -> torch.Tensor:
    """Probabilities of each row; zeros for a row of -inf."""
    top = s.amax(-1, keepdim=True)
    p = torch.exp(s - top.masked_fill(top == -torch.inf, 0.0))
    total = p.sum(-1, keepdim=True)
    return p / total.masked_fill(total == 0, 1.0)


def backward(
    rows: Rows, k: torch.Tensor, v: torch.Tensor, added: torch.Tensor | None, upper: int | None, scale: float
) -> Triple:
    """(dq, dk, dv) in the state dtype; row i of ``rows`` sees the keys j with j - i <= upper (None: all of them)."""
    seqlen_k, dtype = k.shape[2], rows.lse.dtype
    group = rows.q.shape[1] // k.shape[1]
    seen = rows.lse.new_zeros(1, 1, seqlen_k, dtype=torch.bool)
    for _, tile in _blocks(rows, seqlen_k, added, upper):
        seen = seen | (tile != -torch.inf).any(2)
    # k and v as (batch, nheads_k, 1, seqlen_k, dim) beside q as (batch, nheads_k, group, rows, dim)
    k, v = (clean_keys(t, seen).to(dtype)[:, :, None] for t in (k, v))
    dq = rows.q.new_empty(rows.q.shape, dtype=dtype)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    for span, tile in _blocks(rows, seqlen_k, added, upper):
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
