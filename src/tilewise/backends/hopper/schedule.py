"""Before a packed pass: its tile table, made on the device so that no length is read by the host, and zeros where no
tile writes.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents


@triton.jit
def schedule_kernel(cu_seqlens_ptr, table_ptr, first_ptr, second_ptr, lse_ptr, batch, total, nheads, first_width,
                    second_width, BLOCK: tl.constexpr, LAST_FIRST: tl.constexpr, CHUNK: tl.constexpr,
                    ROWS: tl.constexpr, COLS: tl.constexpr, EARLY: tl.constexpr):
    """One program for each sequence, and behind them one for every ROWS of the ``total`` tokens.

    table: [number of slots, 0, sequence and block of slot 0, of slot 1, ...], int32. Tokens beyond the last offset get
    zeros in first (total, first_width) and second, and -inf in lse (nheads, total); None is left out. EARLY: the next
    launch is.
    """
    if EARLY:
        gdc_launch_dependents()
    program = tl.program_id(0)
    if program < batch:
        list_tiles(program, cu_seqlens_ptr, table_ptr, batch, BLOCK, LAST_FIRST, CHUNK)
    else:
        end = tl.load(cu_seqlens_ptr + batch)
        row = (program - batch) * ROWS
        if row + ROWS > end:
            if first_ptr is not None:
                clear_rows(first_ptr, row, end, total, first_width, ROWS, COLS)
            if second_ptr is not None:
                clear_rows(second_ptr, row, end, total, second_width, ROWS, COLS)
            if lse_ptr is not None:
                empty_rows(lse_ptr, row, end, total, nheads, ROWS)


@triton.jit
def list_tiles(sequence, cu_seqlens_ptr, table_ptr, batch, BLOCK: tl.constexpr, LAST_FIRST: tl.constexpr,
               CHUNK: tl.constexpr):
    """A sequence's blocks of BLOCK rows, behind those of longer sequences."""
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
        tl.store(table_ptr + 1, 0)
        if total == 0:  # backward.find_keys_ahead looks at slot 0 even then
            tl.store(table_ptr + 2, 0)
            tl.store(table_ptr + 3, 0)


@triton.jit
def clear_rows(ptr, row, end, total, width, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Zeros in those of ROWS rows that are not before ``end``."""
    rows = row + tl.arange(0, ROWS)
    beyond = (rows >= end) & (rows < total)
    for begin in range(0, width, COLS):
        cols = begin + tl.arange(0, COLS)
        at = ptr + rows.to(tl.int64)[:, None] * width + cols[None, :]
        zeros = tl.zeros([ROWS, COLS], ptr.dtype.element_ty)
        tl.store(at, zeros, mask=beyond[:, None] & (cols < width)[None, :])


@triton.jit
def empty_rows(lse_ptr, row, end, total, nheads, ROWS: tl.constexpr):
    """The lse of no keys, likewise, for every head."""
    rows = row + tl.arange(0, ROWS)
    at = lse_ptr + rows
    for _ in range(0, nheads):
        tl.store(at, tl.full([ROWS], float("-inf"), tl.float32), mask=(rows >= end) & (rows < total))
        at += total
