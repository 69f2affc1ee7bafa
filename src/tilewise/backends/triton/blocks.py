"""Data-dependent masks, scanned once a pass: which tiles are empty (never visited), full (no mask arithmetic), partial.

``block_states_kernel`` looks at every tile of the boolean mask, the segments and the band; ``block_lists_kernel`` then
writes, for each owner block, [number of full tiles, number of partial tiles, the full ones, the partial ones].
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.backends.triton import bands as B  # noqa: N812
from tilewise.backends.triton import primitives as P  # noqa: N812

EMPTY = tl.constexpr(0)
PARTIAL = tl.constexpr(1)
FULL = tl.constexpr(2)


@triton.jit
def block_states_kernel(states_ptr, extras, extra_strides, sizes, num_heads, num_m_blocks, num_n_blocks,
                        MODE: tl.constexpr, TILE: tl.constexpr):
    """Grid: one program for each tile of (batch, heads, query blocks, key blocks), key blocks fastest.

    batch and heads are those of the lists: 1 where the masks do not depend on them.
    """
    program = tl.program_id(0).to(tl.int64)
    n_block = (program % num_n_blocks).to(tl.int32)
    m_block = (program // num_n_blocks % num_m_blocks).to(tl.int32)
    plane = (program // num_n_blocks // num_m_blocks).to(tl.int32)
    i = (m_block * TILE.block_m + tl.arange(0, TILE.block_m))[:, None]
    j = (n_block * TILE.block_n + tl.arange(0, TILE.block_n))[None, :]
    lower, upper = B.band(sizes, sizes.seqlen_q, sizes.seqlen_k, MODE)
    keep = B.keep_pairs(i, j, lower, upper, sizes.seqlen_q, sizes.seqlen_k, MODE)
    kept = tl.sum(keep.to(tl.int32))
    if kept > 0:
        keep = P.keep_listed(keep, i, j, extras, extra_strides, plane // num_heads, plane % num_heads, sizes.seqlen_q,
                             sizes.seqlen_k, MODE)
        kept = tl.sum(keep.to(tl.int32))
    state = tl.where(kept == 0, EMPTY, tl.where(kept == TILE.block_m * TILE.block_n, FULL, PARTIAL))
    tl.store(states_ptr + program, state.to(tl.int8))


@triton.jit
def block_lists_kernel(lists_ptr, states_ptr, num_others, state_stride_owner, state_stride_other, num_owners,
                       BLOCK: tl.constexpr):
    """Grid: one program for each owner block of every (batch, head). Rows of lists hold 2 + num_others entries."""
    program = tl.program_id(0).to(tl.int64)
    states_ptr += program // num_owners * num_owners * num_others + program % num_owners * state_stride_owner
    lists_ptr += program * (num_others + 2)
    written = tl.zeros((), tl.int32)
    for wanted in tl.static_range(2, 0, -1):
        before = written
        for begin in range(0, num_others, BLOCK):
            others = begin + tl.arange(0, BLOCK)
            state = tl.load(states_ptr + others.to(tl.int64) * state_stride_other, mask=others < num_others, other=0)
            chosen = (state == wanted).to(tl.int32)
            slots = written + tl.cumsum(chosen, 0) - chosen
            tl.store(lists_ptr + 2 + slots, others, mask=chosen != 0)
            written += tl.sum(chosen)
        tl.store(lists_ptr + 2 - wanted, written - before)
