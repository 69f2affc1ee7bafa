"""dk and dv: a program owns a block of keys and works on transposed tiles (keys, queries).

So p^T and ds^T are ready in registers as left operands. See backward_parts.py for the formulas.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tilewise.backends.triton import bands as B  # noqa: N812
from tilewise.backends.triton import primitives as P  # noqa: N812
from tilewise.backends.triton.backward_parts import at_most_one, probabilities, product, scores
from tilewise.backends.triton.places import place


@triton.jit
def key_tile(dk, dv, ds_sum, k, v, pointers, descriptors, strides, extras, extra_strides, sizes, scalars, slope, batch,
             head, q_start, stats, m_begin, n_begin, part, cut, seqlen_q, seqlen_k, KIND: tl.constexpr,
             MODE: tl.constexpr, TILE: tl.constexpr, GRADS: tl.constexpr):
    """Adds what the queries [m_begin, m_begin + block_m) send to the program's keys. Tiles are (keys, queries).

    KIND is as for forward.score_tile; rows past the last have an lse that makes p 0, and keys past the last reach only
    their own gradients, so that a tile at the end needs no mask.
    """
    EDGE: tl.constexpr = KIND == "edge"
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, log_sum_ptr, delta_ptr = pointers
    q_desc, dout_desc, lse_desc, log_sum_desc, delta_desc = descriptors
    rows = m_begin + tl.arange(0, TILE.block_m)
    cols = n_begin + tl.arange(0, TILE.block_n)
    i, j = rows[None, :], cols[:, None]
    lower, upper = B.band(sizes, seqlen_q, seqlen_k, MODE)
    row_begin, row_end = B.seeing_queries(lower, upper, seqlen_q, seqlen_k, MODE)
    key_begin, key_end = B.seen_keys(lower, upper, seqlen_q, seqlen_k, MODE)
    q = P.load_rows(q_ptr, q_desc, strides.q, batch, q_start, seqlen_q, head, m_begin, part % TILE.num_d * TILE.block_d,
                    row_begin, row_end, TILE.headdim, TILE.block_m, TILE.block_d, EDGE, MODE, TILE)
    log_sum = 0.0
    BOXED: tl.constexpr = TILE.boxes and not EDGE
    # what is loaded before the first product takes registers through it, which then spill; a delta that the end of the
    # band cuts off is cut off together with p, and loaded with lse
    WHOLE: tl.constexpr = not (TILE.clipped or MODE.lists)
    ALONE: tl.constexpr = not (GRADS.k or GRADS.bias == "col" or MODE.lists)
    LATE_LSE: tl.constexpr = BOXED and (MODE.two_parts or (MODE.dropout and (WHOLE or ALONE)))
    COSTLY: tl.constexpr = MODE.bias != MODE.dropout and (MODE.dropout or MODE.lower) and WHOLE
    LATE_DELTA: tl.constexpr = BOXED and ((TILE.held and not MODE.band) or COSTLY)
    if BOXED:  # Triton would repeat a plain load of so short a vector sixteen times a thread
        if not LATE_LSE:
            lse = lse_desc.load([stats.to(tl.int32) + m_begin])[None, :]
        if not LATE_DELTA:
            delta = delta_desc.load([stats.to(tl.int32) + m_begin])[None, :]
    else:
        lse = tl.load(lse_ptr + stats + rows, mask=rows < seqlen_q, other=float("inf"))[None, :]
        delta = tl.load(delta_ptr + stats + rows, mask=rows < seqlen_q, other=0.0)[None, :]
        if MODE.two_parts:
            log_sum = tl.load(log_sum_ptr + stats + rows, mask=rows < seqlen_q, other=0.0)[None, :]
    v_first = part % TILE.num_dv * TILE.block_dv
    JOINT: tl.constexpr = TILE.joint and TILE.boxes
    if JOINT:
        dout = P.load_rows(dout_ptr, dout_desc, strides.dout, batch, q_start, seqlen_q, head, m_begin, v_first,
                           row_begin, row_end, TILE.headdim_v, TILE.block_m, TILE.block_dv, EDGE, MODE, TILE)
    if TILE.num_d == 1:
        s = tl.dot(k, tl.trans(q), input_precision=MODE.precision)
    else:
        s = product(k_ptr, strides.k, n_begin, key_begin, key_end, q_ptr, strides.q, m_begin, row_begin, row_end,
                    TILE.headdim, TILE.block_d, TILE.num_d, TILE.block_n, TILE.block_m, MODE)
    # a key past the last one needs no mask, but its bias may not be read
    s, slack = scores(s, i, j, slope, extras, extra_strides, scalars, batch, head, seqlen_q, seqlen_k, True, MODE)
    if LATE_LSE:
        lse = lse_desc.load([stats.to(tl.int32) + m_begin])[None, :]
        if MODE.two_parts:
            log_sum = log_sum_desc.load([stats.to(tl.int32) + m_begin])[None, :]
    p = at_most_one(probabilities(s, lse, log_sum, scalars, MODE))
    if KIND == "banded":
        if cut:
            if TILE.clipped and not MODE.varlen:
                keep = B.keep_queries(i, j, lower, upper, row_end, MODE)
            else:
                keep = B.keep_band(i, j, lower, upper, MODE)
                if TILE.clipped:  # for packed sequences the other form takes more registers
                    keep &= i < row_end
            if TILE.clipped:  # past the end lies another head's lse
                delta = tl.where(i < row_end, delta, 0.0)
            p = tl.where(keep, p, 0.0)
    if not JOINT:
        dout = P.load_rows(dout_ptr, dout_desc, strides.dout, batch, q_start, seqlen_q, head, m_begin, v_first,
                           row_begin, row_end, TILE.headdim_v, TILE.block_m, TILE.block_dv, EDGE, MODE, TILE)
    if EDGE:
        keep = B.keep_pairs(i, j, lower, upper, seqlen_q, seqlen_k, MODE)
        if MODE.lists:
            keep = P.keep_listed(keep, i, j, extras, extra_strides, batch, head, seqlen_q, seqlen_k, MODE)
            seeing = tl.max(keep.to(tl.int32), 0)[:, None] > 0  # 0 * NaN: rows that see nothing may hold anything
            q = tl.where(seeing, q, 0.0)
            dout = tl.where(seeing, dout, 0.0)
        p = tl.where(keep, p, 0.0)
        if MODE.softcap:
            slack = tl.where(keep, slack, 0.0)
    steep = p * slack  # now: through the next product one number for each pair costs fewer registers than two
    p_kept = p
    if MODE.dropout:
        kept = P.keep_dropout(tl.load(extras.seed), batch + sizes.batch_offset, head, m_begin, n_begin,
                              scalars.max_dropped, TILE.block_m, TILE.block_n, True)
        p_kept = tl.where(kept, p, 0.0)
    if GRADS.v:
        dv = tl.dot(p_kept.to(dout.dtype), dout, dv, input_precision=MODE.precision)
    if GRADS.k or GRADS.bias == "col":
        if TILE.num_dv == 1:
            dp = tl.dot(v, tl.trans(dout), input_precision=MODE.precision)
        else:
            dp = product(v_ptr, strides.v, n_begin, key_begin, key_end, dout_ptr, strides.dout, m_begin, row_begin,
                         row_end, TILE.headdim_v, TILE.block_dv, TILE.num_dv, TILE.block_n, TILE.block_m, MODE)
        if MODE.dropout:
            dp = tl.where(kept, dp * scalars.keep_scale, 0.0)
        if LATE_DELTA:
            delta = delta_desc.load([stats.to(tl.int32) + m_begin])[None, :]
        grown = dp - delta
        if EDGE:
            grown = tl.where(keep, grown, 0.0)
        if GRADS.bias == "col":
            ds_sum += tl.sum(p * grown, 1)
        if GRADS.k:
            dk = tl.dot((steep * grown).to(q.dtype), q, dk, input_precision=MODE.precision)
    return dk, dv, ds_sum


@triton.jit
def key_gradients_kernel(q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, log_sum_ptr, delta_ptr, dk_ptr, dv_ptr, dbias_ptr,
                         q_desc, dout_desc, lse_desc, log_sum_desc, delta_desc, k_desc, extras, strides, extra_strides,
                         sizes, scalars, MODE: tl.constexpr, TILE: tl.constexpr, GRADS: tl.constexpr):
    """dk and dv of one key block, summed over the query heads that share it; column sums of ds if GRADS.bias is "col".

    Where k and v have different numbers of channel parts, the fewer are computed more than once, to the same bits.

    Grid: key blocks, channel parts, key heads and batch in the order of places.py; the first see most queries.
    """
    if GRADS.leads:
        gdc_launch_dependents()
    PARTS: tl.constexpr = TILE.num_d if TILE.num_d > TILE.num_dv else TILE.num_dv
    n_block, part, head_k, batch, k_start, seqlen_k = place(
        extras.cu_seqlens_k, sizes, sizes.seqlen_k, sizes.total_k, sizes.nheads // sizes.group, PARTS, TILE.block_n,
        False, MODE.varlen)
    if MODE.varlen:
        if n_block * TILE.block_n >= seqlen_k:
            return
    q_start, seqlen_q = P.sequence(extras.cu_seqlens_q, batch, sizes.seqlen_q, MODE.varlen)
    n_begin = n_block * TILE.block_n
    n_end = tl.minimum(n_begin + TILE.block_n, seqlen_k)
    cols = n_begin + tl.arange(0, TILE.block_n)
    k_ptr = P.head_address(k_ptr, strides.k, batch, k_start, head_k, MODE.align)
    v_ptr = P.head_address(v_ptr, strides.v, batch, k_start, head_k, MODE.align)
    lower, upper = B.band(sizes, seqlen_q, seqlen_k, MODE)
    key_begin, key_end = B.seen_keys(lower, upper, seqlen_q, seqlen_k, MODE)  # others may hold anything: read as zeros
    k = 0
    v = 0
    if TILE.held:  # this way k becomes an operand in registers, as the forward's q
        k = P.load_box(k_desc, batch, k_start, seqlen_k, n_begin, head_k, TILE.block_n, TILE.block_d, MODE.varlen)
    elif TILE.num_d == 1:
        k = P.load_tile(k_ptr, strides.k, n_begin, tl.arange(0, TILE.block_d), key_begin, key_end, TILE.headdim,
                        TILE.block_n, TILE.block_d, True, MODE.align)
    if TILE.num_dv == 1:
        v = P.load_tile(v_ptr, strides.v, n_begin, tl.arange(0, TILE.block_dv), key_begin, key_end, TILE.headdim_v,
                        TILE.block_n, TILE.block_dv, True, MODE.align)
    dk = tl.full([TILE.block_n, TILE.block_d], 0.0, tl.float32)
    dv = tl.full([TILE.block_n, TILE.block_dv], 0.0, tl.float32)

    row_begin, row_end = B.seeing_queries(lower, upper, seqlen_q, seqlen_k, MODE)
    origin = row_begin if TILE.clipped else 0
    seeing = tl.maximum(row_end - row_begin, 0) if TILE.clipped else seqlen_q
    reachable = tl.where(n_begin < seqlen_k, seeing, 0)
    first, full_first, full_last, last = B.query_blocks(n_begin, n_end, lower + origin, upper + origin, reachable,
                                                        TILE.block_m, MODE)
    inner_first, inner_last = first, last
    if TILE.clipped:
        full_last = tl.minimum(full_last, seeing // TILE.block_m)
        first_row = origin + first * TILE.block_m
        full_begin = origin + full_first * TILE.block_m
        full_end = origin + full_last * TILE.block_m
    else:
        inner_first, full_first, full_last, inner_last = B.sorted_blocks(
            first, full_first, full_last, last, row_begin, row_end, seqlen_q, TILE.block_m, TILE.boxes)
    num_inner = inner_last - inner_first
    num_outer = inner_first - first + last - inner_last
    INNER: tl.constexpr = "banded" if MODE.band else "full"
    EDGES: tl.constexpr = MODE.lists or (MODE.unseen and not TILE.clipped) or not TILE.boxes
    # what edges need and all heads share, Triton computes before the loop over heads: in one of their own, it does not
    # take registers through the loop over inner tiles
    SWEEPS: tl.constexpr = 2 if MODE.lists and GRADS.bias != "col" else 1  # each head has one sum of a column
    for sweep in tl.static_range(SWEEPS):
        for sharer in tl.range(0, sizes.group):
            head = head_k * sizes.group + sharer
            q_head = P.head_address(q_ptr, strides.q, batch, q_start, head, MODE.align)
            dout_head = P.head_address(dout_ptr, strides.dout, batch, q_start, head, MODE.align)
            stats = P.statistic_index(batch, head, q_start, sizes, seqlen_q, row_begin, MODE)
            pointers = (q_head, k_ptr, v_ptr, dout_head, lse_ptr, log_sum_ptr, delta_ptr)
            descriptors = (q_desc, dout_desc, lse_desc, log_sum_desc, delta_desc)
            slope = 0.0
            if MODE.alibi:
                slope = tl.load(
                    extras.alibi_slopes + batch * extra_strides.slopes_batch + head * extra_strides.slopes_head)
            ds_sum = tl.full([TILE.block_n], 0.0, tl.float32)
            if MODE.lists:
                list_ptr, num_inner, num_outer = P.block_list(extras.lists, extra_strides.lists, batch, head, n_block,
                                                              n_begin < seqlen_k)
            if sweep == 0:
                for step in tl.range(0, num_inner, num_stages=TILE.stages):
                    if MODE.lists:
                        m_block = tl.load(list_ptr + step)
                    else:
                        m_block = inner_first + step
                    cut = (m_block < full_first) | (m_block >= full_last)
                    m_begin = m_block * TILE.block_m
                    if TILE.clipped:
                        m_begin = first_row + step * TILE.block_m
                        cut = (m_begin < full_begin) | (m_begin >= full_end)
                    dk, dv, ds_sum = key_tile(
                        dk, dv, ds_sum, k, v, pointers, descriptors, strides, extras, extra_strides, sizes, scalars,
                        slope, batch, head, q_start, stats, m_begin, n_begin, part, cut, seqlen_q, seqlen_k, INNER,
                        MODE, TILE, GRADS)
            if EDGES and sweep == SWEEPS - 1:
                for step in tl.range(0, num_outer, num_stages=TILE.stages if MODE.lists or not TILE.boxes else 1):
                    if MODE.lists:
                        m_block = tl.load(list_ptr + num_inner + step)
                    else:
                        m_block = B.around(step, first, inner_first, inner_last)
                    dk, dv, ds_sum = key_tile(
                        dk, dv, ds_sum, k, v, pointers, descriptors, strides, extras, extra_strides, sizes, scalars,
                        slope, batch, head, q_start, stats, m_block * TILE.block_m, n_begin, part, True, seqlen_q,
                        seqlen_k, "edge", MODE, TILE, GRADS)
            if GRADS.bias == "col":
                row = (batch.to(tl.int64) * sizes.nheads + head) * sizes.seqlen_k
                tl.store(dbias_ptr + row + cols, ds_sum, mask=(cols < seqlen_k) & (part == 0))

    if GRADS.k:
        dk_ptr = P.head_address(dk_ptr, strides.dk, batch, k_start, head_k, MODE.align)
        channels = part % TILE.num_d * TILE.block_d + tl.arange(0, TILE.block_d)
        P.store_tile(dk_ptr, strides.dk, dk * scalars.softmax_scale, n_begin, channels, seqlen_k, TILE.headdim,
                     TILE.block_n, MODE.align)
    if GRADS.v:
        if MODE.dropout:
            dv *= scalars.keep_scale
        dv_ptr = P.head_address(dv_ptr, strides.dv, batch, k_start, head_k, MODE.align)
        v_channels = part % TILE.num_dv * TILE.block_dv + tl.arange(0, TILE.block_dv)
        P.store_tile(dv_ptr, strides.dv, dv, n_begin, v_channels, seqlen_k, TILE.headdim_v, TILE.block_n, MODE.align)
    if GRADS.early:
        gdc_wait()
