"""The backward: delta first, then two kernels that own their outputs: no atomics, every run gives equal bits.

    p = exp(s - lse)      dp = dout v^T      ds = p (dp - delta)      delta = rowsum(dout out) - dlse
    dv = p^T dout         dk = scale ds^T q         dq = scale ds k       dbias = ds       dslope = -sum ds |distance|

``key_gradients_kernel`` owns a block of keys and works on transposed tiles (keys, queries),
so that p^T and ds^T are ready
in registers as left operands; ``query_gradients_kernel`` owns a block of queries. Dao, "FlashAttention-2" (2023).
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.backends.triton import primitives as P  # noqa: N812


@triton.jit
def delta_kernel(out_ptr, dout_ptr, lse_ptr, dlse_ptr, row_lse_ptr, delta_ptr, dsink_ptr, extras, strides,
                 extra_strides, sizes, MODE: tl.constexpr, TILE: tl.constexpr):
    """delta = rowsum(dout out) - dlse, and lse with +inf for the -inf of a row that sees no key, which makes p 0.

    With a sink also each block's part of dsink = -sum exp(sink - lse) delta.

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
    stats = P.row_index(batch, head, start, sizes, seqlen_q, MODE.varlen)

    m_begin = m_block * TILE.block_m
    rows = m_begin + tl.arange(0, TILE.block_m)
    delta = tl.full([TILE.block_m], 0.0, tl.float32)
    for part in tl.range(0, TILE.num_dv):
        cols = part * TILE.block_dv + tl.arange(0, TILE.block_dv)
        out = P.load_tile(out_ptr, strides.out, m_begin, cols, 0, seqlen_q, TILE.headdim_v, TILE.block_m,
                          TILE.block_dv, True, MODE.align)
        dout = P.load_tile(dout_ptr, strides.dout, m_begin, cols, 0, seqlen_q, TILE.headdim_v, TILE.block_m,
                           TILE.block_dv, True, MODE.align)
        delta += tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + stats + rows, mask=rows < seqlen_q, other=0.0)
    lse = tl.load(lse_ptr + stats + rows, mask=rows < seqlen_q, other=float("inf"))
    own = P.statistic_index(batch, head, start, sizes, seqlen_q, MODE.varlen) + rows
    tl.store(delta_ptr + own, delta, mask=rows < seqlen_q)
    tl.store(row_lse_ptr + own, tl.where(lse == float("-inf"), float("inf"), lse), mask=rows < seqlen_q)
    if dsink_ptr is not None:
        sink = tl.load(extras.sink + batch * extra_strides.sink_batch + head * extra_strides.sink_head)
        weight = tl.exp2((sink - lse) * P.LOG2E)
        total = tl.sum(tl.where(rows < seqlen_q, weight * delta, 0.0))
        tl.store(dsink_ptr + program, tl.where(sink == float("-inf"), 0.0, -total))  # -inf - -inf is no weight


@triton.jit
def probabilities(s, lse, i, j, slope, extras, strides, scalars, batch, head, seqlen_q, seqlen_k, MASKED: tl.constexpr,
                  MODE: tl.constexpr):
    """p and the softcap's derivative from raw products and lse, which is +inf on rows that see nothing: p is 0."""
    slack = 1.0
    if MODE.scale_first:
        s, slack = P.modify_scores(s, i, j, slope, extras, strides, scalars, batch, head, seqlen_q, seqlen_k, MASKED,
                                   MODE)
        p = P.exp(s - lse, MODE.precise)
    else:
        p = tl.exp2(s * (scalars.softmax_scale * P.LOG2E) - lse * P.LOG2E)
    return p, slack


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


@triton.jit
def key_tile(dk, dv, ds_sum, k, v, pointers, descriptors, strides, extras, extra_strides, sizes, scalars, slope, batch,
             head, q_start, stats, m_begin, n_begin, part, seqlen_q, seqlen_k, MASKED: tl.constexpr, MODE: tl.constexpr,
             TILE: tl.constexpr, GRADS: tl.constexpr):
    """Adds what the queries [m_begin, m_begin + block_m) send to the program's keys. Tiles are (keys, queries)."""
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr = pointers
    q_desc, dout_desc, lse_desc, delta_desc = descriptors
    rows = m_begin + tl.arange(0, TILE.block_m)
    cols = n_begin + tl.arange(0, TILE.block_n)
    i, j = rows[None, :], cols[:, None]
    lower, upper = P.band(sizes, seqlen_q, seqlen_k, MODE)
    row_begin, row_end = P.seeing_queries(lower, upper, seqlen_q, seqlen_k, MODE)
    channels = part % TILE.num_d * TILE.block_d + tl.arange(0, TILE.block_d)
    v_channels = part % TILE.num_dv * TILE.block_dv + tl.arange(0, TILE.block_dv)
    BOXES: tl.constexpr = TILE.boxes and not MASKED
    box_batch = 0 if MODE.varlen else batch
    box_row = q_start.to(tl.int32) + m_begin
    if BOXES:  # the statistics too: Triton would repeat a plain load of so short a vector sixteen times a thread
        q = P.load_box(q_desc, box_batch, box_row, head, TILE.block_m, TILE.block_d)
        lse = lse_desc.load([stats.to(tl.int32) + m_begin])[None, :]
        delta = delta_desc.load([stats.to(tl.int32) + m_begin])[None, :]
    else:
        lse = tl.load(lse_ptr + stats + rows, mask=rows < seqlen_q, other=float("inf"))[None, :]
        delta = tl.load(delta_ptr + stats + rows, mask=rows < seqlen_q, other=0.0)[None, :]
        q = P.load_tile(q_ptr, strides.q, m_begin, channels, row_begin, row_end, TILE.headdim, TILE.block_m,
                        TILE.block_d, MASKED, MODE.align)
    if TILE.num_d == 1:
        s = tl.dot(k, tl.trans(q), input_precision=MODE.precision)
    else:
        s = product(k_ptr, strides.k, n_begin, 0, seqlen_k, q_ptr, strides.q, m_begin, row_begin, row_end, TILE.headdim,
                    TILE.block_d, TILE.num_d, TILE.block_n, TILE.block_m, MODE)
    # a key past the last one needs no mask, but its bias may not be read
    p, slack = probabilities(s, lse, i, j, slope, extras, extra_strides, scalars, batch, head, seqlen_q, seqlen_k,
                             True, MODE)
    if BOXES:
        dout = P.load_box(dout_desc, box_batch, box_row, head, TILE.block_m, TILE.block_dv)
    else:
        dout = P.load_tile(dout_ptr, strides.dout, m_begin, v_channels, row_begin, row_end, TILE.headdim_v,
                           TILE.block_m, TILE.block_dv, MASKED, MODE.align)
    if MASKED:
        keep = P.keep_pairs(i, j, lower, upper, seqlen_q, seqlen_k, MODE)
        if MODE.lists:
            keep = P.keep_listed(keep, i, j, extras, extra_strides, batch, head, seqlen_q, seqlen_k, MODE)
            seeing = tl.max(keep.to(tl.int32), 0)[:, None] > 0  # 0 * NaN: rows that see nothing may hold anything
            q = tl.where(seeing, q, 0.0)
            dout = tl.where(seeing, dout, 0.0)
        p = tl.where(keep, p, 0.0)
        if MODE.softcap:
            slack = tl.where(keep, slack, 0.0)
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
            dp = product(v_ptr, strides.v, n_begin, 0, seqlen_k, dout_ptr, strides.dout, m_begin, row_begin, row_end,
                         TILE.headdim_v, TILE.block_dv, TILE.num_dv, TILE.block_n, TILE.block_m, MODE)
        if MODE.dropout:
            dp = tl.where(kept, dp * scalars.keep_scale, 0.0)
        ds = p * (dp - delta)
        if MASKED:
            ds = tl.where(keep, ds, 0.0)
        if GRADS.bias == "col":
            ds_sum += tl.sum(ds, 1)
        if GRADS.k:
            dk = tl.dot((ds * slack).to(q.dtype), q, dk, input_precision=MODE.precision)
    return dk, dv, ds_sum


@triton.jit
def key_gradients_kernel(q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, dbias_ptr, q_desc,
                         dout_desc, lse_desc, delta_desc, extras, strides, extra_strides, sizes, scalars,
                         MODE: tl.constexpr, TILE: tl.constexpr, GRADS: tl.constexpr):
    """dk and dv of one key block, summed over the query heads that share it; column sums of ds if GRADS.bias is "col".

    Where k and v have different numbers of channel parts, the fewer are computed more than once, to the same bits.

    Grid: (key blocks, channel parts, key heads, batch) in one dimension,
    key blocks fastest: the first see most queries.
    """
    PARTS: tl.constexpr = TILE.num_d if TILE.num_d > TILE.num_dv else TILE.num_dv
    num_n_blocks = tl.cdiv(sizes.seqlen_k, TILE.block_n)
    nheads_k = sizes.nheads // sizes.group
    program = tl.program_id(0)
    n_block = program % num_n_blocks
    program = program // num_n_blocks
    part = program % PARTS
    program = program // PARTS
    head_k = program % nheads_k
    batch = program // nheads_k

    q_start, seqlen_q = P.sequence(extras.cu_seqlens_q, batch, sizes.seqlen_q, MODE.varlen)
    k_start, seqlen_k = P.sequence(extras.cu_seqlens_k, batch, sizes.seqlen_k, MODE.varlen)
    n_begin = n_block * TILE.block_n
    n_end = tl.minimum(n_begin + TILE.block_n, seqlen_k)
    cols = n_begin + tl.arange(0, TILE.block_n)
    k_ptr = P.head_address(k_ptr, strides.k, batch, k_start, head_k, MODE.align)
    v_ptr = P.head_address(v_ptr, strides.v, batch, k_start, head_k, MODE.align)
    k = 0
    v = 0
    if TILE.num_d == 1:
        k = P.load_tile(k_ptr, strides.k, n_begin, tl.arange(0, TILE.block_d), 0, seqlen_k, TILE.headdim, TILE.block_n,
                        TILE.block_d, True, MODE.align)
    if TILE.num_dv == 1:
        v = P.load_tile(v_ptr, strides.v, n_begin, tl.arange(0, TILE.block_dv), 0, seqlen_k, TILE.headdim_v,
                        TILE.block_n, TILE.block_dv, True, MODE.align)
    dk = tl.full([TILE.block_n, TILE.block_d], 0.0, tl.float32)
    dv = tl.full([TILE.block_n, TILE.block_dv], 0.0, tl.float32)

    lower, upper = P.band(sizes, seqlen_q, seqlen_k, MODE)
    reachable = tl.where(n_begin < seqlen_k, seqlen_q, 0)
    first, full_first, full_last, last = P.query_blocks(n_begin, n_end, lower, upper, reachable, TILE.block_m, MODE)
    num_left = full_first - first
    num_full = full_last - full_first
    num_masked = num_left + last - full_last
    MASKED_STAGES: tl.constexpr = TILE.stages if MODE.lists or not TILE.boxes else 1  # a band has one or two such tiles
    for sharer in tl.range(0, sizes.group):
        head = head_k * sizes.group + sharer
        q_head = P.head_address(q_ptr, strides.q, batch, q_start, head, MODE.align)
        dout_head = P.head_address(dout_ptr, strides.dout, batch, q_start, head, MODE.align)
        stats = P.statistic_index(batch, head, q_start, sizes, seqlen_q, MODE.varlen)
        pointers = (q_head, k_ptr, v_ptr, dout_head, lse_ptr, delta_ptr)
        descriptors = (q_desc, dout_desc, lse_desc, delta_desc)
        slope = 0.0
        if MODE.alibi:
            slope = tl.load(extras.alibi_slopes + batch * extra_strides.slopes_batch + head * extra_strides.slopes_head)
        ds_sum = tl.full([TILE.block_n], 0.0, tl.float32)
        if MODE.lists:
            list_ptr, num_full, num_masked = P.block_list(extras.lists, extra_strides.lists, batch, head, n_block,
                                                          n_begin < seqlen_k)
        for step in tl.range(0, num_full, num_stages=TILE.stages):
            if MODE.lists:
                m_block = tl.load(list_ptr + step)
            else:
                m_block = full_first + step
            dk, dv, ds_sum = key_tile(
                dk, dv, ds_sum, k, v, pointers, descriptors, strides, extras, extra_strides, sizes, scalars, slope,
                batch, head, q_start, stats, m_block * TILE.block_m, n_begin, part, seqlen_q, seqlen_k, False, MODE,
                TILE, GRADS)
        for step in tl.range(0, num_masked, num_stages=MASKED_STAGES):
            if MODE.lists:
                m_block = tl.load(list_ptr + num_full + step)
            else:
                m_block = tl.where(step < num_left, first + step, full_last + step - num_left)
            dk, dv, ds_sum = key_tile(
                dk, dv, ds_sum, k, v, pointers, descriptors, strides, extras, extra_strides, sizes, scalars, slope,
                batch, head, q_start, stats, m_block * TILE.block_m, n_begin, part, seqlen_q, seqlen_k, True, MODE,
                TILE, GRADS)
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


@triton.jit
def query_tile(dq, row_sum, slope_sum, q, dout, lse, delta, pointers, descriptors, strides, extras, extra_strides,
               sizes, scalars, slope, batch, head, k_start, m_begin, n_begin, part, seqlen_q, seqlen_k,
               MASKED: tl.constexpr, MODE: tl.constexpr, TILE: tl.constexpr, GRADS: tl.constexpr):
    """Adds what the keys [n_begin, n_begin + block_n) send to the program's queries. Tiles are (queries, keys)."""
    q_ptr, k_ptr, v_ptr, dout_ptr, dbias_ptr = pointers
    k_desc, v_desc = descriptors
    rows = m_begin + tl.arange(0, TILE.block_m)
    cols = n_begin + tl.arange(0, TILE.block_n)
    i, j = rows[:, None], cols[None, :]
    lower, upper = P.band(sizes, seqlen_q, seqlen_k, MODE)
    key_begin, key_end = P.seen_keys(lower, upper, seqlen_q, seqlen_k, MODE)
    channels = part * TILE.block_d + tl.arange(0, TILE.block_d)

    BOXES: tl.constexpr = TILE.boxes and not MASKED
    box_batch = 0 if MODE.varlen else batch
    box_row = k_start.to(tl.int32) + n_begin
    box_head = head // sizes.group
    if BOXES:
        k = P.load_box(k_desc, box_batch, box_row, box_head, TILE.block_n, TILE.block_d)
    else:
        k = P.load_tile(k_ptr, strides.k, n_begin, channels, key_begin, key_end, TILE.headdim, TILE.block_n,
                        TILE.block_d, MASKED, MODE.align)
    if TILE.num_d == 1:
        s = tl.dot(q, tl.trans(k), input_precision=MODE.precision)
    else:
        s = product(q_ptr, strides.q, m_begin, 0, seqlen_q, k_ptr, strides.k, n_begin, key_begin, key_end, TILE.headdim,
                    TILE.block_d, TILE.num_d, TILE.block_m, TILE.block_n, MODE)
    p, slack = probabilities(s, lse[:, None], i, j, slope, extras, extra_strides, scalars, batch, head, seqlen_q,
                             seqlen_k, MASKED, MODE)
    if TILE.num_dv == 1:
        if BOXES:
            v = P.load_box(v_desc, box_batch, box_row, box_head, TILE.block_n, TILE.block_dv)
        else:
            v = P.load_tile(v_ptr, strides.v, n_begin, tl.arange(0, TILE.block_dv), key_begin, key_end, TILE.headdim_v,
                            TILE.block_n, TILE.block_dv, MASKED, MODE.align)
        dp = tl.dot(dout, tl.trans(v), input_precision=MODE.precision)
    else:
        dp = product(dout_ptr, strides.dout, m_begin, 0, seqlen_q, v_ptr, strides.v, n_begin, key_begin, key_end,
                     TILE.headdim_v, TILE.block_dv, TILE.num_dv, TILE.block_m, TILE.block_n, MODE)
    if MODE.dropout:
        kept = P.keep_dropout(tl.load(extras.seed), batch + sizes.batch_offset, head, m_begin, n_begin,
                              scalars.max_dropped, TILE.block_m, TILE.block_n, False)
        dp = tl.where(kept, dp * scalars.keep_scale, 0.0)
    ds = p * (dp - delta[:, None])
    if MASKED:
        keep = P.keep_pairs(i, j, lower, upper, seqlen_q, seqlen_k, MODE)
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
        plane = (batch.to(tl.int64) * sizes.nheads + head) * seqlen_q
        addresses = dbias_ptr + (plane + i) * seqlen_k + j
        tl.store(addresses, ds.to(dbias_ptr.dtype.element_ty), mask=(i < seqlen_q) & (j < seqlen_k) & (part == 0))
    if GRADS.alibi:
        slope_sum -= tl.sum(ds * P.alibi_distance(i, j, seqlen_q, seqlen_k), 1)
    if GRADS.q:
        dq = tl.dot((ds * slack).to(k.dtype), k, dq, input_precision=MODE.precision)
    return dq, row_sum, slope_sum


@triton.jit
def query_gradients_kernel(q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dq_ptr, dbias_ptr, dslopes_ptr, k_desc,
                           v_desc, extras, strides, extra_strides, sizes, scalars, MODE: tl.constexpr,
                           TILE: tl.constexpr, GRADS: tl.constexpr):
    """dq of one query block; dbias as tiles of ds or as its row sums; each block's part of the ALiBi slopes' gradient.

    Grid: (query blocks, channel parts, heads, batch) in one dimension, query blocks fastest, the last first.
    """
    num_m_blocks = tl.cdiv(sizes.seqlen_q, TILE.block_m)
    program = tl.program_id(0)
    m_block = num_m_blocks - 1 - program % num_m_blocks
    program = program // num_m_blocks
    part = program % TILE.num_d
    program = program // TILE.num_d
    head = program % sizes.nheads
    batch = program // sizes.nheads

    q_start, seqlen_q = P.sequence(extras.cu_seqlens_q, batch, sizes.seqlen_q, MODE.varlen)
    k_start, seqlen_k = P.sequence(extras.cu_seqlens_k, batch, sizes.seqlen_k, MODE.varlen)
    m_begin = m_block * TILE.block_m
    m_end = tl.minimum(m_begin + TILE.block_m, seqlen_q)
    rows = m_begin + tl.arange(0, TILE.block_m)
    q_ptr = P.head_address(q_ptr, strides.q, batch, q_start, head, MODE.align)
    k_ptr = P.head_address(k_ptr, strides.k, batch, k_start, head // sizes.group, MODE.align)
    v_ptr = P.head_address(v_ptr, strides.v, batch, k_start, head // sizes.group, MODE.align)
    dout_ptr = P.head_address(dout_ptr, strides.dout, batch, q_start, head, MODE.align)
    stats = P.statistic_index(batch, head, q_start, sizes, seqlen_q, MODE.varlen)
    lse = tl.load(lse_ptr + stats + rows, mask=rows < seqlen_q, other=float("inf"))
    delta = tl.load(delta_ptr + stats + rows, mask=rows < seqlen_q, other=0.0)
    q = 0
    dout = 0
    if TILE.num_d == 1:
        q = P.load_tile(q_ptr, strides.q, m_begin, tl.arange(0, TILE.block_d), 0, seqlen_q, TILE.headdim, TILE.block_m,
                        TILE.block_d, True, MODE.align)
    if TILE.num_dv == 1:
        dout = P.load_tile(dout_ptr, strides.dout, m_begin, tl.arange(0, TILE.block_dv), 0, seqlen_q, TILE.headdim_v,
                           TILE.block_m, TILE.block_dv, True, MODE.align)
    slope = 0.0
    if MODE.alibi:
        slope = tl.load(extras.alibi_slopes + batch * extra_strides.slopes_batch + head * extra_strides.slopes_head)
    pointers = (q_ptr, k_ptr, v_ptr, dout_ptr, dbias_ptr)
    descriptors = (k_desc, v_desc)
    dq = tl.full([TILE.block_m, TILE.block_d], 0.0, tl.float32)
    row_sum = tl.full([TILE.block_m], 0.0, tl.float32)
    slope_sum = tl.full([TILE.block_m], 0.0, tl.float32)

    lower, upper = P.band(sizes, seqlen_q, seqlen_k, MODE)
    reachable = tl.where(m_begin < seqlen_q, seqlen_k, 0)
    first, full_first, full_last, last = P.key_blocks(m_begin, m_end, lower, upper, reachable, TILE.block_n, MODE)
    num_left = full_first - first
    num_full = full_last - full_first
    num_masked = num_left + last - full_last
    MASKED_STAGES: tl.constexpr = TILE.stages if MODE.lists or not TILE.boxes else 1  # a band has one or two such tiles
    if MODE.lists:
        list_ptr, num_full, num_masked = P.block_list(extras.lists, extra_strides.lists, batch, head, m_block,
                                                      m_begin < seqlen_q)
    for step in tl.range(0, num_full, num_stages=TILE.stages):
        if MODE.lists:
            n_block = tl.load(list_ptr + step)
        else:
            n_block = full_first + step
        dq, row_sum, slope_sum = query_tile(
            dq, row_sum, slope_sum, q, dout, lse, delta, pointers, descriptors, strides, extras, extra_strides, sizes,
            scalars, slope, batch, head, k_start, m_begin, n_block * TILE.block_n, part, seqlen_q, seqlen_k, False,
            MODE, TILE, GRADS)
    for step in tl.range(0, num_masked, num_stages=MASKED_STAGES):
        if MODE.lists:
            n_block = tl.load(list_ptr + num_full + step)
        else:
            n_block = tl.where(step < num_left, first + step, full_last + step - num_left)
        dq, row_sum, slope_sum = query_tile(
            dq, row_sum, slope_sum, q, dout, lse, delta, pointers, descriptors, strides, extras, extra_strides, sizes,
            scalars, slope, batch, head, k_start, m_begin, n_block * TILE.block_n, part, seqlen_q, seqlen_k, True, MODE,
            TILE, GRADS)

    if GRADS.q:
        dq_ptr = P.head_address(dq_ptr, strides.dq, batch, q_start, head, MODE.align)
        channels = part * TILE.block_d + tl.arange(0, TILE.block_d)
        P.store_tile(dq_ptr, strides.dq, dq * scalars.softmax_scale, m_begin, channels, seqlen_q, TILE.headdim,
                     TILE.block_m, MODE.align)
    plane = batch.to(tl.int64) * sizes.nheads + head
    if GRADS.bias == "row":
        tl.store(dbias_ptr + plane * seqlen_q + rows, row_sum, mask=(rows < seqlen_q) & (part == 0))
    if GRADS.alibi:  # noqa: SIM102 (one condition is a constant, the other is not)
        if part == 0:
            tl.store(dslopes_ptr + plane * num_m_blocks + m_block, tl.sum(slope_sum))


@triton.jit
def bias_gradient_kernel(q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dbias_ptr, extras, strides, extra_strides,
                         sizes, scalars, bias_batch, bias_heads, MODE: tl.constexpr, TILE: tl.constexpr):
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
    lower, upper = P.band(sizes, seqlen_q, seqlen_k, MODE)
    band_keep = P.keep_pairs(i, j, lower, upper, seqlen_q, seqlen_k, MODE)
    key_begin, key_end = P.seen_keys(lower, upper, seqlen_q, seqlen_k, MODE)
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
        stats = P.statistic_index(batch, head, start, sizes, seqlen_q, False)
        q_head = P.head_address(q_ptr, strides.q, batch, start, head, MODE.align)
        k_head = P.head_address(k_ptr, strides.k, batch, start, head // sizes.group, MODE.align)
        v_head = P.head_address(v_ptr, strides.v, batch, start, head // sizes.group, MODE.align)
        dout_head = P.head_address(dout_ptr, strides.dout, batch, start, head, MODE.align)
        lse = tl.load(lse_ptr + stats + rows, mask=rows < seqlen_q, other=float("inf"))
        delta = tl.load(delta_ptr + stats + rows, mask=rows < seqlen_q, other=0.0)
        s = product(q_head, strides.q, m_begin, 0, seqlen_q, k_head, strides.k, n_begin, key_begin, key_end,
                    TILE.headdim, TILE.block_d, TILE.num_d, TILE.block_m, TILE.block_n, MODE)
        p, _ = probabilities(s, lse[:, None], i, j, slope, extras, extra_strides, scalars, batch, head, seqlen_q,
                             seqlen_k, True, MODE)
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


@triton.jit
def clear_tail_kernel(ptr, cu_seqlens, batch, total, stride_row, stride_col, width, value, ROWS: tl.constexpr,
                      COLS: tl.constexpr):
    """Writes ``value`` over the tokens that no sequence owns: rows from cu_seqlens[batch] to total. Any grid size."""
    begin = tl.load(cu_seqlens + batch) + tl.program_id(0) * ROWS
    for first in range(begin, total, tl.num_programs(0) * ROWS):
        rows = first + tl.arange(0, ROWS)
        for left in range(0, width, COLS):
            cols = left + tl.arange(0, COLS)
            addresses = ptr + (rows.to(tl.int64) * stride_row)[:, None] + (cols.to(tl.int64) * stride_col)[None, :]
            fill = tl.full([ROWS, COLS], 0.0, tl.float32) + value
            tl.store(addresses, fill.to(ptr.dtype.element_ty), mask=(rows < total)[:, None] & (cols < width)[None, :])
