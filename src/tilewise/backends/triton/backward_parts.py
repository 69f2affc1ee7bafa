"""What the kernels of the backward share: the statistics of a row, p and ds of a tile, products over channel parts.

    p = exp(s - lse)      dp = dout v^T      ds = p (dp - delta)      delta = rowsum(dout out) - dlse
    dv = p^T dout         dk = scale ds^T q         dq = scale ds k       dbias = ds       dslope = -sum ds |distance|

Every gradient has one owner, so that there are no atomics and every run gives equal bits.
Dao, "FlashAttention-2" (2023).
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.backends.triton import bands as B  # noqa: N812
from tilewise.backends.triton import primitives as P  # noqa: N812


@triton.jit
def row_statistics(dot, lse_ptr, dlse_ptr, row_lse_ptr, log_sum_ptr, delta_ptr, dsink_ptr, extras, extra_strides, sizes,
                   batch, head, start, block, num_blocks, rows, row_begin, seqlen_q, MODE: tl.constexpr):
    """lse and delta of rows as the tiles want them, from dot = rowsum(dout out); stored for the kernels that follow.

    lse is in the unit of the scores (see ``probabilities``), and +inf for the -inf of a row that sees no key and for
    the rows past the end that fill up the statistics, which makes p 0. In two parts it has been stored before. In one
    part a huge one is lowered by as much as rounding could have raised it, so that the largest p of its row comes out
    as 1 and not a little below or above (above is cut off). With a sink also the block's part of
    dsink = -sum exp(sink - lse) delta.
    """
    stats = P.row_index(batch, head, start, sizes, seqlen_q, MODE.varlen)
    inside = rows < seqlen_q
    delta = dot
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + stats + rows, mask=inside, other=0.0)
    log_sum = 0.0
    if MODE.two_parts:
        own = P.statistic_index(batch, head, start, sizes, seqlen_q, row_begin, MODE) + rows
        lse = tl.load(row_lse_ptr + own, mask=inside, other=float("inf"))
        log_sum = tl.load(log_sum_ptr + own, mask=inside, other=0.0)
    else:
        lse = tl.load(lse_ptr + stats + rows, mask=inside, other=float("inf"))
    if dsink_ptr is not None:
        sink = tl.load(extras.sink + batch * extra_strides.sink_batch + head * extra_strides.sink_head)
        weight = tl.exp2((sink - lse - log_sum) * P.LOG2E)
        total = tl.sum(tl.where(inside, weight * delta, 0.0))
        plane = batch.to(tl.int64) * sizes.nheads + head
        tl.store(dsink_ptr + plane * num_blocks + block, tl.where(sink == float("-inf"), 0.0, -total))
    if MODE.two_parts:
        row_lse = lse
    else:
        size = tl.abs(lse)
        slack = tl.where((size > P.HUGE) & (size < float("inf")), size * P.ROUNDING, 0.0)
        row_lse = tl.where(lse == float("-inf"), float("inf"), lse - slack)
        if not MODE.scale_first:
            row_lse *= P.LOG2E
    own = P.statistic_index(batch, head, start, sizes, seqlen_q, row_begin, MODE) + rows
    kept = P.has_statistics(rows, seqlen_q, MODE)
    tl.store(delta_ptr + own, delta, mask=kept)
    if not MODE.two_parts:
        tl.store(row_lse_ptr + own, row_lse, mask=kept)
    return row_lse, log_sum, delta


@triton.jit
def delta_kernel(out_ptr, dout_ptr, lse_ptr, dlse_ptr, row_lse_ptr, log_sum_ptr, delta_ptr, dsink_ptr, extras, strides,
                 extra_strides, sizes, MODE: tl.constexpr, TILE: tl.constexpr):
    """The row statistics, where no other kernel computes them on its way.

    Grid: (row blocks, heads, batch) in one dimension, row blocks fastest.
    """
    num_m_blocks = tl.cdiv(sizes.seqlen_q, TILE.block_m)
    program = tl.program_id(0)
    m_block = program % num_m_blocks
    head = program // num_m_blocks % sizes.nheads
    batch = program // num_m_blocks // sizes.nheads
    start, seqlen_q = P.sequence(extras.cu_seqlens_q, batch, sizes.seqlen_q, MODE.varlen)
    out_ptr = P.head_address(out_ptr, strides.out, batch, start, head, MODE.align)
    dout_ptr = P.head_address(dout_ptr, strides.dout, batch, start, head, MODE.align)

    m_begin = m_block * TILE.block_m
    rows = m_begin + tl.arange(0, TILE.block_m)
    dot = tl.full([TILE.block_m], 0.0, tl.float32)
    for part in tl.range(0, TILE.num_dv):
        cols = part * TILE.block_dv + tl.arange(0, TILE.block_dv)
        out = P.load_tile(out_ptr, strides.out, m_begin, cols, 0, seqlen_q, TILE.headdim_v, TILE.block_m,
                          TILE.block_dv, True, MODE.align)
        dout = P.load_tile(dout_ptr, strides.dout, m_begin, cols, 0, seqlen_q, TILE.headdim_v, TILE.block_m,
                           TILE.block_dv, True, MODE.align)
        dot += tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    _, seqlen_k = P.sequence(extras.cu_seqlens_k, batch, sizes.seqlen_k, MODE.varlen)
    lower, upper = B.band(sizes, seqlen_q, seqlen_k, MODE)
    row_begin, _row_end = B.seeing_queries(lower, upper, seqlen_q, seqlen_k, MODE)
    row_statistics(dot, lse_ptr, dlse_ptr, row_lse_ptr, log_sum_ptr, delta_ptr, dsink_ptr, extras, extra_strides, sizes,
                   batch, head, start, m_block, num_m_blocks, rows, row_begin, seqlen_q, MODE)


@triton.jit
def scores(s, i, j, slope, extras, strides, scalars, batch, head, seqlen_q, seqlen_k, MASKED: tl.constexpr,
           MODE: tl.constexpr):
    """Scores in the unit of ``probabilities`` and the softcap's derivative, from raw products."""
    slack = 1.0
    if MODE.scale_first:
        s, slack = P.modify_scores(s, i, j, slope, extras, strides, scalars, batch, head, seqlen_q, seqlen_k, MASKED,
                                   MODE)
    return s, slack


@triton.jit
def probabilities(s, row_lse, log_sum, scalars, MODE: tl.constexpr):
    """p = exp(s - lse). Scores are natural if MODE.scale_first; else raw products, and row_lse in log2 units.

    log_sum is read only if MODE.two_parts.
    """
    if MODE.two_parts and MODE.precise:
        return P.exp(s - row_lse - log_sum, True)
    elif MODE.two_parts:
        x = s - row_lse
        return tl.exp2(tl.fma(x, tl.full(x.shape, P.LOG2E, tl.float32), tl.zeros_like(x) - log_sum * P.LOG2E))
    elif MODE.scale_first:
        return P.exp(s - row_lse, MODE.precise)
    else:
        return tl.exp2(s * (scalars.softmax_scale * P.LOG2E) - row_lse)


@triton.jit
def at_most_one(p):
    """p of rows whose lse may be huge, see ``row_statistics``: rounding makes it much more than 1, or infinite."""
    return tl.minimum(p, 1.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def product(a_ptr, a_stride, a_first, a_begin, a_end, b_ptr, b_stride, b_first, b_begin, b_end, num_cols,
            BLOCK: tl.constexpr, PARTS: tl.constexpr, ROWS_A: tl.constexpr, ROWS_B: tl.constexpr, MODE: tl.constexpr):
    """a b^T over all channels, part by part: for head dimensions too large to keep on the chip."""
    total = tl.full([ROWS_A, ROWS_B], 0.0, tl.float32)
    for part in tl.range(0, PARTS):
        cols = part * BLOCK + tl.arange(0, BLOCK)
        a = P.load_tile(a_ptr, a_stride, a_first, cols, a_begin, a_end, num_cols, ROWS_A, BLOCK, True, MODE.align)
        b = P.load_tile(b_ptr, b_stride, b_first, cols, b_begin, b_end, num_cols, ROWS_B, BLOCK, True, MODE.align)
        total = tl.dot(a, tl.trans(b), total, input_precision=MODE.precision)
    return total
