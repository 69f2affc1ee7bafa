"""An fp8 tile's walk over its key blocks, last to first.

A consumer does one thing after the other, scores, softmax, product with v, and keeps no more than out and one block in
registers, so that three or four of them fit, which fill each other's gaps. Left alone they would march in step, all at
the tensor cores and then all at the exponentials: so they take turns. Whoever has the turn starts its product with v
and then its next scores, and passes it on. The product with v falls in parts of 64 channels, in the registers that the
scores leave, and starts at zero: see ``forward_fp8.py``.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from tilewise.backends.hopper.barriers import tell
from tilewise.backends.hopper.follow import some_negative
from tilewise.backends.hopper.primitives import matrix
from tilewise.backends.hopper.rings import await_turn, let_go, pass_turn, place
from tilewise.backends.hopper.rows_fp8 import as_operand, descaled, of_stored, times_rows
from tilewise.backends.hopper.softmax_fp8 import block_softmax, new_state
from tilewise.backends.hopper.turn import SLOTS
from tilewise.backends.hopper.works import seen_rows

PART = gl.constexpr(64)  # channels


@gluon.constexpr_function
def product_layout(cols: int) -> Any:
    """64 rows of a product of e4m3, over a warpgroup."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, cols, 32])


@gluon.jit
def scores(q, k_ring, it, TILE: gl.constexpr):
    """q k^T of the ``it``-th block, started."""
    BLOCK_N: gl.constexpr = TILE.block_n
    slot, phase = place(it, TILE.stages)
    mbarrier.wait(k_ring.full.index(slot), phase & 1)
    zeros = gl.zeros([64, BLOCK_N], gl.float32, layout=product_layout(BLOCK_N))
    k = matrix(k_ring.slots.index(slot))
    return warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def no_part():
    """Registers for a part of p v, none of them another's."""
    return gl.zeros([64, PART], gl.float32, layout=product_layout(PART))


@gluon.jit
def part(p, v_ring, slot, INDEX: gl.constexpr, registers):
    """p v for PART channels of v, from zero, started in the registers of a part that is done with."""
    v = matrix(v_ring.slots.index(slot)).slice(PART * INDEX, PART, 0).permute((1, 0))
    return warpgroup_mma(p, v, registers, use_acc=False, is_async=True)


@gluon.jit
def add(o, rescale, pv, of_values):
    """o * rescale + pv * of_values, at this place: later, all parts of p v would need registers at once."""
    o = times_rows(o, rescale) + pv * of_values
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [o], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def add_product(o, words, rescale, of_values, v_ring, it, INDEX: gl.constexpr, TILE: gl.constexpr):
    """o * rescale + p v * of_values, two parts under way at a time."""
    PARTS: gl.constexpr = TILE.parts
    slot, phase = place(it, SLOTS)
    p = as_operand(words, gl.DotOperandLayout(0, product_layout(PART), 4))
    mbarrier.wait(v_ring.full.index(slot), phase & 1)
    await_turn(INDEX, TILE)
    sums = ()
    pv = part(p, v_ring, slot, 0, no_part())
    before = no_part()
    for i in gl.static_range(PARTS - 1):
        after = part(p, v_ring, slot, i + 1, before)
        before = warpgroup_mma_wait(1, deps=(pv,))
        sums = sums + (add(o[i], rescale, before, of_values),)  # type: ignore[assignment]
        pv = after
    pv = warpgroup_mma_wait(0, deps=(pv,))
    tell(TILE.values_barrier + slot, TILE.around_v)
    return sums + (add(o[PARTS - 1], rescale, pv, of_values),)


@gluon.jit
def step(t, it, q, o, row_max, row_sum, k_ring, v_ring, rows, pointers, sizes, scalars,
         PARTIAL: gl.constexpr, INDEX: gl.constexpr, MODE: gl.constexpr, TILE: gl.constexpr):
    """The ``t``-th block of the tile, and the (it + t)-th of the rings. The consumer has the turn before and after."""
    work, blocks = rows.work, rows.blocks
    block = blocks.last - 1 - t
    s = scores(q, k_ring, it + t, TILE)
    pass_turn(INDEX, TILE)
    of_values = 1.0
    if MODE.by_block:
        scalars = of_stored(scalars, descaled(pointers.k_descale, block, work, sizes))
        of_values = descaled(pointers.v_descale, block, work, sizes)
    s = warpgroup_mma_wait(0, deps=(s,))
    let_go(it + t, TILE.keys_barrier, TILE)
    words, rescale, row_max, row_sum = block_softmax(
        s, row_max, row_sum, rows.row0, block, blocks, rows.slope_log2, work, scalars, PARTIAL, MODE, TILE
    )
    return add_product(o, words, rescale, of_values, v_ring, it + t, INDEX, TILE), row_max, row_sum


@gluon.jit
def leave_out(it, k_ring, v_ring, INDEX: gl.constexpr, TILE: gl.constexpr):
    """Lets the ``it``-th block go unread, and the turn by. The consumer has the turn before and after."""
    slot, phase = place(it, TILE.stages)
    mbarrier.wait(k_ring.full.index(slot), phase & 1)
    let_go(it, TILE.keys_barrier, TILE)
    pass_turn(INDEX, TILE)
    slot, phase = place(it, SLOTS)
    mbarrier.wait(v_ring.full.index(slot), phase & 1)
    tell(TILE.values_barrier + slot, TILE.around_v)
    await_turn(INDEX, TILE)


@gluon.jit
def next_look(t, count, MODE: gl.constexpr, TILE: gl.constexpr):
    """The block after which to look at the maxima next, or the end of the tile, where too few blocks are left to pay.

    Causal at 1024, 8 against 4: +3 % with 256 channels, +5 % with 128; full -1 %. With 64 only 4 was measured.
    """
    FEW: gl.constexpr = 8 if MODE.upper and TILE.parts > 1 else 4
    return gl.where(count - t < FEW, count, t)


@gluon.jit
def walk(it, q, k_ring, v_ring, rows, pointers, sizes, scalars, INDEX: gl.constexpr, MODE: gl.constexpr,
         TILE: gl.constexpr):
    """All blocks of a tile: unscaled out, a part after the other, and the softmax state.

    The loop for partial blocks, of which there is at least one, goes on until no row's maximum is negative, and leaves
    the others to one that compares scores as integers. A band's partial blocks come at both ends, so it has no other.
    """
    BLOCK_N: gl.constexpr = TILE.block_n
    row_max = new_state(float("-inf"), BLOCK_N, product_layout(BLOCK_N))
    row_sum = new_state(0.0, BLOCK_N, product_layout(BLOCK_N))
    o = (no_part(),)
    for _ in gl.static_range(TILE.parts - 1):
        o = o + (no_part(),)  # type: ignore[assignment]
    await_turn(INDEX, TILE)
    if MODE.upper and not MODE.lower:  # the first of a tile's warpgroups see less than the last
        unseen = rows.blocks.last
        rows = seen_rows(rows, TILE, MODE)
        unseen -= rows.blocks.last
        for t in range(0, unseen):
            leave_out(it + t, k_ring, v_ring, INDEX, TILE)
        it += unseen
    blocks = rows.blocks
    FIRST: gl.constexpr = 2 if MODE.upper else 1  # a causal tile's first rows see few keys of the first block
    count = blocks.last - blocks.first
    t = 0
    until = count
    if not MODE.lower:
        until = next_look(gl.maximum(blocks.last - blocks.full_last, FIRST), count, MODE, TILE)
    negative = gl.to_tensor(True)
    while negative:
        for partial in range(t, until):
            o, row_max, row_sum = step(partial, it, q, o, row_max, row_sum, k_ring, v_ring, rows, pointers, sizes,
                                       scalars, True, INDEX, MODE, TILE)
        t = until
        if t < count:
            negative = some_negative(row_max)
        else:
            negative = False
        until = next_look(2 * until, count, MODE, TILE)
    if not MODE.lower:
        for full in range(t, count):
            o, row_max, row_sum = step(full, it, q, o, row_max, row_sum, k_ring, v_ring, rows, pointers, sizes, scalars,
                                       False, INDEX, MODE, TILE)
    pass_turn(INDEX, TILE)
    return o, row_max, row_sum
