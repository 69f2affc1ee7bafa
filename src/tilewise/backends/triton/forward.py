"""The forward kernel: one program computes BLOCK_M rows of one head's output and their lse, one key tile at a time.

    s = scale q k^T (softcap, bias, ALiBi)    p = exp(s - max)    out = sum p v / sum p    lse = max + ln sum p

The loop over key tiles runs three times over disjoint tiles: full ones without mask arithmetic, those that a band cuts,
and those of which some keys may not even be loaded.
Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018); Dao, "FlashAttention-2" (2023).
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.backends.triton import primitives as P  # noqa: N812


@triton.jit
def forward_tile(acc, row_max, row_sum, q, q_ptr, k_ptr, v_ptr, k_desc, v_desc, strides, extras, extra_strides, sizes,
                 scalars, slope, batch, head, k_start, m_begin, n_begin, v_block, seqlen_q, seqlen_k,
                 KIND: tl.constexpr, SCALE_FIRST: tl.constexpr, MODE: tl.constexpr, TILE: tl.constexpr):
    """Adds the keys [n_begin, n_begin + block_n) to the softmax state of the program's rows.

    KIND is "full", "cut" (pairs are excluded) or "edge" (pairs are excluded, and some keys may not be touched).
    """
    EDGE: tl.constexpr = KIND == "edge"
    rows = m_begin + tl.arange(0, TILE.block_m)
    cols = n_begin + tl.arange(0, TILE.block_n)
    lower, upper = P.band(sizes, seqlen_q, seqlen_k, MODE)
    key_begin, key_end = P.seen_keys(lower, upper, seqlen_q, seqlen_k, MODE)
    channels = tl.arange(0, TILE.block_d)
    v_channels = v_block * TILE.block_dv + tl.arange(0, TILE.block_dv)

    BOXES: tl.constexpr = TILE.boxes and not EDGE
    box_batch = 0 if MODE.varlen else batch
    box_row = k_start.to(tl.int32) + n_begin
    box_head = head // sizes.group
    if TILE.num_d == 1:
        if BOXES:
            k = P.load_box(k_desc, box_batch, box_row, box_head, TILE.block_n, TILE.block_d)
        else:
            k = P.load_tile(k_ptr, strides.k, n_begin, channels, key_begin, key_end, TILE.headdim, TILE.block_n,
                            TILE.block_d, EDGE, MODE.align)
        s = tl.dot(q, tl.trans(k), input_precision=MODE.precision)
    else:
        s = tl.full([TILE.block_m, TILE.block_n], 0.0, tl.float32)
        for part in tl.range(0, TILE.num_d):
            d = part * TILE.block_d + channels
            q_part = P.load_tile(q_ptr, strides.q, m_begin, d, 0, seqlen_q, TILE.headdim, TILE.block_m, TILE.block_d,
                                 True, MODE.align)
            k = P.load_tile(k_ptr, strides.k, n_begin, d, key_begin, key_end, TILE.headdim, TILE.block_n,
                            TILE.block_d, EDGE, MODE.align)
            s = tl.dot(q_part, tl.trans(k), s, input_precision=MODE.precision)
    if BOXES:
        v = P.load_box(v_desc, box_batch, box_row, box_head, TILE.block_n, TILE.block_dv)
    else:
        v = P.load_tile(v_ptr, strides.v, n_begin, v_channels, key_begin, key_end, TILE.headdim_v, TILE.block_n,
                        TILE.block_dv, EDGE, MODE.align)

    if SCALE_FIRST:
        s, _ = P.modify_scores(s, rows[:, None], cols[None, :], slope, extras, extra_strides, scalars, batch, head,
                               seqlen_q, seqlen_k, KIND != "full", MODE)
    if KIND == "cut":
        s = tl.where(P.keep_keys(rows[:, None], cols[None, :], lower, upper, seqlen_k, MODE), s, float("-inf"))
    if EDGE:
        keep = P.keep_pairs(rows[:, None], cols[None, :], lower, upper, seqlen_q, seqlen_k, MODE)
        if MODE.lists:
            keep = P.keep_listed(keep, rows[:, None], cols[None, :], extras, extra_strides, batch, head, seqlen_q,
                                 seqlen_k, MODE)
            seen = tl.max(keep.to(tl.int32), 0) > 0
            v = tl.where(seen[:, None], v, 0.0)  # 0 * NaN: a value that no row sees may hold anything
        s = tl.where(keep, s, float("-inf"))

    p, row_max, row_sum, acc = P.softmax_step(s, row_max, row_sum, acc, scalars.softmax_scale * P.LOG2E, MODE.precise,
                                              not SCALE_FIRST)
    if MODE.dropout:
        seed = tl.load(extras.seed)
        p = tl.where(P.keep_dropout(seed, batch + sizes.batch_offset, head, m_begin, n_begin, scalars.max_dropped,
                                    TILE.block_m, TILE.block_n, False), p, 0.0)
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision=MODE.precision)
    return acc, row_max, row_sum


@triton.jit
def attend(q, q_ptr, k_ptr, v_ptr, k_desc, v_desc, strides, extras, extra_strides, sizes, scalars, slope, batch, head,
           k_start, m_block, v_block, seqlen_q, seqlen_k, SCALE_FIRST: tl.constexpr, MODE: tl.constexpr,
           TILE: tl.constexpr):
    """Softmax state of a block of rows over all its keys; row_max in natural units.

    With SCALE_FIRST where MODE does not ask for it every tile is an edge: this second try is rare, and short code.
    """
    m_begin = m_block * TILE.block_m
    m_end = tl.minimum(m_begin + TILE.block_m, seqlen_q)
    acc = tl.full([TILE.block_m, TILE.block_dv], 0.0, tl.float32)
    row_max = tl.full([TILE.block_m], float("-inf"), tl.float32)
    row_sum = tl.full([TILE.block_m, TILE.sums], 0.0, tl.float32)
    lower, upper = P.band(sizes, seqlen_q, seqlen_k, MODE)
    reachable = tl.where(m_begin < seqlen_q, seqlen_k, 0)
    first, full_first, full_last, last = P.key_blocks(m_begin, m_end, lower, upper, reachable, TILE.block_n, MODE)
    PADDED: tl.constexpr = TILE.boxes and MODE.band and not MODE.varlen
    key_begin, key_end = P.seen_keys(lower, upper, seqlen_q, seqlen_k, MODE)
    inner_first, full_first, full_last, inner_last = P.sorted_blocks(
        first, full_first, full_last, last, key_begin, key_end, seqlen_k, TILE.block_n, PADDED)
    num_full = full_last - full_first
    num_edge = inner_first - first + last - inner_last
    if MODE.lists:
        list_ptr, num_full, num_edge = P.block_list(extras.lists, extra_strides.lists, batch, head, m_block,
                                                    m_begin < seqlen_q)
    AGAIN: tl.constexpr = SCALE_FIRST and not MODE.scale_first
    if AGAIN:
        num_edge = num_edge + num_full if MODE.lists else last - first
        num_full = 0
        inner_last = inner_first
    else:
        for step in tl.range(0, num_full, num_stages=TILE.stages):
            if MODE.lists:
                n_block = tl.load(list_ptr + step)
            else:
                n_block = full_first + step
            acc, row_max, row_sum = forward_tile(
                acc, row_max, row_sum, q, q_ptr, k_ptr, v_ptr, k_desc, v_desc, strides, extras, extra_strides, sizes,
                scalars, slope, batch, head, k_start, m_begin, n_block * TILE.block_n, v_block, seqlen_q, seqlen_k,
                "full", SCALE_FIRST, MODE, TILE)
        if MODE.band:
            num_cut = full_first - inner_first + inner_last - full_last
            for step in tl.range(0, num_cut, num_stages=min(TILE.stages, 2)):
                n_block = P.around(step, inner_first, full_first, full_last)
                acc, row_max, row_sum = forward_tile(
                    acc, row_max, row_sum, q, q_ptr, k_ptr, v_ptr, k_desc, v_desc, strides, extras, extra_strides,
                    sizes, scalars, slope, batch, head, k_start, m_begin, n_block * TILE.block_n, v_block, seqlen_q,
                    seqlen_k, "cut", SCALE_FIRST, MODE, TILE)
    # lists have many edges, otherwise there are two at most
    EDGE_STAGES: tl.constexpr = TILE.stages if (MODE.lists or not TILE.boxes) and not AGAIN else 1
    for step in tl.range(0, num_edge, num_stages=EDGE_STAGES):
        if MODE.lists:
            n_block = tl.load(list_ptr + num_full + step)
        else:
            n_block = P.around(step, first, inner_first, inner_last)
        acc, row_max, row_sum = forward_tile(
            acc, row_max, row_sum, q, q_ptr, k_ptr, v_ptr, k_desc, v_desc, strides, extras, extra_strides, sizes,
            scalars, slope, batch, head, k_start, m_begin, n_block * TILE.block_n, v_block, seqlen_q, seqlen_k, "edge",
            SCALE_FIRST, MODE, TILE)
    if not SCALE_FIRST:
        row_max *= P.LN2
    return acc, row_max, tl.sum(row_sum, 1)


@triton.jit
def finish(acc, row_max, row_sum, sink, PRECISE: tl.constexpr):
    """Output rows and natural-log lse of a finished state; a row without keys gives 0 and -inf, or the sink."""
    total_max = tl.maximum(row_max, sink)
    origin = tl.where(total_max == float("-inf"), 0.0, total_max)
    share = P.exp(row_max - origin, PRECISE)
    row_sum = row_sum * share + P.exp(sink - origin, PRECISE)
    divisor = tl.where(row_sum == 0.0, 1.0, row_sum)
    return acc * (share / divisor)[:, None], origin + tl.log(row_sum)


@triton.jit
def forward_kernel(q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, q_desc, k_desc, v_desc, extras, strides, extra_strides, sizes,
                   scalars, MODE: tl.constexpr, TILE: tl.constexpr):
    """Grid: (row blocks, head-dimension blocks of v, heads, batch) in one dimension, row blocks fastest.

    Blocks of one head run together, so its keys stay in the L2 cache; under a causal band the longest rows start first.
    """
    num_m_blocks = tl.cdiv(sizes.seqlen_q, TILE.block_m)
    program = tl.program_id(0)
    m_block = num_m_blocks - 1 - program % num_m_blocks
    program = program // num_m_blocks
    v_block = program % TILE.num_dv
    program = program // TILE.num_dv
    head = program % sizes.nheads
    batch = program // sizes.nheads

    q_start, seqlen_q = P.sequence(extras.cu_seqlens_q, batch, sizes.seqlen_q, MODE.varlen)
    k_start, seqlen_k = P.sequence(extras.cu_seqlens_k, batch, sizes.seqlen_k, MODE.varlen)
    m_begin = m_block * TILE.block_m
    q_ptr = P.head_address(q_ptr, strides.q, batch, q_start, head, MODE.align)
    k_ptr = P.head_address(k_ptr, strides.k, batch, k_start, head // sizes.group, MODE.align)
    v_ptr = P.head_address(v_ptr, strides.v, batch, k_start, head // sizes.group, MODE.align)
    rows = m_begin + tl.arange(0, TILE.block_m)
    q = 0
    if TILE.boxes:  # this way q becomes an operand in registers; rows past the end reach no result
        q = P.load_box(q_desc, 0 if MODE.varlen else batch, q_start.to(tl.int32) + m_begin, head, TILE.block_m,
                                                                       TILE.block_d)
    elif TILE.num_d == 1:
        q = P.load_tile(q_ptr, strides.q, m_begin, tl.arange(0, TILE.block_d), 0, seqlen_q, TILE.headdim, TILE.block_m,
                        TILE.block_d, True, MODE.align)
    slope = 0.0
    if MODE.alibi:
        slope = tl.load(extras.alibi_slopes + batch * extra_strides.slopes_batch + head * extra_strides.slopes_head)

    acc, row_max, row_sum = attend(
        q, q_ptr, k_ptr, v_ptr, k_desc, v_desc, strides, extras, extra_strides, sizes, scalars, slope, batch, head,
        k_start,
        m_block, v_block, seqlen_q, seqlen_k, MODE.scale_first, MODE, TILE)
    if not MODE.scale_first:
        size = tl.max(tl.where(row_max == float("-inf"), 0.0, tl.abs(row_max)))
        if size * P.LOG2E > P.EXACT_LIMIT:
            acc, row_max, row_sum = attend(
                q, q_ptr, k_ptr, v_ptr, k_desc, v_desc, strides, extras, extra_strides, sizes, scalars, slope, batch,
                head,
                k_start, m_block, v_block, seqlen_q, seqlen_k, True, MODE, TILE)

    sink = float("-inf")
    if MODE.sink:
        sink = tl.load(extras.sink + batch * extra_strides.sink_batch + head * extra_strides.sink_head)
    out, lse = finish(acc, row_max, row_sum, sink, MODE.precise)
    if MODE.dropout:
        out *= scalars.keep_scale
    out_ptr = P.head_address(out_ptr, strides.out, batch, q_start, head, MODE.align)
    v_channels = v_block * TILE.block_dv + tl.arange(0, TILE.block_dv)
    P.store_tile(out_ptr, strides.out, out, m_begin, v_channels, seqlen_q, TILE.headdim_v, TILE.block_m, MODE.align)
    lse_ptr += P.row_index(batch, head, q_start, sizes, seqlen_q, MODE.varlen)
    tl.store(lse_ptr + rows, lse, mask=rows < seqlen_q)
