"""Before and after the backward's main kernel, in plain Triton: row statistics, a zeroed fp32 dq, and its conversion.

Both work on padded rows: every head (packed: every sequence of every head) begins at a block of BLOCK_M rows.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def find_block(program, parts, nheads, head_blocks, cu_seqlens_ptr):
    """Of the ``parts`` of a padded block: number of the block, part, batch index, head, block within the head.

    Heads vary fastest, so that programs that run together read whole tokens.
    """
    head = program % nheads
    part = program // nheads % parts
    within = program // nheads // parts
    index = 0
    if cu_seqlens_ptr is None:
        index = within // head_blocks
        within = within % head_blocks
    return (index * nheads + head) * head_blocks + within, part, index, head, within


@triton.jit
def find_rows(within, seqlen, cu_seqlens_ptr, batch, BLOCK_M: tl.constexpr, CHUNK: tl.constexpr):
    """Of a block within a head: first token of its sequence, first row, length of the sequence."""
    if cu_seqlens_ptr is None:
        return 0, within * BLOCK_M, seqlen
    else:
        found = tl.zeros([CHUNK], tl.int32)
        for begin in range(0, batch, CHUNK):
            at = begin + tl.arange(0, CHUNK)
            start = tl.load(cu_seqlens_ptr + at, mask=at < batch, other=0)
            found += ((start // BLOCK_M + at <= within) & (at < batch)).to(tl.int32)
        # the last that begins at or before this block: see backward_parts.statistics_block
        sequence = tl.sum(found) - 1
        start = tl.load(cu_seqlens_ptr + sequence)
        row = (within - start // BLOCK_M - sequence) * BLOCK_M
        return start, row, tl.load(cu_seqlens_ptr + sequence + 1) - start


@triton.jit
def head_address(ptr, stride, batch, head, token):
    return (
        ptr
        + tl.cast(batch, tl.int64) * stride[0]
        + tl.cast(token, tl.int64) * stride[1]
        + tl.cast(head, tl.int64) * stride[2]
    )


@triton.jit
def before_kernel(out_ptr, dout_ptr, lse_ptr, dlse_ptr, lse_out_ptr, delta_out_ptr, dq_ptr, cu_seqlens_ptr, out_stride,
                  dout_stride, lse_stride, batch, nheads, seqlen, head_blocks, headdim_v,
                  BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
                  EARLY: tl.constexpr, STARTED_EARLY: tl.constexpr):
    """lse in units of log2, -delta = dlse - rowsum(out * dout), and zeros for dq.

    EARLY: the next launch is. STARTED_EARLY: this one is, which reads nothing of the one before, but must end after it.

    Strides of out and dout are (batch, row, head) and of lse (batch, head), in elements. Rows past the sequence, and
    those that see no key, get the lse inf, with which every p is 0: a negative slope makes scores far away so large
    that with another p would be inf, and times the zeros of such a row NaN.
    """
    if EARLY:
        gdc_launch_dependents()
    block, part, index, head, within = find_block(tl.program_id(0), BLOCK_M // ROWS, nheads, head_blocks,
                                                  cu_seqlens_ptr)
    cols = tl.arange(0, BLOCK_D)
    padded = block.to(tl.int64) * BLOCK_M + part * ROWS + tl.arange(0, ROWS)
    tl.store(dq_ptr + padded[:, None] * BLOCK_D + cols[None, :], tl.zeros([ROWS, BLOCK_D], tl.float32))
    start, row0, length = find_rows(within, seqlen, cu_seqlens_ptr, batch, BLOCK_M, CHUNK)
    rows = row0 + part * ROWS + tl.arange(0, ROWS)
    inside = rows < length
    mask = inside[:, None] & (cols < headdim_v)[None, :]
    at = rows.to(tl.int64)[:, None]
    out_at = head_address(out_ptr, out_stride, index, head, start) + at * out_stride[1] + cols[None, :]
    dout_at = head_address(dout_ptr, dout_stride, index, head, start) + at * dout_stride[1] + cols[None, :]
    out = tl.load(out_at, mask=mask, other=0.0).to(tl.float32)
    dout = tl.load(dout_at, mask=mask, other=0.0).to(tl.float32)
    minus_delta = -tl.sum(out * dout, 1)
    lse_at = tl.cast(index, tl.int64) * lse_stride[0] + head.to(tl.int64) * lse_stride[1] + start + rows
    lse = tl.load(lse_ptr + lse_at, mask=inside, other=float("-inf"))
    if dlse_ptr is not None:
        minus_delta += tl.load(dlse_ptr + lse_at, mask=inside, other=0.0)
    tl.store(lse_out_ptr + padded, tl.where(lse == float("-inf"), float("inf"), lse * LOG2E))
    tl.store(delta_out_ptr + padded, minus_delta)
    if STARTED_EARLY:
        gdc_wait()


@triton.jit
def after_kernel(acc_ptr, dq_ptr, cu_seqlens_ptr, dq_stride, batch, nheads, seqlen, head_blocks, total, headdim,
                 softmax_scale, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr,
                 EARLY: tl.constexpr):
    """fp32 dq of 64 rows from fragment order (backward_parts.fragment_order) to rows, scaled, in the gradient's dtype.

    Packed: all ``total`` rows are written, those behind the last sequence with zeros.
    """
    block, part, index, head, within = find_block(tl.program_id(0), BLOCK_M // 64, nheads, head_blocks,
                                                  cu_seqlens_ptr)
    first = (block.to(tl.int64) * (BLOCK_M // 64) + part) * (64 * BLOCK_D)
    if EARLY:
        gdc_wait()
    x = tl.load(acc_ptr + first + tl.arange(0, 64 * BLOCK_D))
    x = tl.reshape(x, [BLOCK_D // 64, 8, 4, 4, 2, 4, 2, 2])  # part, i, warp, row / 2, row % 2, quad, high row, pair
    x = tl.reshape(tl.permute(x, (2, 6, 3, 4, 0, 1, 5, 7)), [64, BLOCK_D])
    start, row0, length = find_rows(within, seqlen, cu_seqlens_ptr, batch, BLOCK_M, CHUNK)
    rows = row0 + part * 64 + tl.arange(0, 64)
    cols = tl.arange(0, BLOCK_D)
    at = head_address(dq_ptr, dq_stride, index, head, start) + rows.to(tl.int64)[:, None] * dq_stride[1]
    if cu_seqlens_ptr is not None:  # the rows behind the last sequence are zeros in the accumulator too
        length = tl.where(start + length == tl.load(cu_seqlens_ptr + batch), total - start, length)
    mask = (rows < length)[:, None] & (cols < headdim)[None, :]
    tl.store(at + cols[None, :], (x * softmax_scale).to(dq_ptr.dtype.element_ty), mask=mask)


@triton.jit
def sink_kernel(sink_ptr, lse_ptr, minus_delta_ptr, dsink_ptr, cu_seqlens_ptr, lse_stride, batch, nheads, seqlen,
                head_blocks, BLOCK_M: tl.constexpr, ROWS: tl.constexpr):
    """One head's sink, packed: in one sequence. It is a key whose value is zero, so its ds is -p delta."""
    index = tl.program_id(0) // nheads
    head = tl.program_id(0) % nheads
    if cu_seqlens_ptr is None:
        length = seqlen
        at = lse_ptr + index.to(tl.int64) * lse_stride[0] + head.to(tl.int64) * lse_stride[1]
        padded = (index * nheads + head).to(tl.int64) * head_blocks * BLOCK_M
    else:
        start = tl.load(cu_seqlens_ptr + index)
        length = tl.load(cu_seqlens_ptr + index + 1) - start
        at = lse_ptr + head.to(tl.int64) * lse_stride[1] + start
        padded = (head.to(tl.int64) * head_blocks + start // BLOCK_M + index) * BLOCK_M
    sink = tl.load(sink_ptr + tl.program_id(0))
    total = tl.zeros([ROWS], tl.float32)
    for begin in range(0, length, ROWS):
        rows = begin + tl.arange(0, ROWS)
        lse = tl.load(at + rows, mask=rows < length, other=float("-inf"))
        minus_delta = tl.load(minus_delta_ptr + padded + rows, mask=rows < length, other=0.0)
        p = tl.where(lse == float("-inf"), 0.0, tl.exp(sink - lse))
        total += p * minus_delta
    tl.store(dsink_ptr + tl.program_id(0), tl.sum(total))
