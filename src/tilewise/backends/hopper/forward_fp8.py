"""The fp8 forward: q, k, v in e4m3, scores, softmax and sums in fp32, out in bf16.

As the forward of ``forward.py``, with four differences. Warps of their own transpose v (``turn.py``). Probabilities
are stored in e4m3, 2**RAISE times too large, so that those under 2**-15.5 are lost, not those under 2**-9
(``softmax_fp8.py``). A consumer has nothing of its own under way at the same time, which leaves registers for more
consumers (``walk_fp8.py``). And every block's product with v starts at zero and is added to fp32 registers, where the
rescaling multiplies anyway: Hopper sums products of e4m3 with 13 bits after the point and cuts off the rest, which
takes a share of a sum that grows with its length (measured without this: 0.7 % of 1024 equal values, 24 % of 16384).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from tilewise import descale
from tilewise.backends.hopper.arguments import Slots
from tilewise.backends.hopper.barriers import await_all
from tilewise.backends.hopper.primitives import (
    count_tiles,
    draw,
    key_blocks,
    load,
    load_box,
    matrix,
    new_barriers,
    new_ring,
    rows_at,
)
from tilewise.backends.hopper.rings import await_turn, begin_turns, fill, new_slots, place
from tilewise.backends.hopper.rows_fp8 import descaled, finish, negate, of_stored, store_rows
from tilewise.backends.hopper.turn import SLOTS, turner
from tilewise.backends.hopper.walk_fp8 import PART, product_layout, walk
from tilewise.backends.hopper.works import (
    await_block,
    locate,
    new_works,
    publish_end,
    publish_work,
    read_work,
    rows_of,
    sink_of,
)

BLOCK = gl.constexpr(descale.BLOCK)  # query rows that share a descale
SMALLEST = gl.constexpr(1e-30)  # in place of a descale of 0: 0 times the -inf of a masked score is NaN


@gluon.jit
def fill_turned(ring, it, desc, work, head_k, row, TILE: gl.constexpr):
    """All channels of the keys from ``row`` on, as the ``it``-th tile of the ring."""
    slot, count = place(it, SLOTS)
    if count > 0:
        await_all(TILE.values_barrier + slot, TILE.around_v)
    mbarrier.expect(ring.full.index(slot), desc.block_type.nbytes)
    load_box(desc, [work.k.start, head_k, 0, row], ring.full.index(slot), ring.slots.index(slot))


@gluon.jit
def producer(q_desc, k_desc, v_desc, q_ring, k_ring, values, works, pointers, sizes, MODE: gl.constexpr,
             TILE: gl.constexpr):
    """Looks up every tile, fetches its q and its k and v blocks, last block first, and draws the next tile.

    ``values``: the ring that v comes to, as it is or, without turners, transposed.
    """
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
            if pointers.unseen is not None:
                row -= pointers.unseen
            slot, count = place(it, TILE.stages)
            fill(k_ring, slot, count, TILE.keys_barrier, TILE.around_k, k_desc, work.k, head_k, row, MODE, 1)
            if TILE.turners == 0:
                fill_turned(values, it, v_desc, work, head_k, row, TILE)
            else:
                load(values, it % SLOTS, it // SLOTS, v_desc, rows_at(work.k, head_k, row, MODE))
            it += 1
        tile = draw(pointers.ticket, tiles)
        n += 1
    publish_end(works, n)


@gluon.jit
def consumer(q_ring, k_ring, v_ring, works, pointers, sizes, scalars, INDEX: gl.constexpr, MODE: gl.constexpr,
             TILE: gl.constexpr):
    """Online softmax of rows [64 INDEX, 64 INDEX + 64) of every tile."""
    PARTS: gl.constexpr = TILE.parts
    ROWS: gl.constexpr = gl.SliceLayout(1, product_layout(TILE.block_n))
    n = 0
    it = 0
    begin_turns(INDEX, TILE)
    block = await_block(works, 0)
    while block >= 0:
        work = read_work(works, n, block, sizes, MODE)
        rows = rows_of(work, pointers, sizes, INDEX, MODE, TILE)
        sink_log2 = sink_of(work, pointers, sizes, MODE)
        of_scores = descaled(pointers.q_descale, gl.minimum(rows.row0, work.q.length - 1) // BLOCK, work, sizes)
        of_values = 1.0
        if not MODE.by_block:  # else the walk multiplies
            of_scores *= descaled(pointers.k_descale, 0, work, sizes)
            of_values = descaled(pointers.v_descale, 0, work, sizes)

        mbarrier.wait(q_ring.full.index(INDEX), n & 1)
        q = matrix(q_ring.slots.index(INDEX))
        if pointers.q_descale is not None or pointers.k_descale is not None:
            if of_scores < 0.0:  # the softmax below takes its maximum before it scales
                negate(q)
            of_scores = gl.maximum(gl.abs(of_scores), SMALLEST)
        real = of_stored(scalars, of_scores)
        o, row_max, row_sum = walk(it, q, k_ring, v_ring, rows, pointers, sizes, real, INDEX, MODE, TILE)
        it += rows.blocks.last - rows.blocks.first
        mbarrier.arrive(q_ring.empty.index(INDEX), count=1)
        factor = finish(row_max, row_sum, sink_log2, of_values, pointers, work, rows.row0, sizes, real, ROWS, MODE)
        for i in gl.static_range(PARTS):
            store_rows(o[i], factor, PART * i, pointers, work, rows.row0, sizes, MODE, TILE)
        n += 1
        block = await_block(works, n)
    if INDEX == 0:  # nothing is left in the barriers
        await_turn(INDEX, TILE)


@gluon.jit
def forward_fp8_kernel(q_desc, k_desc, v_desc, pointers, sizes, scalars, MODE: gl.constexpr, TILE: gl.constexpr,
                       num_warps: gl.constexpr):
    """out and lse of every tile; persistent: a CTA draws tiles until there are none."""
    CONSUMERS: gl.constexpr = TILE.consumers
    WIDTH: gl.constexpr = TILE.block_n if TILE.block_n < 128 else 128
    q_ring = new_ring(q_desc, CONSUMERS, 1)
    k_ring = new_slots(k_desc, TILE.stages, 1)
    raw_ring = new_ring(v_desc, SLOTS, TILE.turners)
    v_slots = gl.allocate_shared_memory(
        v_desc.dtype, [SLOTS, TILE.block_dv, TILE.block_n], gl.NVMMASharedLayout(WIDTH, 8, 2)
    )
    v_ring = Slots(v_slots, new_barriers(SLOTS, TILE.turners))
    works = new_works(CONSUMERS + TILE.turners)
    SMALL: gl.constexpr = TILE.small_registers
    fence_async_shared()
    if CONSUMERS == 2 and TILE.turners == 3:
        gl.warp_specialize([
            (consumer, (q_ring, k_ring, v_ring, works, pointers, sizes, scalars, 0, MODE, TILE)),
            (consumer, (q_ring, k_ring, v_ring, works, pointers, sizes, scalars, 1, MODE, TILE)),
            (turner, (raw_ring, v_ring, works, sizes, 0, MODE, TILE)),
            (turner, (raw_ring, v_ring, works, sizes, 1, MODE, TILE)),
            (turner, (raw_ring, v_ring, works, sizes, 2, MODE, TILE)),
            (producer, (q_desc, k_desc, v_desc, q_ring, k_ring, raw_ring, works, pointers, sizes, MODE, TILE)),
        ], [4, 1, 1, 1, 1], [TILE.registers, SMALL, SMALL, SMALL, SMALL])
    elif CONSUMERS == 2:
        gl.warp_specialize([
            (consumer, (q_ring, k_ring, v_ring, works, pointers, sizes, scalars, 0, MODE, TILE)),
            (consumer, (q_ring, k_ring, v_ring, works, pointers, sizes, scalars, 1, MODE, TILE)),
            (turner, (raw_ring, v_ring, works, sizes, 0, MODE, TILE)),
            (turner, (raw_ring, v_ring, works, sizes, 1, MODE, TILE)),
            (producer, (q_desc, k_desc, v_desc, q_ring, k_ring, raw_ring, works, pointers, sizes, MODE, TILE)),
        ], [4, 1, 1, 1], [TILE.registers, SMALL, SMALL, SMALL])
    elif CONSUMERS == 3 and TILE.turners == 3:
        gl.warp_specialize([
            (consumer, (q_ring, k_ring, v_ring, works, pointers, sizes, scalars, 0, MODE, TILE)),
            (consumer, (q_ring, k_ring, v_ring, works, pointers, sizes, scalars, 1, MODE, TILE)),
            (consumer, (q_ring, k_ring, v_ring, works, pointers, sizes, scalars, 2, MODE, TILE)),
            (turner, (raw_ring, v_ring, works, sizes, 0, MODE, TILE)),
            (turner, (raw_ring, v_ring, works, sizes, 1, MODE, TILE)),
            (turner, (raw_ring, v_ring, works, sizes, 2, MODE, TILE)),
            (producer, (q_desc, k_desc, v_desc, q_ring, k_ring, raw_ring, works, pointers, sizes, MODE, TILE)),
        ], [4, 4, 1, 1, 1, 1], [TILE.registers, TILE.registers, SMALL, SMALL, SMALL, SMALL])
    elif CONSUMERS == 3:
        gl.warp_specialize([
            (consumer, (q_ring, k_ring, v_ring, works, pointers, sizes, scalars, 0, MODE, TILE)),
            (consumer, (q_ring, k_ring, v_ring, works, pointers, sizes, scalars, 1, MODE, TILE)),
            (consumer, (q_ring, k_ring, v_ring, works, pointers, sizes, scalars, 2, MODE, TILE)),
            (turner, (raw_ring, v_ring, works, sizes, 0, MODE, TILE)),
            (turner, (raw_ring, v_ring, works, sizes, 1, MODE, TILE)),
            (producer, (q_desc, k_desc, v_desc, q_ring, k_ring, raw_ring, works, pointers, sizes, MODE, TILE)),
        ], [4, 4, 1, 1, 1], [TILE.registers, TILE.registers, SMALL, SMALL, SMALL])
    else:
        gl.warp_specialize([
            (consumer, (q_ring, k_ring, v_ring, works, pointers, sizes, scalars, 0, MODE, TILE)),
            (consumer, (q_ring, k_ring, v_ring, works, pointers, sizes, scalars, 1, MODE, TILE)),
            (consumer, (q_ring, k_ring, v_ring, works, pointers, sizes, scalars, 2, MODE, TILE)),
            (consumer, (q_ring, k_ring, v_ring, works, pointers, sizes, scalars, 3, MODE, TILE)),
            (turner, (raw_ring, v_ring, works, sizes, 0, MODE, TILE)),
            (turner, (raw_ring, v_ring, works, sizes, 1, MODE, TILE)),
            (producer, (q_desc, k_desc, v_desc, q_ring, k_ring, raw_ring, works, pointers, sizes, MODE, TILE)),
        ], [4, 4, 4, 1, 1, 1], [TILE.registers, TILE.registers, TILE.registers, SMALL, SMALL, SMALL])
