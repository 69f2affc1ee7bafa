"""A query tile's walk over its key blocks, last to first, so that a causal tile starts on its diagonal.

The product q k^T of the next block and this one's with v are under way together, and the softmax runs under the
second. p is carried as words and stays out of the waits' operands: there every 16-bit value takes a register of its
own. It becomes words behind the wait for the product before, or the assembler runs all products one after the other.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from tilewise.backends.hopper.barriers import tell_if
from tilewise.backends.hopper.kept_segments import zero_unseen
from tilewise.backends.hopper.primitives import matrix
from tilewise.backends.hopper.products import (
    as_operand,
    as_words,
    await_k,
    await_product,
    await_scores,
    halved_products,
    start_product,
    start_scores,
    zero_out,
)
from tilewise.backends.hopper.rings import await_turn, let_go, pass_turn, place
from tilewise.backends.hopper.softmax import (
    ALL,
    FREE,
    block_scores,
    exponentials,
    finish_rows,
    new_max,
    partial_sums,
    rescaled,
)


@gluon.jit
def let_go_scored(it, last, INDEX: gl.constexpr, TILE: gl.constexpr):
    """The ``it``-th block's k has been read, and so has q if it is the tile's last."""
    let_go(it, TILE.keys_barrier, TILE)
    if not TILE.q_in_registers:
        tell_if(last, TILE.queries_barrier + INDEX, 160)


@gluon.jit
def only_seen(it, block, v_ring, rows, TILE: gl.constexpr):
    """Zeros for the values of the ``it``-th block, number ``block`` of its sequence, that no query sees."""
    blocks = rows.blocks
    if block >= blocks.full_last or block < blocks.full_first:
        if gl.load(rows.unseen + block) != 0:
            slot, phase = place(it, TILE.stages)
            mbarrier.wait(v_ring.full.index(slot), phase & 1)
            v = matrix(v_ring.slots.index(slot))
            zero_unseen(v, rows.leaders_k, block * TILE.block_n, rows.work.k.length, 0, TILE.block_n)


@gluon.jit
def first_block(it, q, k_ring, rows, scalars, DTYPE: gl.constexpr, INDEX: gl.constexpr, MODE: gl.constexpr,
                TILE: gl.constexpr):
    """A tile's first block, with nothing to run beside its product."""
    blocks = rows.blocks
    await_turn(INDEX, TILE)
    s = start_scores(q, k_ring, await_k(k_ring, it, TILE), 0, TILE.block_n, TILE)
    pass_turn(INDEX, TILE)
    s = warpgroup_mma_wait(0, deps=(s,))
    let_go_scored(it, blocks.last - blocks.first == 1, INDEX, TILE)
    LAYOUT: gl.constexpr = s.type.layout
    row_sum = partial_sums(gl.zeros(s.shape, gl.float32, layout=LAYOUT))
    row_max = new_max(row_sum, LAYOUT, TILE)
    x, rescale, row_max = block_scores(s, row_max, blocks.last - 1, rows, scalars, True, MODE, TILE)
    p, row_sum = exponentials(x, rescale, row_sum, FREE)
    return as_words(p, DTYPE), row_max, row_sum


@gluon.jit
def step(t, it, q, p, o, row_max, row_sum, k_ring, v_ring, rows, scalars, PARTIAL: gl.constexpr, DTYPE: gl.constexpr,
         INDEX: gl.constexpr, MODE: gl.constexpr, TILE: gl.constexpr):
    """Block t + 1: its whole softmax runs under block t's product with v."""
    blocks = rows.blocks
    if MODE.segments:
        only_seen(it, blocks.last - 1 - t, v_ring, rows, TILE)
    if TILE.halved:
        s, o = halved_products(it, q, as_operand(p, DTYPE, TILE), o, k_ring, v_ring, INDEX, TILE)
    else:
        await_turn(INDEX, TILE)
        s = start_scores(q, k_ring, await_k(k_ring, it + 1, TILE), 0, TILE.block_n, TILE)
        o = start_product(as_operand(p, DTYPE, TILE), v_ring, it, o, TILE)
        pass_turn(INDEX, TILE)
        s = await_scores(s, TILE)
    let_go_scored(it + 1, t + 2 == blocks.last - blocks.first, INDEX, TILE)
    x, rescale, row_max = block_scores(s, row_max, blocks.last - 2 - t, rows, scalars, PARTIAL, MODE, TILE)
    p_new, row_sum = exponentials(x, rescale, row_sum, FREE if TILE.halved else ALL if PARTIAL else TILE.held)
    if not TILE.halved:
        o = await_product(o, 0, TILE)
        let_go(it, TILE.values_barrier, TILE)
    return as_words(p_new, DTYPE), [rescaled(part, rescale, TILE) for part in o], row_max, row_sum


@gluon.jit
def steps(begin, end, it, q, p, o, row_max, row_sum, k_ring, v_ring, rows, scalars, PARTIAL: gl.constexpr,
          DTYPE: gl.constexpr, INDEX: gl.constexpr, MODE: gl.constexpr, TILE: gl.constexpr):
    """Steps [begin, end) of a tile, of which some may need the mask (PARTIAL) or none does."""
    for t in range(begin, end):
        p, o, row_max, row_sum = step(t, it + t, q, p, o, row_max, row_sum, k_ring, v_ring, rows, scalars, PARTIAL,
                                      DTYPE, INDEX, MODE, TILE)
    return p, o, row_max, row_sum


@gluon.jit
def walk(it, q, p, row_max, row_sum, k_ring, v_ring, rows, scalars, DTYPE: gl.constexpr, INDEX: gl.constexpr,
         MODE: gl.constexpr, TILE: gl.constexpr):
    """All blocks but the first, up to the last one's product with v, which is left to the caller.

    Those that need no mask have a loop of their own, without a branch to the mask, unless that takes registers that the
    scores' own pass leaves none of, or the tile's windows have one loop.
    """
    LOOPS: gl.constexpr = MODE.raw_scale and not (MODE.lower and TILE.one_loop) and not MODE.segments
    last = rows.blocks.last - 1
    o = zero_out(TILE)
    begin = 0
    end = last - rows.blocks.first
    if LOOPS and MODE.upper:
        begin = gl.maximum(last - rows.blocks.full_last, 0)
        p, o, row_max, row_sum = steps(0, begin, it, q, p, o, row_max, row_sum, k_ring, v_ring, rows, scalars, True,
                                       DTYPE, INDEX, MODE, TILE)
    if LOOPS and MODE.lower:
        end = gl.maximum(last - rows.blocks.full_first, begin)
    p, o, row_max, row_sum = steps(begin, end, it, q, p, o, row_max, row_sum, k_ring, v_ring, rows, scalars,
                                   not LOOPS and (MODE.lower or MODE.upper or MODE.segments), DTYPE, INDEX, MODE, TILE)
    if LOOPS and MODE.lower:
        p, o, row_max, row_sum = steps(end, last - rows.blocks.first, it, q, p, o, row_max, row_sum, k_ring, v_ring,
                                       rows, scalars, True, DTYPE, INDEX, MODE, TILE)
    return p, o, row_max, row_sum


@gluon.jit
def last_product(it, p, o, row_max, row_sum, v_ring, rows, sink_log2, scalars, DTYPE: gl.constexpr,
                 INDEX: gl.constexpr, MODE: gl.constexpr, TILE: gl.constexpr):
    """The accumulator after a tile's last product with v; lse, and the factor that makes out of it."""
    if MODE.segments:
        only_seen(it - 1, rows.blocks.first, v_ring, rows, TILE)
    await_turn(INDEX, TILE)
    o = start_product(as_operand(p, DTYPE, TILE), v_ring, it - 1, o, TILE)
    pass_turn(INDEX, TILE)
    lse, factor = finish_rows(row_max, row_sum, sink_log2, scalars, MODE)
    o = await_product(o, 0, TILE)
    let_go(it - 1, TILE.values_barrier, TILE)
    return o, lse, factor


@gluon.jit
def leave_out(it, count, k_ring, v_ring, INDEX: gl.constexpr, TILE: gl.constexpr):
    """Let ``count`` blocks go that other rows of the tile see, but not these; the number of the block after them."""
    for t in range(it, it + count):
        slot, phase = place(t, TILE.stages)
        await_turn(INDEX, TILE)
        pass_turn(INDEX, TILE)
        mbarrier.wait(k_ring.full.index(slot), phase & 1)
        let_go(t, TILE.keys_barrier, TILE)
        mbarrier.wait(v_ring.full.index(slot), phase & 1)
        let_go(t, TILE.values_barrier, TILE)
    return it + count
