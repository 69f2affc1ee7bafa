"""Packed tokens after the last sequence: nobody owns them, so their rows are written here."""

from __future__ import annotations

import triton
import triton.language as tl


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
