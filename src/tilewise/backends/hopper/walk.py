"""A query tile's walk over its key blocks, last to first, so that a causal tile starts on its diagonal.

The product q k^T of the next block and this one's with v are under way together, and the softmax runs under the
second. p stays out of the waits' operands: there every 16-bit value takes a register of its own.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from tilewise.backends.hopper.barriers import pin, tell_if
from tilewise.backends.hopper.primitives import matrix
from tilewise.backends.hopper.rings import let_go, place
from tilewise.backends.hopper.softmax import block_scores, exponentials, new_max, partial_sums, rescaled


@gluon.jit
def start_scores(q, k_ring, it, TILE: gl.constexpr):
    """q k^T of the ``it``-th block, once it is there: one product for each part of the channels."""
    BLOCK_N: gl.constexpr = TILE.block_n
    PARTS: gl.constexpr = TILE.parts
    slot, phase = place(it, TILE.stages)
    mbarrier.wait(k_ring.full.index(slot), phase & 1)
    s = gl.zeros([64, BLOCK_N], gl.float32, layout=gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16]))
    for i in gl.static_range(PARTS):
        k = real_channels(k_ring.slots.index(slot * PARTS + i), i, TILE)
        s = warpgroup_mma(q[i], k.permute((1, 0)), s, use_acc=i > 0, is_async=True)
    return s


@gluon.jit
def real_channels(tile, PART: gl.constexpr, TILE: gl.constexpr):
    """A part of q or k without the channels that only pad it."""
    WIDTH: gl.constexpr = min(tile.shape[-1], TILE.block_d - PART * tile.shape[-1])
    return matrix(tile).slice(0, WIDTH, 1)


@gluon.jit
def zero_out(TILE: gl.constexpr):
    """The accumulator, as a wide and a narrow part if its columns are three quarters of a power of two."""
    WIDE: gl.constexpr = TILE.wide
    NARROW: gl.constexpr = TILE.narrow
    wide = gl.zeros([64, WIDE], gl.float32, layout=gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 16]))
    if NARROW == 0:
        return (wide,)
    else:
        LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, NARROW, 16])
        return wide, gl.zeros([64, NARROW], gl.float32, layout=LAYOUT)


@gluon.jit
def start_product(p, v_ring, it, o, TILE: gl.constexpr):
    """o + p v of the ``it``-th block, once it is there."""
    slot, phase = place(it, TILE.stages)
    mbarrier.wait(v_ring.full.index(slot), phase & 1)
    v = matrix(v_ring.slots.index(slot))
    if TILE.narrow == 0:
        return (warpgroup_mma(p, v, o[0], is_async=True),)
    else:
        NARROW: gl.constexpr = gl.DotOperandLayout(0, o[1].type.layout, 2)
        wide = warpgroup_mma(p, v.slice(0, TILE.wide, 1), o[0], is_async=True)
        p = gl.convert_layout(p, NARROW, assert_trivial=True)
        return wide, warpgroup_mma(p, v.slice(TILE.wide, TILE.narrow, 1), o[1], is_async=True)


@gluon.jit
def await_product(o, TILE: gl.constexpr):
    """The accumulator, once its product is done."""
    if TILE.narrow == 0:
        return (warpgroup_mma_wait(0, deps=o),)
    else:
        return warpgroup_mma_wait(0, deps=o)


@gluon.jit
def await_scores(s, TILE: gl.constexpr):
    """Scores, once they are done; the product started after them goes on."""
    AFTER: gl.constexpr = 1 if TILE.narrow == 0 else 2
    return warpgroup_mma_wait(AFTER, deps=(s,))


@gluon.jit
def let_go_scored(it, last, INDEX: gl.constexpr, TILE: gl.constexpr):
    """The ``it``-th block's k has been read, and so has q if it is the tile's last."""
    let_go(it, TILE.keys_barrier, TILE)
    if not TILE.q_in_registers:
        tell_if(last, TILE.queries_barrier + INDEX, 160)


@gluon.jit
def as_operand(p, DTYPE: gl.constexpr, TILE: gl.constexpr):
    """Probabilities as the left operand of the product with v; no data moves."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE.wide, 16])
    return gl.convert_layout(p.to(DTYPE), gl.DotOperandLayout(0, LAYOUT, 2), assert_trivial=True)


@gluon.jit
def first_block(it, q, k_ring, rows, scalars, DTYPE: gl.constexpr, INDEX: gl.constexpr, MODE: gl.constexpr,
                TILE: gl.constexpr):
    """Block 0, with nothing to run beside its products."""
    blocks = rows.blocks
    s = start_scores(q, k_ring, it, TILE)
    s = warpgroup_mma_wait(0, deps=(s,))
    let_go_scored(it, blocks.last - blocks.first == 1, INDEX, TILE)
    LAYOUT: gl.constexpr = s.type.layout
    row_sum = partial_sums(gl.zeros(s.shape, gl.float32, layout=LAYOUT))
    row_max = new_max(row_sum, LAYOUT, TILE)
    x, rescale, row_max = block_scores(
        s, row_max, rows.row0, blocks.last - 1, blocks, rows.slope_log2, rows.work, scalars, True, MODE, TILE
    )
    p, row_sum = exponentials(x, rescale, row_sum)
    return as_operand(p, DTYPE, TILE), row_max, row_sum


@gluon.jit
def step(t, it, q, p, o, row_max, row_sum, k_ring, v_ring, rows, scalars, DTYPE: gl.constexpr, INDEX: gl.constexpr,
         MODE: gl.constexpr, TILE: gl.constexpr):
    """Block t + 1: its whole softmax runs under block t's product with v."""
    blocks = rows.blocks
    s = start_scores(q, k_ring, it + 1, TILE)
    o = start_product(p, v_ring, it, o, TILE)
    s = await_scores(s, TILE)
    let_go_scored(it + 1, t + 2 == blocks.last - blocks.first, INDEX, TILE)
    x, rescale, row_max = block_scores(
        s, row_max, rows.row0, blocks.last - 2 - t, blocks, rows.slope_log2, rows.work, scalars,
        MODE.lower or MODE.upper, MODE, TILE,
    )  # fmt: skip
    p_new, row_sum = exponentials(x, rescale, row_sum)
    row_sum = pin(row_sum)
    o = await_product(o, TILE)
    let_go(it, TILE.values_barrier, TILE)
    return as_operand(p_new, DTYPE, TILE), [rescaled(part, rescale, TILE) for part in o], row_max, row_sum


@gluon.jit
def walk(it, q, k_ring, v_ring, rows, scalars, DTYPE: gl.constexpr, INDEX: gl.constexpr, MODE: gl.constexpr,
         TILE: gl.constexpr):
    """All blocks, up to the last one's product with v, which is left to the caller."""
    p, row_max, row_sum = first_block(it, q, k_ring, rows, scalars, DTYPE, INDEX, MODE, TILE)
    o = zero_out(TILE)
    for t in range(0, rows.blocks.last - rows.blocks.first - 1):
        p, o, row_max, row_sum = step(t, it + t, q, p, o, row_max, row_sum, k_ring, v_ring, rows, scalars, DTYPE,
                                      INDEX, MODE, TILE)
    return p, o, row_max, row_sum
