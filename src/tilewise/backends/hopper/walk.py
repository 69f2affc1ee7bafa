"""A query tile's walk over its key blocks, last to first, so that a causal tile starts on its diagonal.

The product q k^T of the next block and this one's with v are under way together, and the softmax runs under the
second. p stays out of the waits' operands: there every 16-bit value takes a register of its own.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from tilewise.backends.hopper.barriers import tell
from tilewise.backends.hopper.primitives import matrix
from tilewise.backends.hopper.softmax import block_scores, exponentials, partial_sums, rescaled


@gluon.jit
def start_scores(q, k_ring, it, TILE: gl.constexpr):
    """q k^T of the ``it``-th block, once it is there: one product for each part of the channels."""
    BLOCK_N: gl.constexpr = TILE.block_n
    PARTS: gl.constexpr = TILE.parts
    slot = it % TILE.stages
    mbarrier.wait(k_ring.full.index(slot), (it // TILE.stages) & 1)
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
def start_product(p, v_ring, it, o, TILE: gl.constexpr):
    """o + p v of the ``it``-th block, once it is there."""
    slot = it % TILE.stages
    mbarrier.wait(v_ring.full.index(slot), (it // TILE.stages) & 1)
    return warpgroup_mma(p, matrix(v_ring.slots.index(slot)), o, is_async=True)


@gluon.jit
def let_go_keys(it, TILE: gl.constexpr):
    """The ``it``-th block's k has been read."""
    tell(TILE.keys_barrier + it % TILE.stages, 128 * TILE.consumers + 32)


@gluon.jit
def let_go_values(it, TILE: gl.constexpr):
    """The ``it``-th block's v has been read."""
    tell(TILE.values_barrier + it % TILE.stages, 128 * TILE.consumers + 32)


@gluon.jit
def step(t, it, q, p, o, row_max, row_sum, k_ring, v_ring, row0, blocks, slope_log2, work, scalars,
         DTYPE: gl.constexpr, MODE: gl.constexpr, TILE: gl.constexpr):
    """Block t + 1: its whole softmax runs under block t's product with v."""
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, o.type.layout, 2)
    s = start_scores(q, k_ring, it + 1, TILE)
    o = start_product(p, v_ring, it, o, TILE)
    s = warpgroup_mma_wait(1, deps=(s,))
    let_go_keys(it + 1, TILE)
    x, rescale, row_max = block_scores(
        s, row_max, row0, blocks.last - 2 - t, blocks, slope_log2, work, scalars, MODE.lower or MODE.upper, MODE, TILE
    )
    p_new, row_sum = exponentials(x, rescale, row_sum)
    o = warpgroup_mma_wait(0, deps=(o,))
    let_go_values(it, TILE)
    p = gl.convert_layout(p_new.to(DTYPE), P_LAYOUT, assert_trivial=True)
    return p, rescaled(o, rescale, TILE), row_max, row_sum


@gluon.jit
def walk(count, it, q, k_ring, v_ring, row0, blocks, slope_log2, work, scalars, DTYPE: gl.constexpr,
         S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr, MODE: gl.constexpr, TILE: gl.constexpr):
    """All blocks, up to the last one's product with v, which is left to the caller."""
    BLOCK_DV: gl.constexpr = TILE.block_dv
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    s = start_scores(q, k_ring, it, TILE)
    o = gl.zeros([64, BLOCK_DV], gl.float32, layout=O_LAYOUT)
    row_max = gl.full([64], float("-inf"), gl.float32, layout=gl.SliceLayout(1, S_LAYOUT))
    s = warpgroup_mma_wait(0, deps=(s,))
    let_go_keys(it, TILE)
    row_sum = partial_sums(gl.zeros(s.shape, gl.float32, layout=S_LAYOUT))
    x, rescale, row_max = block_scores(
        s, row_max, row0, blocks.last - 1, blocks, slope_log2, work, scalars, True, MODE, TILE
    )
    p, row_sum = exponentials(x, rescale, row_sum)
    p = gl.convert_layout(p.to(DTYPE), P_LAYOUT, assert_trivial=True)
    for t in range(0, count - 1):
        p, o, row_max, row_sum = step(t, it + t, q, p, o, row_max, row_sum, k_ring, v_ring, row0, blocks, slope_log2,
                                      work, scalars, DTYPE, MODE, TILE)
    return o, p, row_max, row_sum
