"""dq: a program owns a block of queries. On its way: row statistics, dbias as tiles or row sums, dslope."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from tilewise.backends.triton import bands as B  # noqa: N812
from tilewise.backends.triton import primitives as P  # noqa: N812
from tilewise.backends.triton.backward_parts import at_most_one, probabilities, product, row_statistics, scores
from tilewise.backends.triton.places import place


@triton.jit
def query_tile(dq, row_sum, slope_sum, q, dout, lse, log_sum, delta, pointers, descriptors, strides, extras,
               extra_strides, sizes, scalars, slope, batch, head, k_start, m_begin, n_begin, part, cut, seqlen_q,
               seqlen_k, KIND: tl.constexpr, MODE: tl.constexpr, TILE: tl.constexpr, GRADS: tl.constexpr):
    """Adds what the keys [n_begin, n_begin + block_n) send to the program's queries. Tiles are (queries, keys).

    KIND is as for forward.score_tile; a huge lse makes pairs count as excluded.
    """
    EDGE: tl.constexpr = KIND == "edge"
    q_ptr, k_ptr, v_ptr, dout_ptr, dbias_ptr = pointers
    k_desc, v_desc = descriptors
    rows = m_begin + tl.arange(0, TILE.block_m)
    cols = n_begin + tl.arange(0, TILE.block_n)
    i, j = rows[:, None], cols[None, :]
    lower, upper = B.band(sizes, seqlen_q, seqlen_k, MODE)
    key_begin, key_end = B.seen_keys(lower, upper, seqlen_q, seqlen_k, MODE)
    row_begin, row_end = B.seeing_queries(lower, upper, seqlen_q, seqlen_k, MODE)
    head_k = head // sizes.group
    k = P.load_rows(k_ptr, k_desc, strides.k, batch, k_start, seqlen_k, head_k, n_begin, part * TILE.block_d, key_begin,
                    key_end, TILE.headdim, TILE.block_n, TILE.block_d, EDGE, MODE, TILE)
    JOINT: tl.constexpr = TILE.joint and TILE.boxes
    if JOINT:
        v = P.load_rows(v_ptr, v_desc, strides.v, batch, k_start, seqlen_k, head_k, n_begin, 0, key_begin, key_end,
                        TILE.headdim_v, TILE.block_n, TILE.block_dv, EDGE, MODE, TILE)
    if TILE.num_d == 1:
        s = tl.dot(q, tl.trans(k), input_precision=MODE.precision)
    else:
        s = product(q_ptr, strides.q, m_begin, row_begin, row_end, k_ptr, strides.k, n_begin, key_begin, key_end,
                    TILE.headdim, TILE.block_d, TILE.num_d, TILE.block_m, TILE.block_n, MODE)
    s, slack = scores(s, i, j, slope, extras, extra_strides, scalars, batch, head, seqlen_q, seqlen_k, KIND != "full",
                      MODE)
    p = probabilities(s, lse[:, None], log_sum, scalars, MODE)
    if EDGE:
        p = at_most_one(p)
    elif KIND == "cut":
        p = tl.where(B.keep_keys(i, j, lower, upper, seqlen_k, MODE), at_most_one(p), 0.0)
    elif KIND == "banded":
        if cut:
            p = tl.where(B.keep_keys(i, j, lower, upper, seqlen_k, MODE), at_most_one(p), 0.0)
    if TILE.num_dv == 1:
        if not JOINT:
            v = P.load_rows(v_ptr, v_desc, strides.v, batch, k_start, seqlen_k, head_k, n_begin, 0, key_begin, key_end,
                            TILE.headdim_v, TILE.block_n, TILE.block_dv, EDGE, MODE, TILE)
        dp = tl.dot(dout, tl.trans(v), input_precision=MODE.precision)
    else:
        dp = product(dout_ptr, strides.dout, m_begin, row_begin, row_end, v_ptr, strides.v, n_begin, key_begin,
                     key_end, TILE.headdim_v, TILE.block_dv, TILE.num_dv, TILE.block_m, TILE.block_n, MODE)
    if MODE.dropout:
        kept = P.keep_dropout(tl.load(extras.seed), batch + sizes.batch_offset, head, m_begin, n_begin,
                              scalars.max_dropped, TILE.block_m, TILE.block_n, False)
        dp = tl.where(kept, dp * scalars.keep_scale, 0.0)
    ds = p * (dp - delta[:, None])
    if EDGE:
        keep = B.keep_pairs(i, j, lower, upper, seqlen_q, seqlen_k, MODE)
        if MODE.lists:
            keep = P.keep_listed(keep, i, j, extras, extra_strides, batch, head, seqlen_q, seqlen_k, MODE)
            seen = tl.max(keep.to(tl.int32), 0)[:, None] > 0  # 0 * NaN: a key that no row sees may hold anything
            k = tl.where(seen, k, 0.0)
        ds = tl.where(keep, ds, 0.0)
        if MODE.softcap:
            slack = tl.where(keep, slack, 0.0)
    if GRADS.bias == "row":
        row_sum += tl.sum(ds, 1)
    if GRADS.bias == "tile":
        # of an aligned bias the last dimension is a multiple, said so as in load_pairs; 64 bits for the whole tile only
        row = seqlen_k // MODE.bias_align * MODE.bias_align
        first = ((batch.to(tl.int64) * sizes.nheads + head) * seqlen_q + m_begin) * row
        addresses = dbias_ptr + first + (i - m_begin) * row + j
        tl.store(addresses, ds.to(dbias_ptr.dtype.element_ty), mask=(i < seqlen_q) & (j < row) & (part == 0))
    if GRADS.alibi:
        slope_sum -= tl.sum(ds * P.alibi_distance(i, j, seqlen_q, seqlen_k), 1)
    if GRADS.q:
        dq = tl.dot((ds * slack).to(k.dtype), k, dq, input_precision=MODE.precision)
    return dq, row_sum, slope_sum


@triton.jit
def query_gradients_kernel(q_ptr, k_ptr, v_ptr, dout_ptr, row_lse_ptr, log_sum_ptr, delta_ptr, out_ptr, lse_ptr,
                           dlse_ptr, dsink_ptr, dq_ptr, dbias_ptr, dslopes_ptr, k_desc, v_desc, extras, strides,
                           extra_strides, sizes, scalars, MODE: tl.constexpr, TILE: tl.constexpr,
                           GRADS: tl.constexpr):
    """dq of one query block; dbias as tiles of ds or as its row sums; each block's part of the ALiBi slopes' gradient.

    With GRADS.statistics it runs first, since it computes the row statistics on its way: out is read once and dout is
    at hand.

    Grid: query blocks, channel parts, heads and batch in the order of places.py, the last block first.
    """
    num_m_blocks = tl.cdiv(sizes.seqlen_q, TILE.block_m)
    m_block, part, head, batch, q_start, seqlen_q = place(
        extras.cu_seqlens_q, sizes, sizes.seqlen_q, sizes.total_q, sizes.nheads, TILE.num_d, TILE.block_m, True,
        MODE.varlen)
    if MODE.varlen:
        if (m_block < 0) | (m_block * TILE.block_m >= seqlen_q):
            return
    k_start, seqlen_k = P.sequence(extras.cu_seqlens_k, batch, sizes.seqlen_k, MODE.varlen)
    m_begin = m_block * TILE.block_m
    m_end = tl.minimum(m_begin + TILE.block_m, seqlen_q)
    rows = m_begin + tl.arange(0, TILE.block_m)
    q_ptr = P.head_address(q_ptr, strides.q, batch, q_start, head, MODE.align)
    k_ptr = P.head_address(k_ptr, strides.k, batch, k_start, head // sizes.group, MODE.align)
    v_ptr = P.head_address(v_ptr, strides.v, batch, k_start, head // sizes.group, MODE.align)
    dout_ptr = P.head_address(dout_ptr, strides.dout, batch, q_start, head, MODE.align)
    lower, upper = B.band(sizes, seqlen_q, seqlen_k, MODE)
    row_begin, row_end = B.seeing_queries(lower, upper, seqlen_q, seqlen_k, MODE)  # others may hold anything
    q = 0
    dout = 0
    if TILE.num_d == 1:
        q = P.load_tile(q_ptr, strides.q, m_begin, tl.arange(0, TILE.block_d), row_begin, row_end, TILE.headdim,
                        TILE.block_m, TILE.block_d, True, MODE.align)
    if TILE.num_dv == 1:
        dout = P.load_tile(dout_ptr, strides.dout, m_begin, tl.arange(0, TILE.block_dv), row_begin, row_end,
                           TILE.headdim_v, TILE.block_m, TILE.block_dv, True, MODE.align)
    if GRADS.statistics:
        out_ptr = P.head_address(out_ptr, strides.out, batch, q_start, head, MODE.align)
        out = P.load_tile(out_ptr, strides.out, m_begin, tl.arange(0, TILE.block_dv), 0, seqlen_q, TILE.headdim_v,
                          TILE.block_m, TILE.block_dv, True, MODE.align)
        dot = tl.sum(tl.cast(out, tl.float32) * tl.cast(dout, tl.float32), 1)
        lse, log_sum, delta = row_statistics(
            dot, lse_ptr, dlse_ptr, row_lse_ptr, log_sum_ptr, delta_ptr, dsink_ptr, extras, extra_strides, sizes, batch,
            head, q_start, m_block, num_m_blocks, rows, row_begin, seqlen_q, MODE)
    else:
        stats = P.statistic_index(batch, head, q_start, sizes, seqlen_q, row_begin, MODE)
        lse = tl.load(row_lse_ptr + stats + rows, mask=rows < seqlen_q, other=float("inf"))
        log_sum = 0.0
        if MODE.two_parts:
            log_sum = tl.load(log_sum_ptr + stats + rows, mask=rows < seqlen_q, other=0.0)
        delta = tl.load(delta_ptr + stats + rows, mask=rows < seqlen_q, other=0.0)
    if MODE.two_parts:
        log_sum = log_sum[:, None]
    huge = tl.max(tl.where(lse < float("inf"), tl.abs(lse), 0.0)) > P.HUGE
    slope = 0.0
    if MODE.alibi:
        slope = tl.load(extras.alibi_slopes + batch * extra_strides.slopes_batch + head * extra_strides.slopes_head)
    pointers = (q_ptr, k_ptr, v_ptr, dout_ptr, dbias_ptr)
    descriptors = (k_desc, v_desc)
    dq = tl.full([TILE.block_m, TILE.block_d], 0.0, tl.float32)
    row_sum = tl.full([TILE.block_m], 0.0, tl.float32)
    slope_sum = tl.full([TILE.block_m], 0.0, tl.float32)

    key_begin, key_end = B.seen_keys(lower, upper, seqlen_q, seqlen_k, MODE)
    origin = key_begin if TILE.clipped else 0
    reachable = tl.where(m_begin < seqlen_q, tl.maximum(key_end - key_begin, 0) if TILE.clipped else seqlen_k, 0)
    # one loop over all tiles: what a second one needs would not fit in the registers beside a bias
    ONE: tl.constexpr = MODE.band or (TILE.boxes and MODE.bias and not MODE.lists)
    first, full_first, full_last, last = B.key_blocks(m_begin, m_end, lower - origin, upper - origin, reachable,
                                                      TILE.block_n, MODE)
    inner_first, inner_last = first, last
    if not TILE.clipped:
        inner_first, full_first, full_last, inner_last = B.sorted_blocks(
            first, full_first, full_last, last, key_begin, key_end, seqlen_k, TILE.block_n, TILE.boxes and ONE)
    if not ONE:
        if huge:  # all go to the outer tiles, so that the inner ones need no clamp
            inner_last = inner_first
    num_inner = inner_last - inner_first
    num_outer = inner_first - first + last - inner_last
    if MODE.lists:
        list_ptr, num_inner, num_outer = P.block_list(extras.lists, extra_strides.lists, batch, head, m_block,
                                                      m_begin < seqlen_q)
        if huge:
            num_outer += num_inner
            num_inner = 0
    INNER: tl.constexpr = "banded" if ONE else "full"
    EDGES: tl.constexpr = MODE.lists or (MODE.unseen and not TILE.clipped) or not TILE.boxes
    if ONE and not EDGES and not MODE.unseen and (MODE.scale_first or MODE.dropout):
        num_inner = tl.maximum(num_inner, 1)  # which it is: said so, or the assembler waits after every product
    # as in forward.attend
    GUARDED: tl.constexpr = TILE.boxes and MODE.lists and (MODE.scale_first or MODE.dropout)
    if not GUARDED or num_inner > 0:
        for step in tl.range(0, num_inner, num_stages=TILE.stages):
            if MODE.lists:
                n_block = tl.load(list_ptr + step)
            else:
                n_block = inner_first + step
            cut = (n_block < full_first) | (n_block >= full_last) | huge
            dq, row_sum, slope_sum = query_tile(
                dq, row_sum, slope_sum, q, dout, lse, log_sum, delta, pointers, descriptors, strides, extras,
                extra_strides, sizes, scalars, slope, batch, head, k_start, m_begin, origin + n_block * TILE.block_n,
                part, cut, seqlen_q, seqlen_k, INNER, MODE, TILE, GRADS)
    OUTER: tl.constexpr = "edge" if EDGES else "cut"
    if EDGES or not ONE:
        for step in tl.range(0, num_outer, num_stages=TILE.stages if MODE.lists or not TILE.boxes else 1):
            if MODE.lists:
                n_block = tl.load(list_ptr + num_inner + step)
            else:
                n_block = B.around(step, first, inner_first, inner_last)
            dq, row_sum, slope_sum = query_tile(
                dq, row_sum, slope_sum, q, dout, lse, log_sum, delta, pointers, descriptors, strides, extras,
                extra_strides, sizes, scalars, slope, batch, head, k_start, m_begin, n_block * TILE.block_n, part, True,
                seqlen_q, seqlen_k, OUTER, MODE, TILE, GRADS)

    if GRADS.q:
        dq_ptr = P.head_address(dq_ptr, strides.dq, batch, q_start, head, MODE.align)
        channels = part * TILE.block_d + tl.arange(0, TILE.block_d)
        P.store_tile(dq_ptr, strides.dq, dq * scalars.softmax_scale, m_begin, channels, seqlen_q, TILE.headdim,
                     TILE.block_m, MODE.align)
    plane = batch.to(tl.int64) * sizes.nheads + head
    if GRADS.bias == "row":
        tl.store(dbias_ptr + plane * seqlen_q + rows, row_sum, mask=(rows < seqlen_q) & (part == 0))
    if GRADS.alibi:
        if part == 0:
            tl.store(dslopes_ptr + plane * num_m_blocks + m_block, tl.sum(slope_sum))
    if GRADS.early:
        gdc_wait()
