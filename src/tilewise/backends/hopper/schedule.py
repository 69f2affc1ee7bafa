"""The tile table of the packed form, made on the device so that no length is read by the host."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def table_kernel(cu_seqlens_ptr, table_ptr, batch, BLOCK: tl.constexpr, LAST_FIRST: tl.constexpr, CHUNK: tl.constexpr):
    """One program for each sequence: its blocks of BLOCK rows behind those of the sequences before.

    table: [number of slots, 0, sequence and block of slot 0, of slot 1, ...], int32.
    """
    sequence = tl.program_id(0)
    first = 0
    for begin in range(0, sequence, CHUNK):
        at = begin + tl.arange(0, CHUNK)
        start = tl.load(cu_seqlens_ptr + at, mask=at < sequence, other=0)
        stop = tl.load(cu_seqlens_ptr + at + 1, mask=at < sequence, other=0)
        first += tl.sum((stop - start + BLOCK - 1) // BLOCK)
    length = tl.load(cu_seqlens_ptr + sequence + 1) - tl.load(cu_seqlens_ptr + sequence)
    blocks = (length + BLOCK - 1) // BLOCK
    for begin in range(0, blocks, CHUNK):
        at = begin + tl.arange(0, CHUNK)
        slot = table_ptr + 2 + 2 * (first + at)
        tl.store(slot, sequence, mask=at < blocks)
        tl.store(slot + 1, blocks - 1 - at if LAST_FIRST else at, mask=at < blocks)
    if sequence == batch - 1:
        tl.store(table_ptr, first + blocks)
