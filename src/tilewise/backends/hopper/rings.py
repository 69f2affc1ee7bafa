"""The forward's rings of shared memory: TMA fills a slot, and the consumers let it go through a named barrier.

An mbarrier tells that a slot is full; a named barrier, where the readers go on at once, that it is empty again.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tilewise.backends.hopper.arguments import Slots
from tilewise.backends.hopper.barriers import await_all, tell
from tilewise.backends.hopper.primitives import load_box, new_barriers, rows_at


@gluon.jit
def new_slots(desc, STAGES: gl.constexpr, PARTS: gl.constexpr):
    """Slots of PARTS tiles of ``desc`` side by side."""
    slots = gl.allocate_shared_memory(desc.dtype, [STAGES * PARTS] + desc.block_type.shape, desc.layout)
    return Slots(slots, new_barriers(STAGES, 1))


@gluon.jit
def place(it, STAGES: gl.constexpr):
    """Slot of the ``it``-th tile of a ring, and how often it has been filled before."""
    LOG: gl.constexpr = STAGES.bit_length() - 1
    gl.static_assert(STAGES == 1 << LOG, "a signed division takes a dozen instructions")
    return it & (STAGES - 1), it >> LOG


@gluon.jit
def fill(ring, slot, count, number, threads, desc, span, head, row, MODE: gl.constexpr, PARTS: gl.constexpr):
    """Rows from ``row`` on, all PARTS of their channels, into ``slot`` for the ``count``-th time (from 0)."""
    if count > 0:
        await_all(number + slot, threads)
    mbarrier.expect(ring.full.index(slot), desc.block_type.nbytes * PARTS)
    for i in gl.static_range(PARTS):
        coord = rows_at(span, head, row, MODE, i * desc.block_type.shape[-1])
        load_box(desc, coord, ring.full.index(slot), ring.slots.index(slot * PARTS + i))


@gluon.jit
def let_go(it, BARRIER: gl.constexpr, TILE: gl.constexpr):
    """Consumer: the ``it``-th tile of the ring whose slots are let go from BARRIER on has been read."""
    slot, _ = place(it, TILE.stages)
    tell(BARRIER + slot, 128 * TILE.consumers + 32)


@gluon.jit
def begin_turns(INDEX: gl.constexpr, TILE: gl.constexpr):
    """Consumer, once: the first turn is the first one's."""
    if (INDEX + 1) % TILE.consumers == 0:
        pass_turn(INDEX, TILE)


@gluon.jit
def await_turn(INDEX: gl.constexpr, TILE: gl.constexpr):
    """Consumer: wait until its products come next, so that the softmax of one runs under the products of the other."""
    if TILE.turns:
        await_all(TILE.turns_barrier + INDEX, 256)


@gluon.jit
def pass_turn(INDEX: gl.constexpr, TILE: gl.constexpr):
    """Consumer: the next one's products may follow."""
    if TILE.turns:
        tell(TILE.turns_barrier + (INDEX + 1) % TILE.consumers, 256)
