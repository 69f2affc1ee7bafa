"""The front door: attention, its packed form, the algebra of partial results, and explain."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from tilewise import autograd, ops, options, recall
from tilewise.arguments import OPEN, Causal, MaxSeqlen, Segments, Window, dense_arguments, varlen_arguments
from tilewise.device import DeviceFacts
from tilewise.dispatch import registry
from tilewise.explain import Explanation as Explanation
from tilewise.explain import explain_arguments
from tilewise.fp8 import Descale, Descales
from tilewise.inputs import Arguments
from tilewise.states import merge_states as merge_states

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _takes(builder: Callable[..., Any]) -> Callable[[_Function], _Function]:
    """Show the keyword arguments of ``builder``, which the function hands them to, in help and signatures."""

    def decorate(function: _Function) -> _Function:
        own = inspect.signature(function)
        named = [p for p in own.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        taken = [p for p in inspect.signature(builder).parameters.values() if p.name not in own.parameters]
        function.__signature__ = own.replace(parameters=[*named, *taken])  # type: ignore[attr-defined]
        return function

    return decorate


def _forward(
    arguments: Arguments, q_descale: Descale, k_descale: Descale, v_descale: Descale
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse); only a call with descales goes to the operator that takes them."""
    if q_descale is None and k_descale is None and v_descale is None:
        return autograd.forward(arguments)
    return ops.scaled_forward(arguments, Descales(q_descale, k_descale, v_descale))


def attention(
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
    q_descale: Descale = None,
    k_descale: Descale = None,
    v_descale: Descale = None,
    deterministic: bool = False,
    backend: str = "auto",
) -> torch.Tensor:
    """Exact softmax attention, never holding a (seqlen_q, seqlen_k) matrix of its own.

    For batch item b, query head h, query i, key j (K/V head ``h // (nheads // nheads_k)``)::

        s   = softmax_scale * <q_i, k_j>
        s   = softcap * tanh(s / softcap)                                          when softcap > 0
        s   = s + bias[b, h, i, j] - alibi_slopes[h] * |i + seqlen_k - seqlen_q - j|
        s   = -inf                                                                 where the pair is excluded
        lse = ln(sum_j exp(s_j) + exp(sink[h]))
        out_i = sum_j exp(s_j - lse) v_j

    ::

        causal, seqlen_q 3, seqlen_k 5        causal="top_left"         window_size=(1, 0)
              j 0 1 2 3 4                       j 0 1 2 3 4               j 0 1 2 3 4
          i 0   x x x . .                   i 0   x . . . .           i 0   . x x . .
          i 1   x x x x .                   i 1   x x . . .           i 1   . . x x .
          i 2   x x x x x                   i 2   x x x . .           i 2   . . . x x

    Args:
        q: (batch, seqlen_q, nheads, headdim); fp64, fp32, bf16, fp16 or float8_e4m3fn; any strides, any length
            from 0, headdim >= 1.
        k: (batch, seqlen_k, nheads_k, headdim), same dtype; nheads must be a multiple of nheads_k (GQA, MQA).
        v: (batch, seqlen_k, nheads_k, headdim_v), same dtype; headdim_v may differ from headdim.
        causal: True or "bottom_right": key j is visible to query i iff j <= i + seqlen_k - seqlen_q; "top_left": iff
            j <= i; False: no limit.
        window_size: (left, right): keys i' - left to i' + right inclusive, i' = i + seqlen_k - seqlen_q; None is
            open. A model whose sliding window W counts the query itself wants (W - 1, 0).
        segments: integers (batch, seqlen) for both sides (self-attention), or a pair (batch, seqlen_q), (batch,
            seqlen_k): a pair takes part iff its ids are equal. For packed documents.
        mask: bool, broadcastable to (batch, nheads, seqlen_q, seqlen_k); True = the pair takes part. Causal, window,
            segments and mask AND together. A padding mask (batch, seqlen_k) goes in as ``mask[:, None, None, :]``.
        bias: float, added to the scores, broadcastable like mask; may require grad. Finite values never exclude.
            Scores are fp32 unless q is fp64, so of an fp64 bias (or fp64 alibi_slopes, sink) beside other q a finite
            number beyond fp32's range counts as the largest fp32 number of its sign.
        softcap: c > 0 gives c * tanh(s / c) before the bias; 0 is off, any other c must be from 1e-12 to 1e12.
        alibi_slopes: (nheads,) or (batch, nheads), float; may require grad.
        sink: (nheads,) or (batch, nheads): a logit in the denominator that has no value; may require grad.
        dropout_p: probability in [0, 1] that a pair's weight is dropped after the softmax; the others are multiplied
            by 1 / (1 - dropout_p). There is no train/eval state: pass 0 in eval.
        dropout_seed: int or one-element int64 tensor; the same seed drops the same pairs on every backend. None draws
            one from torch's generator, only if dropout_p > 0.
        softmax_scale: default headdim ** -0.5; any finite number, 0 and negatives included.
        q_descale, k_descale, v_descale: for float8_e4m3fn q, k, v alone: a number, or fp32 with one number,
            (nheads_k,), (batch, nheads_k), or (batch, nheads_k, blocks) with one for every 128 rows, that the stored
            values are multiplied by; None is 1. ``quantize_fp8`` makes them. Forward only.
        deterministic: bitwise equal from run to run on the same device, forward and backward.
        backend: "auto", or a name ("cpu", "sdpa", "triton", "hopper", "reference"); a backend asked for by name runs
            or raises, it never falls back.

    Returns:
        out (batch, seqlen_q, nheads, headdim_v) in q's dtype, bf16 for fp8. A query that sees no key gives exactly 0,
        and its gradients are exactly 0.

    Raises:
        InvalidInput (a ValueError), InvalidType (also a TypeError): naming the argument, what it was, what it must be.
        UnsupportedProblem (a NotImplementedError): no backend, or not the one named, runs this; with all reasons.

    Sources: Dao et al. 2022 (FlashAttention), Dao 2023 (2), Shah et al. 2024 (3); Milakov and Gimelshein 2018 (online
    softmax); Press et al. 2022 (ALiBi).
    """
    alone = (window_size is OPEN or (isinstance(window_size, tuple) and window_size == OPEN)) and (
        segments is mask is bias is alibi_slopes is sink is dropout_seed is q_descale is k_descale is v_descale is None
    )
    key = recall.key_of(causal, softmax_scale, softcap, dropout_p, deterministic, backend) if alone else None
    out = None if key is None else recall.recall(key, q, k, v)
    if out is not None:
        return out
    arguments = dense_arguments(
        q,
        k,
        v,
        causal=causal,
        window_size=window_size,
        segments=segments,
        mask=mask,
        bias=bias,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sink=sink,
        dropout_p=dropout_p,
        dropout_seed=dropout_seed,
        softmax_scale=softmax_scale,
        deterministic=deterministic,
        backend=backend,
    )
    out = None if key is None else recall.keep(key, arguments)
    return _forward(arguments, q_descale, k_descale, v_descale)[0] if out is None else out


@_takes(dense_arguments)
def attention_with_lse(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    q_descale: Descale = None,
    k_descale: Descale = None,
    v_descale: Descale = None,
    **keywords: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``attention``, with the same keyword arguments, and the log of the softmax denominator beside out.

    Returns:
        out as ``attention`` gives it, and lse: natural log, (batch, nheads, seqlen_q), fp32 (fp64 for fp64 inputs),
        differentiable; -inf (or the sink) for a query that sees no key. ``merge_states`` merges such pairs.
    """
    arguments = dense_arguments(q, k, v, **keywords)
    out, lse = _forward(arguments, q_descale, k_descale, v_descale)
    return out, lse.contiguous()


def attention_varlen(
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
    q_descale: Descale = None,
    k_descale: Descale = None,
    v_descale: Descale = None,
    deterministic: bool = False,
    backend: str = "auto",
) -> torch.Tensor:
    """Attention over sequences of different lengths packed one after the other, without padding.

    Args:
        q: (total_q, nheads, headdim); k: (total_k, nheads_k, headdim); v: (total_k, nheads_k, headdim_v).
        cu_seqlens_q: int32 or int64 (batch + 1,): sequence b holds tokens cu_seqlens_q[b] to cu_seqlens_q[b + 1]. It
            starts with 0 and does not decrease; empty sequences are fine. Required.
        cu_seqlens_k: the same for k and v; default cu_seqlens_q.
        max_seqlen: the longest sequence, an int, a one-element tensor, or a pair of these for q and k; optional.
        causal, window_size, softcap, alibi_slopes, sink, dropout_p, dropout_seed, softmax_scale, q_descale, k_descale,
        v_descale, deterministic, backend: as in ``attention``, each sequence on its own; batch is their number.

    Returns:
        out (total_q, nheads, headdim_v); 0 for tokens beyond the last offset and for queries that see no key.

    Raises:
        InvalidInput, InvalidType, UnsupportedProblem: as ``attention``. Offsets are read, and checked, where they
        lie on the CPU; on a device they are not read, which would wait for it.
    """
    arguments = varlen_arguments(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen=max_seqlen,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sink=sink,
        dropout_p=dropout_p,
        dropout_seed=dropout_seed,
        softmax_scale=softmax_scale,
        deterministic=deterministic,
        backend=backend,
    )
    return _forward(arguments, q_descale, k_descale, v_descale)[0]


@_takes(varlen_arguments)
def attention_varlen_with_lse(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    q_descale: Descale = None,
    k_descale: Descale = None,
    v_descale: Descale = None,
    **keywords: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``attention_varlen``, with lse (nheads, total_q) beside out; -inf for tokens beyond the last offset."""
    arguments = varlen_arguments(q, k, v, **keywords)
    out, lse = _forward(arguments, q_descale, k_descale, v_descale)
    return out, lse.contiguous()


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """``with use_backend("cpu"):`` makes that backend the default of every call inside it, in this thread.

    A call whose ``backend`` is "auto" then asks for ``name``, which runs or raises; any other ``backend`` wins.

    Raises:
        InvalidInput: ``name`` is no backend; the message lists the names.
    """
    before = options.default.backend
    options.default.backend = registry.check_name(name)
    try:
        yield
    finally:
        options.default.backend = before


def _drawing_nothing(keywords: dict[str, Any]) -> dict[str, Any]:
    """The keywords with a seed in place of none, so that torch's generator is left alone."""
    return {**keywords, "dropout_seed": 0} if keywords.get("dropout_seed") is None else keywords


@_takes(dense_arguments)
def explain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    device: str | torch.device | DeviceFacts | None = None,
    q_descale: Descale = None,
    k_descale: Descale = None,
    v_descale: Descale = None,
    **keywords: Any,
) -> Explanation:
    """What ``attention`` would do with the same arguments, and what it costs; computes nothing.

    Args:
        q, k, v and the keyword arguments of ``attention``; meta tensors do.
        device: which device to explain for, when it is not q's: "cpu", a torch.device, a GPU by its name ("h200",
            "a100", "l40s", "mi300x", ...; it need not be here), or made-up ``DeviceFacts``.

    Returns:
        Explanation: prints as text, ``.as_dict()`` gives plain data: the chosen backend, every refused one with all
        its reasons, kept pairs, full, partial and skipped tiles, FLOPs, memory saved for backward beside
        materialising attention's.

    Raises:
        InvalidInput, InvalidType: as ``attention``. A problem no backend runs is explained, not raised.
    """
    arguments = dense_arguments(q, k, v, **_drawing_nothing(keywords))
    return explain_arguments(arguments, device, Descales(q_descale, k_descale, v_descale))


@_takes(varlen_arguments)
def explain_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    device: str | torch.device | DeviceFacts | None = None,
    q_descale: Descale = None,
    k_descale: Descale = None,
    v_descale: Descale = None,
    **keywords: Any,
) -> Explanation:
    """``explain`` for ``attention_varlen``; pairs and tiles are counted where the offsets lie on the CPU."""
    arguments = varlen_arguments(q, k, v, **_drawing_nothing(keywords))
    return explain_arguments(arguments, device, Descales(q_descale, k_descale, v_descale))
