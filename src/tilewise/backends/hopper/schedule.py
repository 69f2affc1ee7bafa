"""The packed form's tile table, made on the device so that no length is read by the host, and what no tile writes."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def table_kernel(cu_seqlens_ptr, table_ptr, batch, BLOCK: tl.constexpr, LAST_FIRST: tl.constexpr, CHUNK: tl.constexpr):
    """One program for each sequence: its blocks of BLOCK rows behind those of longer sequences.

    table: [number of slots, 0, sequence and block of slot 0, of slot 1, ...], int32.
    """
    sequence = tl.program_id(0)
    length = tl.load(cu_seqlens_ptr + sequence + 1) - tl.load(cu_seqlens_ptr + sequence)
    first = 0
    total = 0
    for begin in range(0, batch, CHUNK):
        at = begin + tl.arange(0, CHUNK)
        start = tl.load(cu_seqlens_ptr + at, mask=at < batch, other=0)
        lengths = tl.load(cu_seqlens_ptr + at + 1, mask=at < batch, other=0) - start
        blocks = (lengths + BLOCK - 1) // BLOCK
        before = (lengths > length) | ((lengths == length) & (at < sequence))
        first += tl.sum(tl.where(before & (at < batch), blocks, 0))
        total += tl.sum(tl.where(at < batch, blocks, 0))
    mine = (length + BLOCK - 1) // BLOCK
    for begin in range(0, mine, CHUNK):
        at = begin + tl.arange(0, CHUNK)
        slot = table_ptr + 2 + 2 * (first + at)
        tl.store(slot, sequence, mask=at < mine)
        tl.store(slot + 1, mine - 1 - at if LAST_FIRST else at, mask=at < mine)
    if sequence == 0:
        tl.store(table_ptr, total)


@triton.jit
def clear_kernel(out_ptr, lse_ptr, cu_seqlens_ptr, batch, total, nheads, width, ROWS: tl.constexpr, COLS: tl.constexpr):
    """out (total, width) 0 and lse (nheads, total) -inf for tokens beyond the last offset; programs before it stop.

    Without lse only out is written.
    """
    end = tl.load(cu_seqlens_ptr + batch)
    first = tl.program_id(0) * ROWS
    if first + ROWS > end:
        rows = first + tl.arange(0, ROWS)
        beyond = (rows >= end) & (rows < total)
        for begin in range(0, width, COLS):
            cols = begin + tl.arange(0, COLS)
            at = out_ptr + rows.to(tl.int64)[:, None] * width + cols[None, :]
            zeros = tl.zeros([ROWS, COLS], out_ptr.dtype.element_ty)
            tl.store(at, zeros, mask=beyond[:, None] & (cols < width)[None, :])
        if lse_ptr is not None:
            at_head = lse_ptr + rows
            for _ in range(0, nheads):
                tl.store(at_head, tl.full([ROWS], float("-inf"), tl.float32), mask=beyond)
                at_head += total
