"""Where a program works: its block, channel part, head and sequence, from its number in a one-dimensional grid."""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.backends.triton import primitives as P  # noqa: N812

PROBES = tl.constexpr(128)  # offsets that one step of a search looks at


@triton.jit
def divided(number, divisor):
    """number // divisor by a product: 2 number multiplier / 2**(32 + shift), rounded down (arguments.divisor_of)."""
    high = tl.umulhi(number.to(tl.uint32) * 2, divisor.multiplier.to(tl.uint32, bitcast=True))
    return (high >> divisor.shift.to(tl.uint32)).to(tl.int32)


@triton.jit
def key_head(head, sizes, CUBE: tl.constexpr):
    """The head of k and v for a query head."""
    if CUBE:
        return divided(head, sizes.by_group)
    else:
        return head // sizes.group


@triton.jit
def packed_sequence(slot, cu_seqlens, batch, BLOCK: tl.constexpr):
    """The sequence that owns a slot, and the slot's number within it.

    Sequence b owns the slots from cu_seqlens[b] // BLOCK + b on. That is room for all its blocks of BLOCK tokens, and
    no more than one slot too many, without the sum of the block numbers of those before it.
    """
    low = tl.zeros((), tl.int32)
    size = batch
    while size > 1:
        stride = tl.cdiv(size, PROBES)
        probes = low + tl.arange(0, PROBES) * stride
        valid = probes < low + size
        tokens = tl.load(cu_seqlens + probes, mask=valid, other=0)
        begun = valid & ((tokens // BLOCK).to(tl.int32) + probes <= slot)
        reached = tl.maximum(tl.sum(begun.to(tl.int32)) - 1, 0) * stride
        size = tl.minimum(stride, size - reached)
        low += reached
    return low, slot - (tl.load(cu_seqlens + low) // BLOCK).to(tl.int32) - low


@triton.jit
def place(cu_seqlens, sizes, seqlen, total, heads, PARTS: tl.constexpr, BLOCK: tl.constexpr, LAST_FIRST: tl.constexpr,
          VARLEN: tl.constexpr, HALVES: tl.constexpr = False, CUBE: tl.constexpr = False):
    """(block, part, head, sequence, the sequence's first token and length) of this program.

    Heads of all sequences, or of the packed tokens, are taken ``sizes.together`` at a time: first the first block of
    each, then the second of each and so on. So what a head's blocks share stays in the L2 cache, and where work differs
    from block to block the programs that start last have little of it. Packed tokens have as many blocks as
    plans.programs says; one too many is outside of its sequence. HALVES: one half of the heads starts with its first
    blocks and the other ends with them. CUBE, for query heads: the grid's dimensions are heads that are taken
    together, blocks, and rounds of such heads, which saves divisions; a program of the last round without a head gets
    block -1.
    """
    if VARLEN:
        units = heads * PARTS
    else:
        units = heads * PARTS * sizes.batch
    if CUBE:
        unit = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
        block = tl.program_id(1)
    else:
        program = tl.program_id(0)
        if VARLEN:
            num_blocks = total // BLOCK + sizes.batch
        else:
            num_blocks = tl.cdiv(seqlen, BLOCK)
        before = program // (sizes.together * num_blocks) * sizes.together
        together = tl.minimum(sizes.together, units - before)
        program -= before * num_blocks
        block = program // together
        unit = before + program % together
    part = unit % PARTS
    if CUBE:
        sequence = divided(unit // PARTS, sizes.by_nheads)
    else:
        sequence = unit // PARTS // heads
    head = unit // PARTS - sequence * heads
    if VARLEN:
        sequence, block = packed_sequence(block, cu_seqlens, sizes.batch, BLOCK)
    start, length = P.sequence(cu_seqlens, sequence, seqlen, VARLEN)
    if LAST_FIRST:
        mirrored = tl.cdiv(length, BLOCK) - 1 - block
        if HALVES:
            block = tl.where(unit < units // 2, block, mirrored)
        else:
            block = mirrored
    if CUBE:
        block = tl.where(unit < units, block, -1)
    return block, part, head, sequence, start, length
