"""The fp8 forward where v comes transposed, once for all tiles of queries: see ``forward_fp8.py``.

Nobody transposes, which leaves issue slots and the time of shared memory to the products, and takes less energy.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from tilewise.backends.hopper.barriers import await_all
from tilewise.backends.hopper.forward_fp8 import consumer
from tilewise.backends.hopper.primitives import count_tiles, draw, key_blocks, load, load_box, new_ring, rows_at
from tilewise.backends.hopper.rings import fill, new_slots, place
from tilewise.backends.hopper.turn import SLOTS
from tilewise.backends.hopper.works import locate, new_works, publish_end, publish_work


@gluon.jit
def fill_turned(ring, it, desc, work, head_k, row, TILE: gl.constexpr):
    """All channels of the keys from ``row`` on, as the ``it``-th tile of the ring."""
    slot, count = place(it, SLOTS)
    if count > 0:
        await_all(TILE.values_barrier + slot, TILE.around_v)
    mbarrier.expect(ring.full.index(slot), desc.block_type.nbytes)
    load_box(desc, [work.k.start, head_k, 0, row], ring.full.index(slot), ring.slots.index(slot))


@gluon.jit
def producer(q_desc, k_desc, v_desc, q_ring, k_ring, v_ring, works, pointers, sizes, MODE: gl.constexpr,
             TILE: gl.constexpr):
    """Looks up every tile, fetches its q and its k and v blocks, last block first, and draws the next tile."""
    CONSUMERS: gl.constexpr = TILE.consumers
    tiles = count_tiles(pointers, sizes, sizes.nheads, MODE)
    tile = gl.program_id(0)
    n = 0
    it = 0
    while tile < tiles:
        work = locate(tile, pointers, sizes, MODE)
        publish_work(works, n, work, MODE)
        head_k = work.head // sizes.group
        blocks = key_blocks(work, TILE.block_m, TILE.block_n, MODE)
        for c in gl.static_range(CONSUMERS):
            row = work.block * TILE.block_m + c * 64
            load(q_ring, c, n, q_desc, rows_at(work.q, work.head, row, MODE))
        for t in range(0, blocks.last - blocks.first):
            row = (blocks.last - 1 - t) * TILE.block_n
            slot, count = place(it, TILE.stages)
            fill(k_ring, slot, count, TILE.keys_barrier, TILE.around_k, k_desc, work.k, head_k, row, MODE, 1)
            fill_turned(v_ring, it, v_desc, work, head_k, row, TILE)
            it += 1
        tile = draw(pointers.ticket, tiles)
        n += 1
    publish_end(works, n)


@gluon.jit
def forward_fp8_turned_kernel(q_desc, k_desc, v_desc, pointers, sizes, scalars, MODE: gl.constexpr, TILE: gl.constexpr,
                              num_warps: gl.constexpr):
    """out and lse of every tile; persistent: a CTA draws tiles until there are none."""
    SMALL: gl.constexpr = TILE.small_registers
    gl.static_assert(TILE.consumers == 2)
    q_ring = new_ring(q_desc, TILE.consumers, 1)
    k_ring = new_slots(k_desc, TILE.stages, 1)
    v_ring = new_slots(v_desc, SLOTS, 1)
    works = new_works(TILE.consumers)
    fence_async_shared()
    gl.warp_specialize([
        (consumer, (q_ring, k_ring, v_ring, works, pointers, sizes, scalars, 0, MODE, TILE)),
        (consumer, (q_ring, k_ring, v_ring, works, pointers, sizes, scalars, 1, MODE, TILE)),
        (producer, (q_desc, k_desc, v_desc, q_ring, k_ring, v_ring, works, pointers, sizes, MODE, TILE)),
    ], [4, 1], [TILE.registers, SMALL])
