"""The gradient of a bias that batch items or heads share: a program owns one of its tiles."""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.backends.triton import bands as B  # noqa: N812
from tilewise.backends.triton import primitives as P  # noqa: N812
from tilewise.backends.triton.backward_parts import at_most_one, probabilities, product, scores


@triton.jit
def bias_gradient_kernel(q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, log_sum_ptr, delta_ptr, dbias_ptr, extras, strides,
                         extra_strides, sizes, scalars, bias_batch, bias_heads, MODE: tl.constexpr, TILE: tl.constexpr):
    """One tile of the gradient of a bias that batch items or heads share: ds summed over them in fp32 registers.

    Grid: (key blocks, query blocks, bias heads, bias batch) in one dimension, key blocks fastest.
    """
    num_m_blocks = tl.cdiv(sizes.seqlen_q, TILE.block_m)
    num_n_blocks = tl.cdiv(sizes.seqlen_k, TILE.block_n)
    seqlen_q = sizes.seqlen_q
    seqlen_k = sizes.seqlen_k
    program = tl.program_id(0)
    n_begin = program % num_n_blocks * TILE.block_n
    m_begin = program // num_n_blocks % num_m_blocks * TILE.block_m
    plane = program // num_n_blocks // num_m_blocks
    rows = m_begin + tl.arange(0, TILE.block_m)
    cols = n_begin + tl.arange(0, TILE.block_n)
    i, j = rows[:, None], cols[None, :]
    lower, upper = B.band(sizes, seqlen_q, seqlen_k, MODE)
    band_keep = B.keep_pairs(i, j, lower, upper, seqlen_q, seqlen_k, MODE)
    key_begin, key_end = B.seen_keys(lower, upper, seqlen_q, seqlen_k, MODE)
    row_begin, _row_end = B.seeing_queries(lower, upper, seqlen_q, seqlen_k, MODE)
    start = tl.zeros((), tl.int64)
    sharers = (sizes.batch // bias_batch) * (sizes.nheads // bias_heads)
    if tl.sum(band_keep.to(tl.int32)) == 0:
        sharers = 0
    dbias = tl.full([TILE.block_m, TILE.block_n], 0.0, tl.float32)
    for sharer in tl.range(0, sharers):
        # where the bias has size 1 the sharers run through all items, elsewhere the plane names the one
        batch = tl.where(bias_batch == 1, sharer // (sizes.nheads // bias_heads), plane // bias_heads)
        head = tl.where(bias_heads == 1, sharer % (sizes.nheads // bias_heads), plane % bias_heads)
        slope = 0.0
        if MODE.alibi:
            slope = tl.load(extras.alibi_slopes + batch * extra_strides.slopes_batch + head * extra_strides.slopes_head)
        stats = P.statistic_index(batch, head, start, sizes, seqlen_q, row_begin, MODE)
        q_head = P.head_address(q_ptr, strides.q, batch, start, head, MODE.align)
        k_head = P.head_address(k_ptr, strides.k, batch, start, head // sizes.group, MODE.align)
        v_head = P.head_address(v_ptr, strides.v, batch, start, head // sizes.group, MODE.align)
        dout_head = P.head_address(dout_ptr, strides.dout, batch, start, head, MODE.align)
        lse = tl.load(lse_ptr + stats + rows, mask=rows < seqlen_q, other=float("inf"))
        log_sum = tl.load(log_sum_ptr + stats + rows, mask=rows < seqlen_q, other=0.0)
        delta = tl.load(delta_ptr + stats + rows, mask=rows < seqlen_q, other=0.0)
        s = product(q_head, strides.q, m_begin, 0, seqlen_q, k_head, strides.k, n_begin, key_begin, key_end,
                    TILE.headdim, TILE.block_d, TILE.num_d, TILE.block_m, TILE.block_n, MODE)
        s, _ = scores(s, i, j, slope, extras, extra_strides, scalars, batch, head, seqlen_q, seqlen_k, True, MODE)
        p = at_most_one(probabilities(s, lse[:, None], log_sum[:, None], scalars, MODE))
        dp = product(dout_head, strides.dout, m_begin, 0, seqlen_q, v_head, strides.v, n_begin, key_begin, key_end,
                     TILE.headdim_v, TILE.block_dv, TILE.num_dv, TILE.block_m, TILE.block_n, MODE)
        if MODE.dropout:
            kept = P.keep_dropout(tl.load(extras.seed), batch + sizes.batch_offset, head, m_begin, n_begin,
                                  scalars.max_dropped, TILE.block_m, TILE.block_n, False)
            dp = tl.where(kept, dp * scalars.keep_scale, 0.0)
        keep = band_keep
        if MODE.lists:
            keep = P.keep_listed(keep, i, j, extras, extra_strides, batch, head, seqlen_q, seqlen_k, MODE)
        dbias += tl.where(keep, p * (dp - delta[:, None]), 0.0)
    addresses = dbias_ptr + (plane.to(tl.int64) * seqlen_q + i) * seqlen_k + j
    tl.store(addresses, dbias.to(dbias_ptr.dtype.element_ty), mask=(i < seqlen_q) & (j < seqlen_k))
