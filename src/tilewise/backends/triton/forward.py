"""The forward kernel: one program computes BLOCK_M rows of one head's output and their lse, one key tile at a time.

    s = scale q k^T (softcap, bias, ALiBi)    p = exp(s - max)    out = sum p v / sum p    lse = max + ln sum p

The loop over key tiles runs three times over disjoint tiles: full ones without mask arithmetic, those that a band cuts,
and those of which some keys may not even be loaded.
Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018); Dao, "FlashAttention-2" (2023).
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.backends.triton import bands as B  # noqa: N812
from tilewise.backends.triton import primitives as P  # noqa: N812
from tilewise.backends.triton.cuts import kept_keys
from tilewise.backends.triton.follow import rescaled
from tilewise.backends.triton.places import key_head, place
from tilewise.backends.triton.quick import UNSEEN, quick_step, row_maxima


@triton.jit
def load_keys(ptr, desc, stride, sizes, batch, head, k_start, n_begin, first, seqlen_q, seqlen_k, NUM: tl.constexpr,
              BLOCK: tl.constexpr, EDGE: tl.constexpr, MODE: tl.constexpr, TILE: tl.constexpr):
    """Channels [first, first + BLOCK) of the NUM of k or v, for the keys [n_begin, n_begin + block_n)."""
    lower, upper = B.band(sizes, seqlen_q, seqlen_k, MODE)
    key_begin, key_end = B.seen_keys(lower, upper, seqlen_q, seqlen_k, MODE)
    return P.load_rows(ptr, desc, stride, batch, k_start, seqlen_k, key_head(head, sizes, TILE.cube), n_begin, first,
                       key_begin, key_end, NUM, TILE.block_n, BLOCK, EDGE, MODE, TILE)


@triton.jit
def score_tile(q, k, pointers, descriptors, strides, extras, extra_strides, sizes, scalars, slope, batch, head, k_start,
               m_begin, n_begin, cut, seqlen_q, seqlen_k, KIND: tl.constexpr, SCALE_FIRST: tl.constexpr,
               MODE: tl.constexpr, TILE: tl.constexpr):
    """Scores of the keys [n_begin, n_begin + block_n), excluded pairs at -inf, and which pairs an edge keeps.

    KIND is "full", "cut" (pairs are excluded), "banded" (``cut`` tells whether) or "edge": the block lists say that
    pairs are excluded, or some keys may not be touched.
    """
    q_ptr, k_ptr, _ = pointers
    k_desc, _ = descriptors
    i = (m_begin + tl.arange(0, TILE.block_m))[:, None]
    j = (n_begin + tl.arange(0, TILE.block_n))[None, :]
    lower, upper = B.band(sizes, seqlen_q, seqlen_k, MODE)
    if TILE.num_d == 1:
        s = tl.dot(q, tl.trans(k), input_precision=MODE.precision)
    else:
        s = tl.full([TILE.block_m, TILE.block_n], 0.0, tl.float32)
        for part in tl.range(0, TILE.num_d):
            first = part * TILE.block_d
            q_part = P.load_tile(q_ptr, strides.q, m_begin, first + tl.arange(0, TILE.block_d), 0, seqlen_q,
                                 TILE.headdim, TILE.block_m, TILE.block_d, True, MODE.align)
            k_part = load_keys(k_ptr, k_desc, strides.k, sizes, batch, head, k_start, n_begin, first, seqlen_q,
                               seqlen_k, TILE.headdim, TILE.block_d, KIND == "edge", MODE, TILE)
            s = tl.dot(q_part, tl.trans(k_part), s, input_precision=MODE.precision)
    if SCALE_FIRST:
        s, _ = P.modify_scores(s, i, j, slope, extras, extra_strides, scalars, batch, head, seqlen_q, seqlen_k,
                               KIND != "full", MODE)
    keep = j < seqlen_k
    if KIND == "banded" and TILE.early > 0 and TILE.boxes and not SCALE_FIRST:
        s = kept_keys(s, cut, i, j, lower, upper, seqlen_k, MODE)
    elif KIND == "banded":
        if cut:
            s = tl.where(B.keep_keys(i, j, lower, upper, seqlen_k, MODE), s, float("-inf"))
    elif KIND != "full":
        keep = B.keep_pairs(i, j, lower, upper, seqlen_q, seqlen_k, MODE)
        if MODE.lists:
            keep = P.keep_listed(keep, i, j, extras, extra_strides, batch, head, seqlen_q, seqlen_k, MODE)
        s = tl.where(keep, s, float("-inf"))
    return s, keep


@triton.jit
def weigh(s, row_max, row_sum, extras, sizes, scalars, batch, head, m_begin, n_begin, SCALE_FIRST: tl.constexpr,
          MODE: tl.constexpr, TILE: tl.constexpr):
    """Probabilities of a tile, the new state of its rows and by what their old sums shrink."""
    if TILE.early > 0 and TILE.boxes and not SCALE_FIRST:
        p, row_max, row_sum, rescale = quick_step(s, row_max, row_sum, scalars.softmax_scale * P.LOG2E, TILE.early)
    else:
        p, row_max, row_sum, rescale = P.softmax_step(s, row_max, row_sum, scalars.softmax_scale * P.LOG2E,
                                                      MODE.precise, not SCALE_FIRST, TILE.lazy)
    if MODE.dropout:
        seed = tl.load(extras.seed)
        p = tl.where(P.keep_dropout(seed, batch + sizes.batch_offset, head, m_begin, n_begin, scalars.max_dropped,
                                    TILE.block_m, TILE.block_n, False), p, 0.0)
    return p, row_max, row_sum, rescale


@triton.jit
def forward_tile(acc, row_max, row_sum, q, pointers, descriptors, strides, extras, extra_strides, sizes, scalars, slope,
                 batch, head, k_start, m_begin, n_begin, v_block, cut, seqlen_q, seqlen_k, KIND: tl.constexpr,
                 SCALE_FIRST: tl.constexpr, MODE: tl.constexpr, TILE: tl.constexpr):
    """Adds the keys [n_begin, n_begin + block_n) to the softmax state of the program's rows. KIND: see score_tile."""
    _, k_ptr, v_ptr = pointers
    k_desc, v_desc = descriptors
    EDGE: tl.constexpr = KIND == "edge"
    JOINT: tl.constexpr = TILE.joint and TILE.boxes
    k = 0
    if TILE.num_d == 1:
        k = load_keys(k_ptr, k_desc, strides.k, sizes, batch, head, k_start, n_begin, 0, seqlen_q, seqlen_k,
                      TILE.headdim, TILE.block_d, EDGE, MODE, TILE)
    if JOINT:
        v = load_keys(v_ptr, v_desc, strides.v, sizes, batch, head, k_start, n_begin, v_block * TILE.block_dv, seqlen_q,
                      seqlen_k, TILE.headdim_v, TILE.block_dv, EDGE, MODE, TILE)
    s, keep = score_tile(q, k, pointers, descriptors, strides, extras, extra_strides, sizes, scalars, slope, batch,
                         head, k_start, m_begin, n_begin, cut, seqlen_q, seqlen_k, KIND, SCALE_FIRST, MODE, TILE)
    if not JOINT:
        v = load_keys(v_ptr, v_desc, strides.v, sizes, batch, head, k_start, n_begin, v_block * TILE.block_dv, seqlen_q,
                      seqlen_k, TILE.headdim_v, TILE.block_dv, EDGE, MODE, TILE)
    if EDGE and MODE.lists:
        v = tl.where((tl.max(keep.to(tl.int32), 0) > 0)[:, None], v, 0.0)  # 0 * NaN: unseen values may be anything
    p, row_max, row_sum, rescale = weigh(s, row_max, row_sum, extras, sizes, scalars, batch, head, m_begin, n_begin,
                                         SCALE_FIRST, MODE, TILE)
    acc = tl.dot(p.to(v.dtype), v, rescaled(acc, rescale, TILE.lazy and TILE.boxes), input_precision=MODE.precision)
    return acc, row_max, row_sum


@triton.jit
def overlapped_tiles(acc, row_max, row_sum, q, pointers, descriptors, strides, extras, extra_strides, sizes, scalars,
                     slope, batch, head, k_start, m_begin, origin, first, full_first, full_last, last, v_block,
                     seqlen_q, seqlen_k, KIND: tl.constexpr, SCALE_FIRST: tl.constexpr, MODE: tl.constexpr,
                     TILE: tl.constexpr):
    """Adds the key blocks [first, last): the product of one tile with v runs under the next one's softmax.

    A turn computes its own scores and adds the probabilities of the turn before, which the first has none of.
    """
    k_ptr, v_ptr = pointers[1], pointers[2]  # no name but these: a loop takes any along, ``_`` too, with its type
    k_desc, v_desc = descriptors
    p = tl.full([TILE.block_m, TILE.block_n], 0.0, tl.float32)  # rounded only where it is used, or it goes to memory
    rescale = tl.full(row_max.shape, 1.0, tl.float32)
    for n_block in tl.range(first, last, num_stages=TILE.stages):
        n_begin = origin + n_block * TILE.block_n
        if TILE.cube and TILE.clipped:  # dense: in the first turn outside of the tensor, zeros that are not fetched
            before = tl.where(n_block > first, n_begin, 0) - TILE.block_n
        elif TILE.cube:
            before = tl.where(n_block > first, n_block - 1, -1) * TILE.block_n
        else:
            before = origin + tl.maximum(n_block - 1, first) * TILE.block_n
        cut = (n_block < full_first) | (n_block >= full_last)
        k = load_keys(k_ptr, k_desc, strides.k, sizes, batch, head, k_start, n_begin, 0, seqlen_q, seqlen_k,
                      TILE.headdim, TILE.block_d, False, MODE, TILE)
        if TILE.joint:
            v = load_keys(v_ptr, v_desc, strides.v, sizes, batch, head, k_start, before, v_block * TILE.block_dv,
                          seqlen_q, seqlen_k, TILE.headdim_v, TILE.block_dv, False, MODE, TILE)
        s, _ = score_tile(q, k, pointers, descriptors, strides, extras, extra_strides, sizes, scalars, slope, batch,
                          head, k_start, m_begin, n_begin, cut, seqlen_q, seqlen_k, KIND, SCALE_FIRST, MODE, TILE)
        if not TILE.joint:
            v = load_keys(v_ptr, v_desc, strides.v, sizes, batch, head, k_start, before, v_block * TILE.block_dv,
                          seqlen_q, seqlen_k, TILE.headdim_v, TILE.block_dv, False, MODE, TILE)
        acc = tl.dot(p.to(v.dtype), v, rescaled(acc, rescale, TILE.lazy and TILE.boxes), input_precision=MODE.precision)
        p, row_max, row_sum, rescale = weigh(s, row_max, row_sum, extras, sizes, scalars, batch, head, m_begin, n_begin,
                                             SCALE_FIRST, MODE, TILE)
    if last > first:
        v = load_keys(v_ptr, v_desc, strides.v, sizes, batch, head, k_start, origin + (last - 1) * TILE.block_n,
                      v_block * TILE.block_dv, seqlen_q, seqlen_k, TILE.headdim_v, TILE.block_dv, False, MODE, TILE)
        acc = tl.dot(p.to(v.dtype), v, rescaled(acc, rescale, TILE.lazy and TILE.boxes), input_precision=MODE.precision)
    return acc, row_max, row_sum


@triton.jit
def attend(q, pointers, descriptors, strides, extras, extra_strides, sizes, scalars, slope, batch, head, k_start,
           m_block, v_block, seqlen_q, seqlen_k, SCALE_FIRST: tl.constexpr, MODE: tl.constexpr, TILE: tl.constexpr):
    """Softmax state of a block of rows over all its keys; row_max in natural units.

    With SCALE_FIRST where MODE does not ask for it this is a second try: rare, so that nothing is loaded ahead.
    """
    m_begin = m_block * TILE.block_m
    m_end = tl.minimum(m_begin + TILE.block_m, seqlen_q)
    acc = tl.full([TILE.block_m, TILE.block_dv], 0.0, tl.float32)
    row_sum = tl.full([TILE.block_m, TILE.sums], 0.0, tl.float32)
    QUICK: tl.constexpr = TILE.early > 0 and TILE.boxes and not SCALE_FIRST
    if QUICK:
        row_max = tl.full([TILE.block_m, TILE.sums], UNSEEN, tl.float32)
    else:
        row_max = tl.full([TILE.block_m], float("-inf"), tl.float32)
    lower, upper = B.band(sizes, seqlen_q, seqlen_k, MODE)
    key_begin, key_end = B.seen_keys(lower, upper, seqlen_q, seqlen_k, MODE)
    origin = key_begin if TILE.clipped else 0
    reachable = tl.where(m_begin < seqlen_q, tl.maximum(key_end - key_begin, 0) if TILE.clipped else seqlen_k, 0)
    first, full_first, full_last, last = B.key_blocks(m_begin, m_end, lower - origin, upper - origin, reachable,
                                                      TILE.block_n, MODE)
    inner_first, inner_last = first, last
    # of dense problems with edges all tiles but the full ones are edges: together they would not fit in the registers;
    # without a band, beside a bias or dropout, a loop of their own for tiles at the end would not
    COSTLY: tl.constexpr = TILE.boxes and MODE.bias != MODE.dropout and not (MODE.band or MODE.lists)
    BANDED: tl.constexpr = (MODE.band and (MODE.varlen or not MODE.unseen or not TILE.boxes or TILE.clipped)) or (
        COSTLY and TILE.block_d != TILE.block_n)  # else ptxas would lose q, see tiles.loses_queries
    if not TILE.clipped:
        inner_first, full_first, full_last, inner_last = B.sorted_blocks(
            first, full_first, full_last, last, key_begin, key_end, seqlen_k, TILE.block_n, TILE.boxes and BANDED)
    if not BANDED:
        inner_first = full_first
        inner_last = full_last
    num_inner = inner_last - inner_first
    num_outer = inner_first - first + last - inner_last
    RAGGED: tl.constexpr = MODE.bias and MODE.bias_align == 1
    if BANDED and not MODE.unseen and TILE.boxes and (MODE.dropout or COSTLY or RAGGED):
        num_inner = tl.maximum(num_inner, 1)  # which it is: said so, or the assembler waits after every product
    if MODE.lists:
        list_ptr, num_inner, num_outer = P.block_list(extras.lists, extra_strides.lists, batch, head, m_block,
                                                      m_begin < seqlen_q)
    AGAIN: tl.constexpr = SCALE_FIRST and not MODE.scale_first
    STAGES: tl.constexpr = 1 if AGAIN else TILE.stages
    # a loop that may run zero times has the assembler wait after every product; in a branch it does not
    GUARDED: tl.constexpr = TILE.boxes and not AGAIN and (
        (MODE.lists and (MODE.scale_first or MODE.dropout)) or (MODE.bias and MODE.dropout and not MODE.band)
        or (MODE.band and MODE.unseen and (MODE.bias or MODE.dropout)))
    INNER: tl.constexpr = "banded" if BANDED else "full"
    EDGES: tl.constexpr = MODE.lists or (MODE.unseen and not TILE.clipped) or not TILE.boxes
    OUTER: tl.constexpr = "edge" if EDGES else "cut"
    if AGAIN and EDGES:  # all tiles are edges: one loop less to compile
        num_outer += num_inner
        inner_last = inner_first
    elif TILE.overlap and TILE.boxes and not AGAIN and not MODE.lists:
        if not GUARDED or num_inner > 0:
            acc, row_max, row_sum = overlapped_tiles(
                acc, row_max, row_sum, q, pointers, descriptors, strides, extras, extra_strides, sizes, scalars, slope,
                batch, head, k_start, m_begin, origin, inner_first, full_first, full_last, inner_last, v_block,
                seqlen_q, seqlen_k, INNER, SCALE_FIRST, MODE, TILE)
    else:
        if not GUARDED or num_inner > 0:
            for step in tl.range(0, num_inner, num_stages=STAGES):
                if MODE.lists:
                    n_block = tl.load(list_ptr + step)
                else:
                    n_block = inner_first + step
                cut = (n_block < full_first) | (n_block >= full_last)
                acc, row_max, row_sum = forward_tile(
                    acc, row_max, row_sum, q, pointers, descriptors, strides, extras, extra_strides, sizes, scalars,
                    slope, batch, head, k_start, m_begin, origin + n_block * TILE.block_n, v_block, cut, seqlen_q,
                    seqlen_k, INNER, SCALE_FIRST, MODE, TILE)
    if EDGES or not BANDED:
        for step in tl.range(0, num_outer, num_stages=STAGES if MODE.lists or not TILE.boxes else 1):
            if MODE.lists:
                n_block = tl.load(list_ptr + (step if AGAIN else num_inner + step))
            else:
                n_block = B.around(step, first, inner_first, inner_last)
            acc, row_max, row_sum = forward_tile(
                acc, row_max, row_sum, q, pointers, descriptors, strides, extras, extra_strides, sizes, scalars, slope,
                batch, head, k_start, m_begin, n_block * TILE.block_n, v_block, True, seqlen_q, seqlen_k, OUTER,
                SCALE_FIRST, MODE, TILE)
    if QUICK:
        row_max = row_maxima(row_max)
    if not SCALE_FIRST:
        row_max *= P.LN2
    return acc, row_max, row_sum if TILE.cube else tl.sum(row_sum, 1)


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
    """Grid: row blocks, head-dimension blocks of v, heads and batch in the order of places.py."""
    m_block, v_block, head, batch, q_start, seqlen_q = place(
        extras.cu_seqlens_q, sizes, sizes.seqlen_q, sizes.total_q, sizes.nheads, TILE.num_dv, TILE.block_m, True,
        MODE.varlen, MODE.lower and MODE.upper and not MODE.varlen, TILE.cube)
    if MODE.varlen or TILE.cube:
        if (m_block < 0) | (m_block * TILE.block_m >= seqlen_q):
            return
    k_start, seqlen_k = P.sequence(extras.cu_seqlens_k, batch, sizes.seqlen_k, MODE.varlen)
    m_begin = m_block * TILE.block_m
    q_ptr = P.head_address(q_ptr, strides.q, batch, q_start, head, MODE.align)
    k_ptr = P.head_address(k_ptr, strides.k, batch, k_start, key_head(head, sizes, TILE.cube), MODE.align)
    v_ptr = P.head_address(v_ptr, strides.v, batch, k_start, key_head(head, sizes, TILE.cube), MODE.align)
    rows = m_begin + tl.arange(0, TILE.block_m)
    q = 0
    if TILE.boxes and not TILE.parked:  # this way q becomes an operand in registers; rows past the end reach no result
        q = q_desc.load([0 if MODE.varlen else batch, q_start.to(tl.int32) + m_begin, head, 0])
        q = q.reshape(TILE.block_m, TILE.block_d)
    elif TILE.num_d == 1:
        q = P.load_tile(q_ptr, strides.q, m_begin, tl.arange(0, TILE.block_d), 0, seqlen_q, TILE.headdim, TILE.block_m,
                        TILE.block_d, True, MODE.align)
    slope = 0.0
    if MODE.alibi:
        slope = tl.load(extras.alibi_slopes + batch * extra_strides.slopes_batch + head * extra_strides.slopes_head)

    pointers = (q_ptr, k_ptr, v_ptr)
    descriptors = (k_desc, v_desc)
    acc, row_max, row_sum = attend(
        q, pointers, descriptors, strides, extras, extra_strides, sizes, scalars, slope, batch, head, k_start, m_block,
        v_block, seqlen_q, seqlen_k, MODE.scale_first, MODE, TILE)
    if not MODE.scale_first:
        size = tl.where(row_max == float("-inf"), 0.0, tl.abs(row_max))
        if TILE.cube:  # over the threads of a row too, which takes fewer barriers
            size = size[:, None] + tl.zeros_like(row_sum)
        size = tl.max(size)
        if size * P.LOG2E > P.EXACT_LIMIT:
            acc, row_max, row_sum = attend(
                q, pointers, descriptors, strides, extras, extra_strides, sizes, scalars, slope, batch, head, k_start,
                m_block, v_block, seqlen_q, seqlen_k, True, MODE, TILE)

    sink = float("-inf")
    if MODE.sink:
        sink = tl.load(extras.sink + batch * extra_strides.sink_batch + head * extra_strides.sink_head)
    out, lse = finish(acc, row_max, tl.sum(row_sum, 1) if TILE.cube else row_sum, sink, MODE.precise)
    if MODE.dropout:
        out *= scalars.keep_scale
    out_ptr = P.head_address(out_ptr, strides.out, batch, q_start, head, MODE.align)
    v_channels = v_block * TILE.block_dv + tl.arange(0, TILE.block_dv)
    P.store_tile(out_ptr, strides.out, out, m_begin, v_channels, seqlen_q, TILE.headdim_v, TILE.block_m, MODE.align)
    lse_ptr += P.row_index(batch, head, q_start, sizes, seqlen_q, MODE.varlen)
    tl.store(lse_ptr + rows, lse, mask=rows < seqlen_q)
