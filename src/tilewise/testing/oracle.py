"""Attention written out in plain torch operators: the judge of every backend, gradients by torch's own autograd.

It shares no code with the backends. Every matrix is materialised, so keep the sizes small. ``dtype`` is what it
computes in: fp64 makes it the oracle, the inputs' own dtype makes it "plain PyTorch attention", the yardstick of the
budgets.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Pair = tuple[torch.Tensor, torch.Tensor]


def attention_oracle(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool | str = False,
    window_size: tuple[int | None, int | None] = (None, None),
    segments: torch.Tensor | Pair | None = None,
    mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_keep: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> Pair:
    """(out, lse) by the definition in SEMANTICS, computed in ``dtype`` and left in it.

    Args:
        q, k, v: (batch, seqlen_q, nheads, headdim), (batch, seqlen_k, nheads_k, headdim), (batch, seqlen_k, nheads_k,
            headdim_v).
        dropout_keep: boolean (batch, nheads, seqlen_q, seqlen_k), True = kept; must be given when dropout_p > 0, since
            the oracle draws no random numbers of its own.
        The other options are those of ``tilewise.attention``.

    Returns:
        out (batch, seqlen_q, nheads, headdim_v) and lse (batch, nheads, seqlen_q). A query that sees no key has out 0
        and lse -inf (lse = sink with a sink), and gives no gradient.

    Raises:
        ValueError: dropout_p > 0 without dropout_keep.
    """
    if dropout_p and dropout_keep is None:
        raise ValueError("dropout_keep: is None, must be the boolean keep mask when dropout_p > 0")
    batch, nheads = q.shape[0], q.shape[2]
    group = nheads // k.shape[2] if k.shape[2] else 1
    keep = visible_pairs(q, k, causal=causal, window_size=window_size, segments=segments, mask=mask)
    query, key, value = (t.to(dtype).permute(0, 2, 1, 3) for t in (q, k, v))
    key, value = (torch.repeat_interleave(t, group, dim=1) for t in (key, value))
    unseen = ~keep.any(dim=2)[..., None]
    key, value = key.masked_fill(unseen, 0.0), value.masked_fill(unseen, 0.0)

    scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    scores = torch.einsum("bhid,bhjd->bhij", query, key) * scale
    if softcap > 0:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias.to(dtype)
    if alibi_slopes is not None:
        slopes = alibi_slopes.to(dtype).expand(batch, nheads)
        scores = scores - slopes[:, :, None, None] * _distances(q, k).to(dtype)
    scores = scores.masked_fill(~keep, float("-inf"))
    weights, lse = _softmax(scores, None if sink is None else sink.to(dtype).expand(batch, nheads)[:, :, None])
    if dropout_p:
        factor = 0.0 if dropout_p >= 1 else 1 / (1 - dropout_p)
        weights = weights * (dropout_keep.to(dtype) * factor if dropout_keep is not None else factor)
    return torch.einsum("bhij,bhjd->bihd", weights, value), lse


def _softmax(scores: torch.Tensor, sink: torch.Tensor | None) -> Pair:
    """Probabilities and log denominator of each row; a row of -inf gives zeros, -inf and no gradient."""
    top = scores.detach().amax(-1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], float("-inf"))
    if sink is not None:
        top = torch.maximum(top, sink.detach())
    top = top.masked_fill(top == float("-inf"), 0.0)
    parts = torch.exp(scores - top[..., None])
    total = parts.sum(-1)
    if sink is not None:
        total = total + torch.exp(sink - top)
    nothing = total == 0
    total = total.masked_fill(nothing, 1.0)
    lse = (top + torch.log(total)).masked_fill(nothing, float("-inf"))
    return parts / total[..., None], lse


def _distances(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """|i + seqlen_k - seqlen_q - j| for every pair."""
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    i = torch.arange(seqlen_q, device=q.device).view(-1, 1)
    j = torch.arange(seqlen_k, device=q.device).view(1, -1)
    return (i + seqlen_k - seqlen_q - j).abs()


def visible_pairs(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    causal: bool | str = False,
    window_size: tuple[int | None, int | None] = (None, None),
    segments: torch.Tensor | Pair | None = None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Boolean (batch, nheads, seqlen_q, seqlen_k): True where the pair takes part."""
    batch, seqlen_q, nheads, seqlen_k = q.shape[0], q.shape[1], q.shape[2], k.shape[1]
    i = torch.arange(seqlen_q, device=q.device).view(-1, 1)
    j = torch.arange(seqlen_k, device=q.device).view(1, -1)
    shifted = i + (seqlen_k - seqlen_q)
    keep = torch.full((batch, nheads, seqlen_q, seqlen_k), True, device=q.device)
    if causal:
        keep = keep & (j <= (i if causal == "top_left" else shifted))
    left, right = window_size
    if left is not None:
        keep = keep & (j >= shifted - left)
    if right is not None:
        keep = keep & (j <= shifted + right)
    if segments is not None:
        ids_q, ids_k = segments if isinstance(segments, tuple) else (segments, segments)
        keep = keep & (ids_q.view(batch, 1, seqlen_q, 1) == ids_k.view(batch, 1, 1, seqlen_k))
    return keep if mask is None else keep & mask


def varlen_oracle(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    dropout_keep: Sequence[torch.Tensor] | None = None,
    dtype: torch.dtype = torch.float64,
    causal: bool | str = False,
    window_size: tuple[int | None, int | None] = (None, None),
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
) -> Pair:
    """The packed form, one sequence after another; tokens beyond the last offset have out 0 and lse -inf.

    Args:
        q, k, v: (total_q, nheads, headdim), (total_k, nheads_k, headdim), (total_k, nheads_k, headdim_v).
        dropout_keep: one boolean (1, nheads, length_q, length_k) for each sequence.

    Returns:
        out (total_q, nheads, headdim_v), lse (nheads, total_q).
    """
    starts_q = cu_seqlens_q.tolist()
    starts_k = starts_q if cu_seqlens_k is None else cu_seqlens_k.tolist()
    outs, lses = [], []
    for index in range(len(starts_q) - 1):
        span_q = slice(starts_q[index], starts_q[index + 1])
        span_k = slice(starts_k[index], starts_k[index + 1])
        out, lse = attention_oracle(
            q[None, span_q],
            k[None, span_k],
            v[None, span_k],
            alibi_slopes=alibi_slopes if alibi_slopes is None or alibi_slopes.ndim == 1 else alibi_slopes[index],
            sink=sink if sink is None or sink.ndim == 1 else sink[index],
            dropout_keep=None if dropout_keep is None else dropout_keep[index],
            dtype=dtype,
            causal=causal,
            window_size=window_size,
            softcap=softcap,
            dropout_p=dropout_p,
            softmax_scale=softmax_scale,
        )
        outs.append(out[0])
        lses.append(lse[0])
    rest = q.shape[0] - starts_q[-1]
    outs.append(torch.zeros(rest, q.shape[1], v.shape[2], dtype=dtype, device=q.device))
    lses.append(torch.full((q.shape[1], rest), float("-inf"), dtype=dtype, device=q.device))
    return torch.cat(outs), torch.cat(lses, dim=1)
