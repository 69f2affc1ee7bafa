"""The causal and window rules: which blocks a program visits, which of them need a mask, which pairs it keeps.

Every function takes pairs as two broadcastable index tensors, ``i`` (query rows) and ``j`` (key columns), so that the
same code serves a (rows, cols) tile of the forward and the transposed (cols, rows) tile of the key gradients.
"""

from __future__ import annotations

import triton
import triton.language as tl

NOWHERE = tl.constexpr(-(2**30))  # an upper bound that excludes all, small enough to be added to a length


@triton.jit
def band(sizes, seqlen_q, seqlen_k, MODE: tl.constexpr):
    """The causal and window rules as lower <= j - i <= upper; a bound that MODE leaves out must not be read."""
    shift = seqlen_k - seqlen_q
    lower = shift - sizes.window_left
    upper = shift + sizes.window_right
    if MODE.top_left:
        upper = tl.minimum(upper, 0)
        if MODE.lower:  # no pair is left: nor is a block, whose values might be anything
            upper = tl.where(lower > upper, NOWHERE, upper)
    return lower, upper


@triton.jit
def seen_keys(lower, upper, seqlen_q, seqlen_k, MODE: tl.constexpr):
    """Half-open range of the keys that at least one query of the sequence sees, as far as the band decides."""
    begin = 0
    end = seqlen_k
    if MODE.lower:
        begin = tl.maximum(begin, lower)
    if MODE.upper:
        end = tl.minimum(end, seqlen_q + upper)
    return begin, end


@triton.jit
def seeing_queries(lower, upper, seqlen_q, seqlen_k, MODE: tl.constexpr):
    """Half-open range of the queries that see at least one key, as far as the band decides."""
    begin = 0
    end = seqlen_q
    if MODE.upper:
        begin = tl.maximum(begin, -upper)
    if MODE.lower:
        end = tl.minimum(end, seqlen_k - lower)
    return begin, end


@triton.jit
def key_blocks(m_begin, m_end, lower, upper, seqlen_k, BLOCK_N: tl.constexpr, MODE: tl.constexpr):
    """Key blocks that rows [m_begin, m_end) touch: [first, last), of which [full_first, full_last) need no mask."""
    begin = 0
    end = seqlen_k
    full_begin = 0
    full_end = seqlen_k
    if MODE.lower:
        begin = tl.maximum(begin, m_begin + lower)
        full_begin = tl.maximum(full_begin, m_end - 1 + lower)
    if MODE.upper:
        end = tl.minimum(end, m_end + upper)
        full_end = tl.minimum(full_end, m_begin + upper + 1)
    first = begin // BLOCK_N
    last = tl.maximum(tl.cdiv(tl.maximum(end, 0), BLOCK_N), first)
    full_first = tl.minimum(tl.cdiv(full_begin, BLOCK_N), last)
    full_last = tl.maximum(tl.maximum(full_end, 0) // BLOCK_N, full_first)
    return first, full_first, full_last, last


@triton.jit
def query_blocks(n_begin, n_end, lower, upper, seqlen_q, BLOCK_M: tl.constexpr, MODE: tl.constexpr):
    """Query blocks that keys [n_begin, n_end) touch: [first, last), of which [full_first, full_last) need no mask.

    A key past the last one needs no mask either: its row of the transposed tile reaches only its own gradients.
    """
    begin = 0
    end = seqlen_q
    full_begin = 0
    full_end = seqlen_q
    if MODE.upper:
        begin = tl.maximum(begin, n_begin - upper)
        full_begin = tl.maximum(full_begin, n_end - 1 - upper)
    if MODE.lower:
        end = tl.minimum(end, n_end - lower)
        full_end = tl.minimum(full_end, n_begin - lower + 1)
    first = begin // BLOCK_M
    last = tl.maximum(tl.cdiv(tl.maximum(end, 0), BLOCK_M), first)
    full_first = tl.minimum(tl.cdiv(full_begin, BLOCK_M), last)
    full_last = tl.maximum(tl.maximum(full_end, 0) // BLOCK_M, full_first)
    return first, full_first, full_last, last


@triton.jit
def sorted_blocks(first, full_first, full_last, last, begin, end, length, BLOCK: tl.constexpr, PADDED: tl.constexpr):
    """Block ranges in order: edge, from inner_first cut, [full_first, full_last) full, cut, from inner_last edge.

    An edge has a row outside of [begin, end), so that its loads are masked; a cut tile only has excluded pairs.
    PADDED: rows from ``length`` on read as zeros, so that they do no harm either (TMA past the end of a tensor).
    """
    inner_first = tl.minimum(tl.maximum(tl.cdiv(begin, BLOCK), first), last)
    inner_last = end // BLOCK
    if PADDED:
        inner_last = tl.where(end >= length, last, inner_last)
    inner_last = tl.minimum(tl.maximum(inner_last, inner_first), last)
    full_first = tl.minimum(tl.maximum(full_first, inner_first), inner_last)
    full_last = tl.minimum(tl.maximum(full_last, full_first), inner_last)
    return inner_first, full_first, full_last, inner_last


@triton.jit
def around(step, first, skip_first, skip_last):
    """The block number ``step`` of [first, skip_first) and what follows skip_last."""
    left = skip_first - first
    return tl.where(step < left, first + step, skip_last + step - left)


@triton.jit
def keep_pairs(i, j, lower, upper, seqlen_q, seqlen_k, MODE: tl.constexpr):
    """The pairs inside the sequence and its band."""
    keep = (j < seqlen_k) & (i < seqlen_q)
    if MODE.lower:
        keep &= j - i >= lower
    if MODE.upper:
        keep &= j - i <= upper
    return keep


@triton.jit
def keep_band(i, j, lower, upper, MODE: tl.constexpr):
    """The pairs inside the band alone, one compare for each of its sides."""
    keep = j <= i + upper
    if MODE.lower:
        if MODE.upper:
            keep &= j >= i + lower
        else:
            keep = j >= i + lower
    return keep


@triton.jit
def keep_queries(i, j, lower, upper, row_end, MODE: tl.constexpr):
    """The pairs of queries before ``row_end`` inside the band, with one compare for both upper bounds of a key's."""
    end = tl.zeros_like(j) + row_end
    if MODE.lower:
        end = tl.minimum(end, j - lower + 1)
    keep = i < end
    if MODE.upper:
        keep &= i >= j - upper
    return keep


@triton.jit
def keep_keys(i, j, lower, upper, seqlen_k, MODE: tl.constexpr):
    """The pairs of keys that exist inside the band, with one compare for both upper bounds of a query's keys."""
    end = tl.zeros_like(i) + seqlen_k
    if MODE.upper:
        end = tl.minimum(end, i + upper + 1)
    keep = j < end
    if MODE.lower:
        keep &= j >= i + lower
    return keep
