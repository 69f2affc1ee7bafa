"""The two products of the forward's walk: scores q k^T and out p v.

The tiles that are no powers of two fall into parts: the channels of q k^T, the columns of out, or, where registers are
short, the keys of the scores.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from tilewise.backends.hopper.primitives import matrix
from tilewise.backends.hopper.rings import await_turn, let_go, pass_turn, place


@gluon.jit
def await_k(k_ring, it, TILE: gl.constexpr):
    """The slot of the ``it``-th block's k, once it is there."""
    slot, phase = place(it, TILE.stages)
    mbarrier.wait(k_ring.full.index(slot), phase & 1)
    return slot


@gluon.jit
def start_scores(q, k_ring, slot, FIRST: gl.constexpr, KEYS: gl.constexpr, TILE: gl.constexpr):
    """q k^T of KEYS of a block's keys, from FIRST on: one product for each part of the channels."""
    PARTS: gl.constexpr = TILE.parts
    s = gl.zeros([64, KEYS], gl.float32, layout=gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16]))
    for i in gl.static_range(PARTS):
        k = real_channels(k_ring.slots.index(slot * PARTS + i), i, TILE).slice(FIRST, KEYS, 0)
        s = warpgroup_mma(q[i], k.permute((1, 0)), s, use_acc=i > 0, is_async=True)
    return s


@gluon.jit
def real_channels(tile, PART: gl.constexpr, TILE: gl.constexpr):
    """A part of q or k without the channels that only pad it."""
    WIDTH: gl.constexpr = min(tile.shape[-1], TILE.block_d - PART * tile.shape[-1])
    return matrix(tile).slice(0, WIDTH, 1)


@gluon.jit
def zero_out(TILE: gl.constexpr):
    """The accumulator, as a wide and a narrow part if its columns are no power of two."""
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
def await_product(o, AFTER: gl.constexpr, TILE: gl.constexpr):
    """The accumulator, once its product is done; AFTER: products started after it, which go on."""
    if TILE.narrow == 0:
        return (warpgroup_mma_wait(AFTER, deps=o),)
    else:
        return warpgroup_mma_wait(AFTER, deps=o)


@gluon.jit
def await_scores(s, TILE: gl.constexpr):
    """Scores, once they are done; the product started after them goes on."""
    AFTER: gl.constexpr = 1 if TILE.narrow == 0 else 2
    return warpgroup_mma_wait(AFTER, deps=(s,))


@gluon.jit
def as_words(p, DTYPE: gl.constexpr):
    """Probabilities of 16 bits, two neighbours a word: carried through loops one by one, each would take a register."""
    low, high = gl.split(gl.reshape(p, [p.shape[0], p.shape[1] // 2, 2]))
    TEXT: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;" if DTYPE.name == "bf16" else "cvt.rn.f16x2.f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(TEXT, "=r,r,r", [low, high], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def as_operand(words, DTYPE: gl.constexpr, TILE: gl.constexpr):
    """Words of probabilities as the left operand of the product with v. Moves nothing."""
    return as_left(words, DTYPE, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE.wide, 16]))


@gluon.jit
def as_left(words, DTYPE: gl.constexpr, LAYOUT: gl.constexpr):
    """Words of two neighbours as the left operand of a product with accumulators in LAYOUT.

    Two words of a thread, of rows 8 apart, become two registers of two numbers; whose row and whose column are named by
    each other's place, and change names again.
    """
    WORDS: gl.constexpr = words.shape[1]
    upper, lower = gl.inline_asm_elementwise(
        "mov.b32 $0, $2; mov.b32 $1, $3;", "=r,=r,r,r", [words], dtype=(gl.int16, gl.int16), is_pure=True, pack=2
    )
    p = gl.join(upper, lower).reshape([4, 2, 8, WORDS, 2]).permute([0, 4, 2, 3, 1]).reshape([64, 2 * WORDS])
    return gl.convert_layout(p, gl.DotOperandLayout(0, LAYOUT, 2), assert_trivial=True).to(DTYPE, bitcast=True)


@gluon.jit
def side_by_side(left, right):
    """Two halves of the columns as one; no data moves."""
    COLS: gl.constexpr = 2 * left.shape[1]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 16])
    both = gl.reshape(gl.permute(gl.join(left, right), [0, 2, 1]), [64, COLS])
    return gl.convert_layout(both, LAYOUT, assert_trivial=True)


@gluon.jit
def halves(o):
    """The two halves of the columns; no data moves."""
    COLS: gl.constexpr = o.shape[1] // 2
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 16])
    low, high = gl.split(gl.permute(gl.reshape(o, [64, 2, COLS]), [0, 2, 1]))
    return gl.convert_layout(low, LAYOUT, assert_trivial=True), gl.convert_layout(high, LAYOUT, assert_trivial=True)


@gluon.jit
def halved_products(it, q, p, o, k_ring, v_ring, INDEX: gl.constexpr, TILE: gl.constexpr):
    """The ``it``-th block's product with v, and the next one's scores, both done.

    Half of the scores start beside that product, the others in the registers that p leaves. The next consumer's turn
    comes when the first half is done, so that its products follow without a gap.
    """
    HALF: gl.constexpr = TILE.block_n // 2
    PARTS: gl.constexpr = TILE.parts
    await_turn(INDEX, TILE)
    o = start_product(p, v_ring, it, o, TILE)
    slot = await_k(k_ring, it + 1, TILE)
    left = start_scores(q, k_ring, slot, 0, HALF, TILE)
    o = await_product(o, PARTS, TILE)
    let_go(it, TILE.values_barrier, TILE)
    right = start_scores(q, k_ring, slot, HALF, HALF, TILE)
    left = warpgroup_mma_wait(PARTS, deps=(left,))
    pass_turn(INDEX, TILE)
    left, right = warpgroup_mma_wait(0, deps=(left, right))
    return side_by_side(left, right), o
