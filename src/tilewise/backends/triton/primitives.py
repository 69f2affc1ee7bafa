"""What forward and backward share: where a sequence lies, how tiles move, what changes a score, softmax, dropout.

Pairs are two broadcastable index tensors, as in bands.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.backends.triton.follow import followed

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
HUGE = tl.constexpr(65536.0)  # an lse whose rounding moves p by a visible part
ROUNDING = tl.constexpr(2.0**-22)  # relative error of score - lse at most: of the product with the scale and of lse
RAGGED = tl.constexpr(2**30)  # facts.RAGGED
SHIFTS = tl.constexpr(3)  # facts.SHIFTS
STATISTICS = tl.constexpr(64)  # facts.STATISTICS
EXACT_LIMIT = tl.constexpr(2.0**26)  # |score| in log2 units, whose rounding error is at most 4
NOTHING = tl.constexpr(-1.125 * 2.0**26)  # below, a row has seen nothing that counts, or is computed again


@triton.jit
def sequence(cu_seqlens, batch, seqlen, VARLEN: tl.constexpr):
    """First token (int64) and length (int32) of a sequence; a dense batch item starts at token 0 of its own row."""
    if VARLEN:
        start = tl.load(cu_seqlens + batch).to(tl.int64)
        return start, (tl.load(cu_seqlens + batch + 1) - start).to(tl.int32)
    else:
        return tl.zeros((), tl.int64), seqlen


@triton.jit
def head_address(ptr, stride, batch, start, head, ALIGN: tl.constexpr):
    """Address of channel 0 of the first token of one head. Strides count units of ALIGN elements (see Mode.align)."""
    return ptr + (batch.to(tl.int64) * stride.batch + start * stride.row + head.to(tl.int64) * stride.head) * ALIGN


@triton.jit
def tile_addresses(ptr, stride, first, cols, ROWS: tl.constexpr, ALIGN: tl.constexpr):
    """Addresses of the rows from ``first`` on. Aligned tensors have contiguous channels: a thread moves 16 bytes.

    The 64-bit part of an address is one number for the whole tile; within it 32 bits count units of ALIGN elements,
    which
    the host makes sure is enough (facts.is_aligned).
    """
    rows = tl.arange(0, ROWS)
    base = ptr + first.to(tl.int64) * stride.row * ALIGN
    if ALIGN == 1:
        return base + (rows.to(tl.int64) * stride.row)[:, None] + (cols.to(tl.int64) * stride.channel)[None, :]
    else:
        return base + (rows * stride.row.to(tl.int32))[:, None].to(tl.int64) * ALIGN + cols[None, :]


@triton.jit
def load_tile(ptr, stride, first, cols, row_begin, row_end, num_cols, ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
              MASK_ROWS: tl.constexpr, ALIGN: tl.constexpr):
    """A tile of ROWS rows; those outside [row_begin, row_end) and cols from num_cols on are zeros and never touched."""
    addresses = tile_addresses(ptr, stride, first, cols, ROWS, ALIGN)
    EVEN: tl.constexpr = num_cols % BLOCK_COLS == 0
    rows = first + tl.arange(0, ROWS)
    if MASK_ROWS:
        inside = ((rows >= row_begin) & (rows < row_end))[:, None]
        if EVEN:
            return tl.load(addresses, mask=inside, other=0.0)
        else:
            return tl.load(addresses, mask=inside & (cols < num_cols)[None, :], other=0.0)
    else:
        if EVEN:
            return tl.load(addresses)
        else:
            return tl.load(addresses, mask=(cols < num_cols)[None, :], other=0.0)


@triton.jit
def load_box(desc, batch, start, length, row, head, ROWS: tl.constexpr, COLS: tl.constexpr, VARLEN: tl.constexpr):
    """The same tile by the bulk copy engine (TMA), from a descriptor of the whole tensor: no address arithmetic at all.

    Past the end of a sequence it reads zeros, see facts.box_of.
    """
    if VARLEN:
        tile = desc.load([RAGGED, start.to(tl.int32) + length, head, RAGGED - length + row, 0])
    else:
        tile = desc.load([batch, row, head, 0])
    return tile.reshape(ROWS, COLS)


@triton.jit
def load_rows(ptr, desc, stride, batch, start, length, head, row, first, begin, end, num_cols, ROWS: tl.constexpr,
              COLS: tl.constexpr, EDGE: tl.constexpr, MODE: tl.constexpr, TILE: tl.constexpr):
    """Channels [first, first + COLS) of ROWS rows from ``row`` on, either way; an EDGE touches only [begin, end)."""
    if TILE.boxes and not EDGE:
        return load_box(desc, batch, start, end if TILE.clipped else length, row, head, ROWS, COLS, MODE.varlen)
    else:
        return load_tile(ptr, stride, row, first + tl.arange(0, COLS), begin, end, num_cols, ROWS, COLS, EDGE,
                         MODE.align)


@triton.jit
def store_tile(ptr, stride, values, first, cols, row_end, num_cols, ROWS: tl.constexpr, ALIGN: tl.constexpr):
    addresses = tile_addresses(ptr, stride, first, cols, ROWS, ALIGN)
    inside = (first + tl.arange(0, ROWS) < row_end)[:, None] & (cols < num_cols)[None, :]
    tl.store(addresses, values.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def keep_listed(keep, i, j, extras, strides, batch, head, seqlen_q, seqlen_k, MODE: tl.constexpr):
    """``keep`` and the data-dependent rules: the boolean mask and equal segments."""
    if MODE.mask:
        keep &= load_pairs(extras.mask, strides.mask, batch, head, i, j, seqlen_q, seqlen_k, True, MODE.mask_align) != 0
    if MODE.segments:
        segment_q = tl.load(extras.segments_q + batch.to(tl.int64) * seqlen_q + i, mask=i < seqlen_q, other=0)
        segment_k = tl.load(extras.segments_k + batch.to(tl.int64) * seqlen_k + j, mask=j < seqlen_k, other=0)
        keep &= segment_q == segment_k
    return keep


@triton.jit
def load_pairs(ptr, stride, batch, head, i, j, seqlen_q, seqlen_k, MASKED: tl.constexpr, ALIGN: tl.constexpr):
    """Values of a tensor over pairs; rows past the end are clamped, keys past the end read as 0 if MASKED."""
    base = ptr + (batch.to(tl.int64) * stride.batch + head.to(tl.int64) * stride.head) * ALIGN
    rows = base + tl.minimum(i, seqlen_q - 1).to(tl.int64) * stride.row * ALIGN
    if ALIGN == 1:
        addresses = rows + j.to(tl.int64) * stride.col
    else:
        addresses = rows + j
    if MASKED:  # an aligned tensor's last dimension is a multiple of ALIGN; said so, vectors of keys share one mask bit
        return tl.load(addresses, mask=(j < seqlen_k // ALIGN * ALIGN), other=0)
    else:
        return tl.load(addresses)


@triton.jit
def tanh(x):
    """tanh(x) to fp32 rounding: a polynomial near 0, where 1 - exp(-2x) would cancel."""
    square = x * x
    series = 1.0 + square * (-0.33333333 + square * (0.13333333 + square * (-0.05396825 + square * 0.02186949)))
    decay = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    outer = (1.0 - decay) / (1.0 + decay)
    return tl.where(tl.abs(x) < 0.25, x * series, tl.where(x < 0, -outer, outer))


@triton.jit
def modify_scores(s, i, j, slope, extras, strides, scalars, batch, head, seqlen_q, seqlen_k, MASKED: tl.constexpr,
                  MODE: tl.constexpr):
    """Natural-unit scores from raw products: scale, softcap, bias, ALiBi, in this order.

    Returns the scores and the derivative of the softcap (1 where there is none).
    """
    slack = 1.0
    bias = 0.0
    if MODE.bias:
        bias = load_pairs(extras.bias, strides.bias, batch, head, i, j, seqlen_q, seqlen_k, MASKED, MODE.bias_align).to(
            tl.float32)
    if MODE.bias and not MODE.softcap:
        s = tl.fma(s, tl.zeros_like(s) + scalars.softmax_scale, bias)  # said so, as all kernels have to round it alike
    else:
        s *= scalars.softmax_scale
    if MODE.softcap:
        t = tanh(s / scalars.softcap)
        s = scalars.softcap * t
        slack = 1.0 - t * t
        if MODE.bias:
            s += bias
    if MODE.alibi:
        s -= slope * alibi_distance(i, j, seqlen_q, seqlen_k)
    return s, slack


@triton.jit
def alibi_distance(i, j, seqlen_q, seqlen_k):
    return tl.abs(i + (seqlen_k - seqlen_q) - j).to(tl.float32)


@triton.jit
def exp(x, PRECISE: tl.constexpr):
    """exp(x). PRECISE, for fp32 inputs: 1 unit in the last place where the hardware's exp2(x log2 e) has several.

    x = n ln 2 + r with |r| <= ln 2 / 2 in two steps (Cody and Waite),
    then a polynomial in r (Cephes' expf coefficients).
    """
    if PRECISE:
        n = tl.floor(x * LOG2E + 0.5)
        r = x - n * 0.693359375
        r = r + n * 2.12194440e-4
        series = 1.9875691500e-4
        series = series * r + 1.3981999507e-3
        series = series * r + 8.3334519073e-3
        series = series * r + 4.1665795894e-2
        series = series * r + 1.6666665459e-1
        series = series * r + 5.0000001201e-1
        return tl.where(x < -103.0, 0.0, (series * r * r + r + 1.0) * tl.exp2(n))
    else:
        return tl.exp2(x * LOG2E)


@triton.jit
def partial_sums(p, PARTS: tl.constexpr):
    """Row sums of p in parts, column by column modulo PARTS: with 8 of them a thread adds only what it holds itself.

    So it is in the fragments of NVIDIA's tensor cores; the parts are added up once, after the last tile.
    """
    return tl.sum(tl.reshape(p, [p.shape[0], p.shape[1] // PARTS, PARTS]), 1)


@triton.jit
def row_tops(s, PARTS: tl.constexpr):
    """Row maxima, in the same parts first: chains of comparisons that do not wait for each other, the same result."""
    return tl.max(tl.max(tl.reshape(s, [s.shape[0], s.shape[1] // PARTS, PARTS]), 1), 1)


@triton.jit
def softmax_step(s, row_max, row_sum, unit, PRECISE: tl.constexpr, FUSED: tl.constexpr, LAZY: tl.constexpr):
    """One step of the online softmax: p = exp(s - row_max), the state, and by what the sums of earlier tiles shrink.

    Scores are in natural units; the largest one's exponent is exactly 0, however large it is. FUSED: they are raw
    products, ``unit`` = softmax_scale * log2(e) > 0 and row_max is in log2 units: p is one fused multiply-add and one
    exp2. row_max is rounded, so that the largest p is 2 to the power of that rounding error: little up to EXACT_LIMIT,
    and unusable beyond, where the caller starts again; of keys below NOTHING p is 0, since a row may yet see others and
    is then not computed again. LAZY: row_max may stay behind (follow.py).
    """
    top = row_tops(s, row_sum.shape[1])
    if FUSED:
        top *= unit
    if LAZY:
        new_max = followed(top, row_max, 1.0 if FUSED else LN2)
    else:
        new_max = tl.maximum(row_max, top)
    # a row without keys so far must not make inf - inf
    if FUSED:
        origin = tl.where(new_max < NOTHING, 0.0, new_max)
        p = tl.exp2(s * unit - origin[:, None])
        rescale = tl.exp2(row_max - origin)
    else:
        origin = tl.where(new_max == float("-inf"), 0.0, new_max)
        p = exp(s - origin[:, None], PRECISE)
        rescale = exp(row_max - origin, PRECISE)
    row_sum = row_sum * rescale[:, None] + partial_sums(p, row_sum.shape[1])
    return p, new_max, row_sum, rescale


@triton.jit
def keep_dropout(seed, batch, head, row_begin, col_begin, max_dropped, ROWS: tl.constexpr, COLS: tl.constexpr,
                 TRANSPOSED: tl.constexpr):
    """Philox4x32-10 keyed on (seed, j >> 2, i, head, batch): word j & 3 decides pair (i, j). True where it is kept.

    One evaluation decides four neighbouring keys, so a tile starts at a multiple of four keys. The result is
    (rows, cols), or (cols, rows) if TRANSPOSED. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011).
    """
    i = (row_begin + tl.arange(0, ROWS)).to(tl.uint32)
    quad = (col_begin // 4 + tl.arange(0, COLS // 4)).to(tl.uint32)
    shape: tl.constexpr = [COLS // 4, ROWS] if TRANSPOSED else [ROWS, COLS // 4]
    if TRANSPOSED:
        c0 = tl.broadcast_to(quad[:, None], shape)
        c1 = tl.broadcast_to(i[None, :], shape)
    else:
        c0 = tl.broadcast_to(quad[None, :], shape)
        c1 = tl.broadcast_to(i[:, None], shape)
    c2 = tl.zeros(shape, tl.uint32) + head.to(tl.uint32)
    c3 = tl.zeros(shape, tl.uint32) + batch.to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, c0, c1, c2, c3)
    limit = max_dropped.to(tl.uint32, bitcast=True)
    # four bits for each quad, which a thread then fetches for its pairs: whatever Triton can trace back through other
    # operations, it may evaluate anew in every thread that wants a bit of it
    bits = (w0 > limit).to(tl.int32) | ((w1 > limit).to(tl.int32) << 1)
    bits |= ((w2 > limit).to(tl.int32) << 2) | ((w3 > limit).to(tl.int32) << 3)
    col = tl.arange(0, COLS)
    if TRANSPOSED:
        col = col[:, None]
        bits = tl.gather(bits, tl.broadcast_to(col // 4, [COLS, ROWS]), 0)
    else:
        col = col[None, :]
        bits = tl.gather(bits, tl.broadcast_to(col // 4, [ROWS, COLS]), 1)
    return (bits >> col % 4) & 1 != 0


@triton.jit
def row_index(batch, head, start, sizes, seqlen_q, VARLEN: tl.constexpr):
    """Where a head's rows start in lse and dlse: (batch, nheads, seqlen_q), or (nheads, total_q) for varlen."""
    if VARLEN:
        return head.to(tl.int64) * sizes.total_q + start
    else:
        return (batch.to(tl.int64) * sizes.nheads + head) * seqlen_q


@triton.jit
def statistic_index(batch, head, start, sizes, seqlen_q, row_begin, MODE: tl.constexpr):
    """The same in the backward's own lse and delta, where a head has a multiple of STATISTICS rows.

    They are moved by up to SHIFTS, so that the first query that sees a key, ``row_begin``, is a multiple of four; not
    where tiles come from lists, which count them from the first query of all.
    """
    SPARE: tl.constexpr = SHIFTS if MODE.unseen and not MODE.lists else 0
    shift = -row_begin & SPARE
    if MODE.varlen:
        rows = ((sizes.total_q + SPARE * sizes.batch) // STATISTICS + sizes.batch + 1) * STATISTICS
        first = ((start + SPARE * batch) // STATISTICS + batch) * STATISTICS
        return head.to(tl.int64) * rows + first + shift
    else:
        rows = tl.cdiv(seqlen_q + SPARE, STATISTICS) * STATISTICS
        return (batch.to(tl.int64) * sizes.nheads + head) * rows + shift


@triton.jit
def has_statistics(rows, seqlen_q, MODE: tl.constexpr):
    """Rows that have them: those that fill up the last tile too, unless the copy engine cuts it off."""
    if MODE.unseen and not MODE.lists:
        return rows < seqlen_q
    else:
        return rows < tl.cdiv(seqlen_q, STATISTICS) * STATISTICS


@triton.jit
def block_list(lists, stride, batch, head, block, VALID):
    """First entry, number of full and number of partial tiles of one owner block (see blocks.py); none unless VALID."""
    plane = batch.to(tl.int64) * stride.batch + head.to(tl.int64) * stride.head
    entries = lists + plane + block.to(tl.int64) * stride.row
    num_full = tl.load(entries, mask=VALID, other=0)
    num_partial = tl.load(entries + 1, mask=VALID, other=0)
    return entries + 2, num_full, num_partial
