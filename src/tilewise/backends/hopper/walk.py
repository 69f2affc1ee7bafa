"""A query tile's walk over its key blocks, last to first, so that a causal tile starts on its diagonal.

The product q k^T of the next block and this one's with v are under way together, and the softmax runs under the
second. p is carried as words and stays out of the waits' operands: there every 16-bit value takes a register of its
own. It becomes words behind the wait for the product before, or the assembler runs all products one after the other.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from tilewise.backends.hopper.barriers import pin, tell_if
from tilewise.backends.hopper.primitives import matrix
from tilewise.backends.hopper.rings import await_turn, let_go, pass_turn, place
from tilewise.backends.hopper.softmax import block_scores, exponentials, finish_rows, new_max, partial_sums, rescaled


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
def as_words(p, DTYPE: gl.constexpr):
    """Probabilities of 16 bits, two neighbours a word: carried through loops one by one, each would take a register."""
    low, high = gl.split(gl.reshape(p, [p.shape[0], p.shape[1] // 2, 2]))
    TEXT: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;" if DTYPE.name == "bf16" else "cvt.rn.f16x2.f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(TEXT, "=r,r,r", [low, high], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def as_operand(words, DTYPE: gl.constexpr, TILE: gl.constexpr):
    """Words of probabilities as the left operand of the product with v. Moves nothing.

    Two words of a thread, of rows 8 apart, become two registers of two numbers; whose row and whose column are named by
    each other's place, and change names again.
    """
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE.wide, 16])
    WORDS: gl.constexpr = words.shape[1]
    upper, lower = gl.inline_asm_elementwise(
        "mov.b32 $0, $2; mov.b32 $1, $3;", "=r,=r,r,r", [words], dtype=(gl.int16, gl.int16), is_pure=True, pack=2
    )
    p = gl.join(upper, lower).reshape([4, 2, 8, WORDS, 2]).permute([0, 4, 2, 3, 1]).reshape([64, 2 * WORDS])
    return gl.convert_layout(p, gl.DotOperandLayout(0, LAYOUT, 2), assert_trivial=True).to(DTYPE, bitcast=True)


@gluon.jit
def first_block(it, q, k_ring, rows, scalars, DTYPE: gl.constexpr, INDEX: gl.constexpr, MODE: gl.constexpr,
                TILE: gl.constexpr):
    """A tile's first block, with nothing to run beside its product."""
    blocks = rows.blocks
    await_turn(INDEX, TILE)
    s = start_scores(q, k_ring, it, TILE)
    pass_turn(INDEX, TILE)
    s = warpgroup_mma_wait(0, deps=(s,))
    let_go_scored(it, blocks.last - blocks.first == 1, INDEX, TILE)
    LAYOUT: gl.constexpr = s.type.layout
    row_sum = partial_sums(gl.zeros(s.shape, gl.float32, layout=LAYOUT))
    row_max = new_max(row_sum, LAYOUT, TILE)
    x, rescale, row_max = block_scores(
        s, row_max, rows.row0, blocks.last - 1, blocks, rows.slope_log2, rows.work, scalars, True, MODE, TILE
    )
    p, row_sum = exponentials(x, rescale, row_sum)
    return as_words(p, DTYPE), row_max, row_sum


@gluon.jit
def step(t, it, q, p, o, row_max, row_sum, k_ring, v_ring, rows, scalars, PARTIAL: gl.constexpr, DTYPE: gl.constexpr,
         INDEX: gl.constexpr, MODE: gl.constexpr, TILE: gl.constexpr):
    """Block t + 1: its whole softmax runs under block t's product with v."""
    blocks = rows.blocks
    await_turn(INDEX, TILE)
    s = start_scores(q, k_ring, it + 1, TILE)
    o = start_product(as_operand(p, DTYPE, TILE), v_ring, it, o, TILE)
    pass_turn(INDEX, TILE)
    s = await_scores(s, TILE)
    let_go_scored(it + 1, t + 2 == blocks.last - blocks.first, INDEX, TILE)
    x, rescale, row_max = block_scores(
        s, row_max, rows.row0, blocks.last - 2 - t, blocks, rows.slope_log2, rows.work, scalars, PARTIAL, MODE, TILE
    )
    p_new, row_sum = exponentials(x, rescale, row_sum)
    if TILE.pinned or PARTIAL:
        row_sum = pin(row_sum)
    o = await_product(o, TILE)
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
    scores' own pass or a mask at both ends of three warpgroups leave none of.
    """
    LOOPS: gl.constexpr = MODE.raw_scale and not (MODE.lower and TILE.consumers == 3)
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
                                   not LOOPS and (MODE.lower or MODE.upper), DTYPE, INDEX, MODE, TILE)
    if LOOPS and MODE.lower:
        p, o, row_max, row_sum = steps(end, last - rows.blocks.first, it, q, p, o, row_max, row_sum, k_ring, v_ring,
                                       rows, scalars, True, DTYPE, INDEX, MODE, TILE)
    return p, o, row_max, row_sum


@gluon.jit
def last_product(it, p, o, row_max, row_sum, v_ring, sink_log2, scalars, DTYPE: gl.constexpr, INDEX: gl.constexpr,
                 MODE: gl.constexpr, TILE: gl.constexpr):
    """The accumulator after a tile's last product with v; lse, and the factor that makes out of it."""
    await_turn(INDEX, TILE)
    o = start_product(as_operand(p, DTYPE, TILE), v_ring, it - 1, o, TILE)
    pass_turn(INDEX, TILE)
    lse, factor = finish_rows(row_max, row_sum, sink_log2, scalars, MODE)
    o = await_product(o, TILE)
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
