"""Before a pass over segments, in plain Triton: every row's leader, and the blocks that a tile's segments meet.

A row's leader is the number of the first query of its segment, so that pairs of one segment are pairs of one leader,
whatever integers name the segments. A key that no query sees has the leader -1, which no query has.
"""

from __future__ import annotations

import triton
import triton.language as tl

NOBODY = tl.constexpr(1 << 30)


@triton.jit
def first_match(own, rows, queries_ptr, begin, end, seqlen_q, lower, upper, BANDED: tl.constexpr, CHUNK: tl.constexpr,
                SHORT: tl.constexpr, PART: tl.constexpr):
    """For each row the first query in [begin, end) of its segment, BANDED: that the band leaves; or NOBODY.

    SHORT queries at a time, and only those whose segments can be among ours; a CHUNK none of whose can is passed over.
    Past the end the last query stands again, which changes no smallest and no largest.
    """
    low, high = tl.min(own), tl.max(own)
    first = tl.full(own.shape, NOBODY, tl.int32)
    missing = 1
    at = begin // CHUNK * CHUNK
    while (at < end) & (missing > 0):
        step = SHORT
        if at % CHUNK == 0:
            chunk = tl.load(queries_ptr + tl.minimum(at + tl.arange(0, CHUNK), seqlen_q - 1))
            step = tl.where((tl.min(chunk) <= high) & (tl.max(chunk) >= low), SHORT, CHUNK)
        if step == SHORT:
            short = tl.load(queries_ptr + tl.minimum(at + tl.arange(0, SHORT), seqlen_q - 1))
            if (tl.min(short) <= high) & (tl.max(short) >= low):
                for part in range(at, at + SHORT, PART):
                    i = tl.minimum(part + tl.arange(0, PART), seqlen_q - 1)
                    same = own[:, None] == tl.load(queries_ptr + i)[None, :]
                    if BANDED:
                        distance = rows[:, None] - i[None, :]
                        same &= (distance >= lower) & (distance <= upper)
                    first = tl.minimum(first, tl.min(tl.where(same, i[None, :], NOBODY), 1))
                missing = tl.max((first == NOBODY).to(tl.int32))
        at += step
    return first


@triton.jit
def load_block(ptr, stride, batch, block, length, ROWS: tl.constexpr):
    """Segments of ROWS rows, and where they are; past the end the last row's."""
    rows = block * ROWS + tl.arange(0, ROWS)
    return tl.load(ptr + tl.cast(batch, tl.int64) * stride + tl.minimum(rows, length - 1)), rows


@triton.jit
def leaders_kernel(segments_q_ptr, segments_k_ptr, leaders_q_ptr, leaders_k_ptr, unseen_ptr, seqlen_q, seqlen_k,
                   stride_k, lower, upper, blocks_q, blocks_k, ROWS: tl.constexpr, CHUNK: tl.constexpr,
                   SHORT: tl.constexpr, PART: tl.constexpr):
    """leaders (batch, seqlen) of queries and keys, and whether a block of ROWS keys has some that no query sees.

    Grid: (blocks_q + blocks_k) * batch.
    """
    batch = tl.program_id(0) // (blocks_q + blocks_k)
    block = tl.program_id(0) % (blocks_q + blocks_k)
    queries_ptr = segments_q_ptr + tl.cast(batch, tl.int64) * seqlen_q
    if block < blocks_q:
        own, rows = load_block(segments_q_ptr, seqlen_q, batch, block, seqlen_q, ROWS)
        leader = first_match(own, rows, queries_ptr, 0, seqlen_q, seqlen_q, 0, 0, False, CHUNK, SHORT, PART)
        tl.store(leaders_q_ptr + tl.cast(batch, tl.int64) * seqlen_q + rows, leader, mask=rows < seqlen_q)
    else:
        block -= blocks_q
        own, rows = load_block(segments_k_ptr, stride_k, batch, block, seqlen_k, ROWS)
        leader = first_match(own, rows, queries_ptr, 0, seqlen_q, seqlen_q, 0, 0, False, CHUNK, SHORT, PART)
        begin = tl.maximum(block * ROWS - upper, 0)
        end = tl.minimum((block + 1) * ROWS - lower, seqlen_q)
        seen = first_match(own, rows, queries_ptr, begin, end, seqlen_q, lower, upper, True, CHUNK, SHORT, PART)
        leader = tl.where(seen == NOBODY, -1, leader)
        tl.store(leaders_k_ptr + tl.cast(batch, tl.int64) * seqlen_k + rows, leader, mask=rows < seqlen_k)
        tl.store(unseen_ptr + batch * blocks_k + block, tl.max(((leader < 0) & (rows < seqlen_k)).to(tl.int32)))


@triton.jit
def meetings_kernel(own_ptr, others_ptr, meetings_ptr, own_length, other_length, own_blocks, OWN: tl.constexpr,
                    OWN_POWER: tl.constexpr, OTHER: tl.constexpr, CHUNK: tl.constexpr):
    """Of each block of OWN rows, as four int32: the other side's blocks [first, last) that can share a segment with it.

    Of them [full_first, full_last) are all of the one segment that the block is of. Grid: own_blocks * batch.
    """
    batch = tl.program_id(0) // own_blocks
    block = tl.program_id(0) % own_blocks
    rows = block * OWN + tl.minimum(tl.arange(0, OWN_POWER), OWN - 1)
    own = tl.load(own_ptr + tl.cast(batch, tl.int64) * own_length + tl.minimum(rows, own_length - 1))
    low, high = tl.min(own), tl.max(own)
    others_ptr += tl.cast(batch, tl.int64) * other_length
    blocks = (other_length + OTHER - 1) // OTHER
    first, last, full_first, full_last = NOBODY + 0, 0, NOBODY + 0, blocks
    for begin in range(0, blocks, CHUNK):
        number = begin + tl.arange(0, CHUNK)
        at = number[:, None] * OTHER + tl.arange(0, OTHER)[None, :]
        leaders = tl.load(others_ptr + tl.minimum(at, other_length - 1))
        lowest, highest = tl.min(leaders, 1), tl.max(leaders, 1)
        meets = (lowest <= high) & (highest >= low) & (number < blocks)
        first = tl.minimum(first, tl.min(tl.where(meets, number, NOBODY)))
        last = tl.maximum(last, tl.max(tl.where(meets, number + 1, 0)))
        full = (lowest == low) & (highest == low) & (low == high) & (number < blocks)
        full_first = tl.minimum(full_first, tl.min(tl.where(full, number, NOBODY)))
        full_last = tl.minimum(full_last, tl.min(tl.where((number > full_first) & ~full, number, NOBODY)))
    meetings_ptr += 4 * tl.program_id(0)
    tl.store(meetings_ptr, first)
    tl.store(meetings_ptr + 1, last)
    tl.store(meetings_ptr + 2, full_first)
    tl.store(meetings_ptr + 3, full_last)
