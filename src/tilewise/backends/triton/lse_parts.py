"""lse in two parts for the backward: a row's largest score and the logarithm of its sum against it.

exp(s - lse) trusts the last bit of lse, which is worth 1e-4 where lse is 2000, and where many keys tie at -1e30 it
cannot even hold their number. fp32 asks for more than that, and a bias may be of any size. So here a block of rows with
an lse that is loud looks at its scores once more; any other keeps lse as it is.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.backends.triton import bands as B  # noqa: N812
from tilewise.backends.triton import primitives as P  # noqa: N812
from tilewise.backends.triton.backward_parts import product, scores

LOUD = tl.constexpr(16.0)  # of fp32 inputs: four bits of lse stand before the point
LOUD_HALF = tl.constexpr(1024.0)  # of 16-bit inputs: still 8 times finer than their own rounding


@triton.jit
def lse_parts_kernel(q_ptr, k_ptr, lse_ptr, row_lse_ptr, log_sum_ptr, extras, strides, extra_strides, sizes, scalars,
                     MODE: tl.constexpr, TILE: tl.constexpr):
    """lse = row_lse + log_sum of a block of rows, as ``probabilities`` wants them: +inf and 0 if a row sees no key.

    Grid: (row blocks, heads, batch) in one dimension, row blocks fastest.
    """
    num_m_blocks = tl.cdiv(tl.cdiv(sizes.seqlen_q, P.STATISTICS) * P.STATISTICS, TILE.block_m)
    program = tl.program_id(0)
    m_begin = program % num_m_blocks * TILE.block_m
    head = program // num_m_blocks % sizes.nheads
    batch = program // num_m_blocks // sizes.nheads
    q_start, seqlen_q = P.sequence(extras.cu_seqlens_q, batch, sizes.seqlen_q, MODE.varlen)
    rows = m_begin + tl.arange(0, TILE.block_m)
    stats = P.row_index(batch, head, q_start, sizes, seqlen_q, MODE.varlen)
    lse = tl.load(lse_ptr + stats + rows, mask=rows < seqlen_q, other=float("-inf"))
    log_sum = tl.full([TILE.block_m], 0.0, tl.float32)
    LIMIT: tl.constexpr = LOUD if MODE.precise else LOUD_HALF
    size = tl.abs(lse)
    if tl.max(tl.where(size < float("inf"), size, 0.0)) > LIMIT:
        lse, log_sum = peak_and_sum(q_ptr, k_ptr, extras, strides, extra_strides, sizes, scalars, batch, head, q_start,
                                    m_begin, seqlen_q, MODE, TILE)
    _, seqlen_k = P.sequence(extras.cu_seqlens_k, batch, sizes.seqlen_k, MODE.varlen)
    lower, upper = B.band(sizes, seqlen_q, seqlen_k, MODE)
    row_begin, _row_end = B.seeing_queries(lower, upper, seqlen_q, seqlen_k, MODE)
    own = P.statistic_index(batch, head, q_start, sizes, seqlen_q, row_begin, MODE) + rows
    kept = P.has_statistics(rows, seqlen_q, MODE)
    tl.store(row_lse_ptr + own, tl.where(lse == float("-inf"), float("inf"), lse), mask=kept)
    tl.store(log_sum_ptr + own, log_sum, mask=kept)


@triton.jit
def peak_and_sum(q_ptr, k_ptr, extras, strides, extra_strides, sizes, scalars, batch, head, q_start, m_begin, seqlen_q,
                 MODE: tl.constexpr, TILE: tl.constexpr):
    """The largest score of each row and log(sum of exp(s - largest)), the sink among them."""
    k_start, seqlen_k = P.sequence(extras.cu_seqlens_k, batch, sizes.seqlen_k, MODE.varlen)
    q_ptr = P.head_address(q_ptr, strides.q, batch, q_start, head, MODE.align)
    k_ptr = P.head_address(k_ptr, strides.k, batch, k_start, head // sizes.group, MODE.align)
    slope = 0.0
    if MODE.alibi:
        slope = tl.load(extras.alibi_slopes + batch * extra_strides.slopes_batch + head * extra_strides.slopes_head)
    start = float("-inf")
    if MODE.sink:
        start = tl.load(extras.sink + batch * extra_strides.sink_batch + head * extra_strides.sink_head)
    row_max = tl.full([TILE.block_m], 0.0, tl.float32) + start
    row_sum = tl.where(row_max == float("-inf"), 0.0, 1.0)
    lower, upper = B.band(sizes, seqlen_q, seqlen_k, MODE)
    key_begin, key_end = B.seen_keys(lower, upper, seqlen_q, seqlen_k, MODE)
    row_begin, row_end = B.seeing_queries(lower, upper, seqlen_q, seqlen_k, MODE)
    m_end = tl.minimum(m_begin + TILE.block_m, seqlen_q)
    reachable = tl.where(m_begin < seqlen_q, seqlen_k, 0)
    first, _, _, last = B.key_blocks(m_begin, m_end, lower, upper, reachable, TILE.block_n, MODE)
    i = (m_begin + tl.arange(0, TILE.block_m))[:, None]
    for n_block in tl.range(first, last):
        n_begin = n_block * TILE.block_n
        j = (n_begin + tl.arange(0, TILE.block_n))[None, :]
        s = product(q_ptr, strides.q, m_begin, row_begin, row_end, k_ptr, strides.k, n_begin, key_begin, key_end,
                    TILE.headdim, TILE.block_d, TILE.num_d, TILE.block_m, TILE.block_n, MODE)
        s, _slack = scores(s, i, j, slope, extras, extra_strides, scalars, batch, head, seqlen_q, seqlen_k, True, MODE)
        keep = B.keep_pairs(i, j, lower, upper, seqlen_q, seqlen_k, MODE)
        if MODE.lists:
            keep = P.keep_listed(keep, i, j, extras, extra_strides, batch, head, seqlen_q, seqlen_k, MODE)
        s = tl.where(keep, s, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(s, 1))
        origin = tl.where(new_max == float("-inf"), 0.0, new_max)
        row_sum = row_sum * P.exp(row_max - origin, MODE.precise) + tl.sum(P.exp(s - origin[:, None], MODE.precise), 1)
        row_max = new_max
    return row_max, tl.where(row_max == float("-inf"), 0.0, tl.log(row_sum))
