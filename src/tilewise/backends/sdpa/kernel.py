"""torch's CPU flash kernel, called where it is right and repaired where a cheap look at its result shows it is not.

What it really does (torch 2.11 to 2.13; tests/sdpa/test_kernel_facts.py holds torch to it):
- it reads garbage unless the last stride of q, k and v is 1, and stops the process on an empty size;
- a row that sees no key gets lse 0 (not -inf), and so does a row of NaN scores when there are fewer keys than one
  vector register holds; both show as an lse of exactly 0;
- a NaN in a masked key, or in a query that sees nothing, spreads;
- what is added reaches the pairs above the triangle too, where NaN and +inf make a NaN of the row;
- its backward recomputes P as exp(s - lse), whose error grows with lse: in fp32 over twice plain torch's from about 60.

Heads come second here: q (batch, nheads, rows, headdim), as torch's kernel wants it.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from tilewise.masks import band
from tilewise.problem import Problem

# torch's own binding where it has one: its arguments are parsed in C++, 5 us sooner than the operator's
call = getattr(
    torch,
    "_scaled_dot_product_flash_attention_for_cpu",
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
)
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

# |lse| from which exp(s - lse), with s computed anew, is too far from the forward's P for the error budget. Of the
# weights exp(lse_part - lse) of two parts the same is true.
LSE_LIMIT = {torch.float64: 2.0**5, torch.float32: 2.0**5, torch.bfloat16: 2.0**12, torch.float16: 2.0**12}
# Keys of the widest vector register (16 fp32 numbers): with fewer, the kernel loses NaN rows.
LANES = 16
State = tuple[torch.Tensor, torch.Tensor]
Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Part(NamedTuple):
    """Queries from ``row`` on against keys [first, last): all of them, or the top-left triangle."""

    row: int
    first: int
    last: int
    causal: bool


@functools.lru_cache(maxsize=4096)
def parts(problem: Problem) -> tuple[Part, ...]:
    """The pairs ``j - i <= upper`` as a rectangle and a top-left triangle; keys that nobody sees are left out.

    ::

        j 0 1 2 3 4        upper = 2: the rectangle is keys 0, 1; the triangle starts at key 2
        i x x | x
          x x | x x        upper < 0: the first rows see nothing, and the triangle starts below them
          x x | x x x
    """
    seqlen_q, seqlen_k = problem.seqlen_q, problem.seqlen_k
    if not seqlen_q or not seqlen_k:
        return ()
    upper = band(problem).upper if problem.banded else None
    if upper is None or upper >= seqlen_k - 1:
        return (Part(0, 0, seqlen_k, False),)
    row, corner = max(0, -upper), max(0, upper)
    last = min(seqlen_k, corner + seqlen_q - row)
    if last <= corner:
        return ()
    triangle = Part(row, corner, last, True)
    return (Part(row, 0, corner, False), triangle) if corner else (triangle,)


@functools.lru_cache(maxsize=4096)
def only_part(problem: Problem) -> Part | None:
    """The part that is all rows and keys, if one is."""
    found = parts(problem)
    return found[0] if len(found) == 1 and found[0][:3] == (0, 0, problem.seqlen_k) else None


def cut(added: torch.Tensor | None, part: Part) -> torch.Tensor | None:
    """The rows and keys of ``part`` in what is added to the scores; broadcast dimensions stay 1."""
    if added is None:
        return None
    if added.shape[2] > 1:
        added = added[:, :, part.row :]
    return added if added.shape[3] == 1 else added[..., part.first : part.last]


class Visibility(NamedTuple):
    """Which rows see a key and which keys are seen, each (batch or 1, nheads or 1, length or 1)."""

    rows: torch.Tensor
    keys: torch.Tensor


def visibility(added: torch.Tensor, rows: int, causal: bool) -> Visibility:
    """Read off where ``added`` is not -inf, and under the triangle."""
    keep = added != -torch.inf
    if causal and keep.shape[2] > 1 and keep.shape[3] > 1:
        keep = keep.tril()
    return Visibility(_rows_with_any(keep, rows, causal), keep.any(-2))


def _rows_with_any(pairs: torch.Tensor, rows: int, causal: bool) -> torch.Tensor:
    """Rows for which some pair is True, under the triangle if ``causal``; broadcast dimensions stay 1."""
    if not causal or pairs.shape[3] == 1:
        return pairs.any(-1)
    if pairs.shape[2] > 1:
        return pairs.tril().any(-1)
    first = pairs.to(torch.uint8).argmax(-1)
    return pairs.any(-1) & (first <= torch.arange(rows, device=pairs.device))


class Harmless(NamedTuple):
    """What is added without its NaN and +inf, and the rows (as in Visibility) that see one and so are NaN."""

    added: torch.Tensor
    lost: torch.Tensor | None


def harmless(added: torch.Tensor, rows: int, causal: bool) -> Harmless:
    """Above the triangle nothing that is added may matter; below it NaN and +inf are the rows' own."""
    if not causal:
        return Harmless(added, None)
    spoils = ~(added < torch.inf)
    return Harmless(added.masked_fill(spoils, 0.0), _rows_with_any(spoils, rows, causal))


def clean_keys(tensor: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """k or v (batch, nheads_k, seqlen_k, dim) with zeros where no query head of the group sees the key."""
    nheads_k = tensor.shape[1]
    if keys.shape[1] > 1:
        keys = keys.reshape(keys.shape[0], nheads_k, -1, keys.shape[2]).any(2)
    return tensor.masked_fill(~keys[..., None], 0.0)


def _is_finite(*tensors: torch.Tensor) -> bool:
    return all(bool(tensor.sum(dtype=torch.float64).isfinite()) for tensor in tensors)


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, added: torch.Tensor | None, causal: bool, scale: float
) -> State:
    """(out, lse) of one part, with empty rows and NaN as the semantics want them."""
    out, lse = call(q, k, v, 0.0, causal, attn_mask=added, scale=scale)
    if added is None:
        if k.shape[2] < LANES and not bool(lse.all()):
            _restore_nan(q, k, added, causal, scale, out, lse)
        return out, lse
    if bool(lse.all()) and _is_finite(out, lse):
        return out, lse
    seen = visibility(added, q.shape[2], causal)
    k, v = clean_keys(k, seen.keys), clean_keys(v, seen.keys)
    added, lost = harmless(added, q.shape[2], causal)
    out, lse = call(q, k, v, 0.0, causal, attn_mask=added, scale=scale)
    if k.shape[2] < LANES:
        _restore_nan(q, k, added, causal, scale, out, lse)
    out.masked_fill_(~seen.rows[..., None], 0.0)
    lse.masked_fill_(~seen.rows, -torch.inf)
    if lost is not None:
        out.masked_fill_(lost[..., None], torch.nan)
        lse.masked_fill_(lost, torch.nan)
    return out, lse


def _restore_nan(
    q: torch.Tensor,
    k: torch.Tensor,
    added: torch.Tensor | None,
    causal: bool,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """NaN rows that the kernel turned to zeros, found in the few scores they have."""
    group = q.shape[1] // k.shape[1]
    s = scale * (q.to(lse.dtype) @ k.to(lse.dtype).repeat_interleave(group, 1).mT)
    if added is not None:
        s = s + added
    lost = s.isnan()
    if causal:
        lost = lost.tril()
    lost = lost.any(-1)
    out.masked_fill_(lost[..., None], torch.nan)
    lse.masked_fill_(lost, torch.nan)


class Rows(NamedTuple):
    """What the backward knows of the queries of one part."""

    q: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor | None


def without_empty(rows: Rows) -> Rows:
    """Rows that see nothing made harmless: zeros everywhere, so that no NaN of theirs is multiplied."""
    empty = rows.lse == -torch.inf
    wide = empty[..., None]
    return Rows(
        rows.q.masked_fill(wide, 0.0),
        rows.out.masked_fill(wide, 0.0),
        rows.lse.masked_fill(empty, 0.0),
        rows.dout.masked_fill(wide, 0.0),
        None if rows.dlse is None else rows.dlse.masked_fill(empty, 0.0),
    )


def backward(
    rows: Rows, k: torch.Tensor, v: torch.Tensor, added: torch.Tensor | None, causal: bool, scale: float
) -> Triple:
    """(dq, dk, dv) of one part; ``out`` and ``lse`` may belong to a larger set of keys."""
    grads = _call_backward(rows, k, v, added, causal, scale)
    if added is None or _is_finite(*grads):
        return grads
    seen = visibility(added, rows.q.shape[2], causal)
    k, v = clean_keys(k, seen.keys), clean_keys(v, seen.keys)
    return _call_backward(rows, k, v, harmless(added, rows.q.shape[2], causal).added, causal, scale)


def _call_backward(
    rows: Rows, k: torch.Tensor, v: torch.Tensor, added: torch.Tensor | None, causal: bool, scale: float
) -> Triple:
    q, out, lse, dout, dlse = rows
    if dlse is None:
        grads: Triple = _backward(dout, q, k, v, out, lse, 0.0, causal, attn_mask=added, scale=scale)
        return grads
    # One more channel carries dlse into delta = rowsum(dout * out): dout has 1 there, out -dlse, q, k and v 0. In the
    # state dtype, so that it is not rounded.
    dtype, dim = lse.dtype, q.shape[-1]
    q, k, v = (torch.nn.functional.pad(t.to(dtype), (0, 1)) for t in (q, k, v))
    dout = torch.nn.functional.pad(dout.to(dtype), (0, 1), value=1.0)
    out = torch.cat([out.to(dtype), -dlse[..., None]], dim=-1)
    if added is not None:
        added = added.to(dtype)
    padded = _backward(dout, q, k, v, out, lse, 0.0, causal, attn_mask=added, scale=scale)
    return padded[0][..., :dim], padded[1][..., :dim], padded[2][..., :dim]
