"""From the public functions' arguments to the operator's: every option checked and in its plain form."""

from __future__ import annotations

import torch

from tilewise import options
from tilewise.inputs import Arguments, check_tensor

Causal = bool | str
Window = tuple[int | None, int | None]
MaxSeqlen = int | torch.Tensor | tuple[int | torch.Tensor, int | torch.Tensor] | None
Segments = torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None

OPEN: Window = (None, None)


def dense_arguments(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: Causal = False,
    window_size: Window = OPEN,
    segments: Segments = None,
    mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | torch.Tensor | None = None,
    softmax_scale: float | None = None,
    deterministic: bool = False,
    backend: str = "auto",
) -> Arguments:
    """The operator's arguments for a call of ``attention``."""
    if torch._C._is_any_autocast_enabled():
        q, k, v = options.autocast(q, k, v)
    segments_q, segments_k = (None, None) if segments is None else options.segments(segments)
    left, right = (None, None) if window_size is OPEN else options.window(window_size)
    corner, scale, cap, probability, repeatable, name = options.plain(
        causal, softmax_scale, softcap, dropout_p, deterministic, backend
    )
    return Arguments(
        q,
        k,
        v,
        bias,
        mask,
        alibi_slopes,
        sink,
        segments_q,
        segments_k,
        None,
        None,
        None if dropout_seed is None and probability == 0 else options.seed(dropout_seed, probability, q),
        corner,
        left,
        right,
        scale,
        cap,
        probability,
        None,
        None,
        repeatable,
        options.needs_grad(q, k, v, bias, alibi_slopes, sink) if torch.is_grad_enabled() else (),
        name,
    )


def varlen_arguments(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen: MaxSeqlen = None,
    causal: Causal = False,
    window_size: Window = OPEN,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | torch.Tensor | None = None,
    softmax_scale: float | None = None,
    deterministic: bool = False,
    backend: str = "auto",
) -> Arguments:
    """The operator's arguments for a call of ``attention_varlen``."""
    cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    check_tensor("cu_seqlens_q", cu_seqlens_q)
    check_tensor("cu_seqlens_k", cu_seqlens_k)
    if torch._C._is_any_autocast_enabled():
        q, k, v = options.autocast(q, k, v)
    left, right = (None, None) if window_size is OPEN else options.window(window_size)
    corner, scale, cap, probability, repeatable, name = options.plain(
        causal, softmax_scale, softcap, dropout_p, deterministic, backend
    )
    longest_q, longest_k = options.pair("max_seqlen", max_seqlen)
    return Arguments(
        q,
        k,
        v,
        None,
        None,
        alibi_slopes,
        sink,
        None,
        None,
        cu_seqlens_q,
        cu_seqlens_k,
        options.seed(dropout_seed, probability, q),
        corner,
        left,
        right,
        scale,
        cap,
        probability,
        options.longest(longest_q),
        options.longest(longest_k),
        repeatable,
        options.needs_grad(q, k, v, None, alibi_slopes, sink) if torch.is_grad_enabled() else (),
        name,
    )
