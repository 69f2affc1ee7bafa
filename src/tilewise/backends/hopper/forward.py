"""The forward: one producer warp moves tiles by TMA, each consumer warpgroup runs the softmax of 64 query rows."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from tilewise.backends.hopper.barriers import tell
from tilewise.backends.hopper.primitives import (
    count_tiles,
    drawn,
    matrix,
    publish,
    rows_at,
    store_box,
    take_ticket,
)
from tilewise.backends.hopper.products import halves, real_channels
from tilewise.backends.hopper.rings import begin_turns, fill, new_slots, place
from tilewise.backends.hopper.walk import first_block, last_product, leave_out, walk
from tilewise.backends.hopper.works import (
    await_block,
    new_works,
    peek_work,
    publish_tile,
    read_work,
    rows_of,
    seen_rows,
    sink_of,
    tile_blocks,
)


@gluon.jit
def producer(q_desc, k_desc, v_desc, q_ring, k_ring, v_ring, works, pointers, sizes, MODE: gl.constexpr,
             TILE: gl.constexpr):
    """Fetches the q and the k and v blocks, last block first, of every tile, and draws and announces the next one.

    The number of the next tile takes a microsecond to come, so it is asked for a few blocks before it is needed.
    """
    BLOCK_M: gl.constexpr = TILE.block_m
    CONSUMERS: gl.constexpr = TILE.consumers
    PARTS: gl.constexpr = TILE.parts
    THREADS: gl.constexpr = 128 * CONSUMERS + 32
    tiles = count_tiles(pointers, sizes, sizes.nheads, MODE)
    tile = gl.program_id(0)
    publish_tile(works, 0, tile, tiles, pointers, sizes, MODE)
    n = 0
    it = 0
    while tile < tiles:
        work = peek_work(works, n, await_block(works, n), sizes, MODE)
        head_k = work.head // sizes.group
        blocks = tile_blocks(work, pointers, sizes, MODE, TILE)
        count = blocks.last - blocks.first
        first_key = work.split * sizes.split_keys
        for c in gl.static_range(CONSUMERS):
            row = work.block * BLOCK_M + c * 64
            fill(q_ring, c, n, TILE.queries_barrier, 160, q_desc, work.q, work.head, row, MODE, PARTS)
        n += 1
        ticket = 0
        for t in range(0, count):
            row = first_key + (blocks.last - 1 - t) * TILE.block_n
            slot, filled = place(it, TILE.stages)
            if t == gl.maximum(count - 3, 0):
                ticket = take_ticket(pointers.ticket, tiles)
            fill(k_ring, slot, filled, TILE.keys_barrier, THREADS, k_desc, work.k, head_k, row, MODE, PARTS)
            if t == count - 1:
                tile = drawn(ticket)
                publish_tile(works, n, tile, tiles, pointers, sizes, MODE)
            fill(v_ring, slot, filled, TILE.values_barrier, THREADS, v_desc, work.k, head_k, row, MODE, 1)
            it += 1


@gluon.jit
def copy_out(o, o_desc, o_smem, work, row0, MODE: gl.constexpr, COL: gl.constexpr):
    """Columns from COL on of 64 rows of out, once the copy before has left the shared memory."""
    tma.store_wait(0)
    publish(matrix(o_smem).slice(0, o.shape[1], 1), o.to(o_desc.dtype))
    store_box(o_desc, rows_at(work.q, work.head, row0, MODE, COL), o_smem)


@gluon.jit
def store_state(o, first, work, row0, COL: gl.constexpr, pointers, TILE: gl.constexpr):
    """Columns from COL on of 64 rows of a state."""
    rows = gl.expand_dims(row0 + gl.arange(0, 64, layout=gl.SliceLayout(1, o.type.layout)), 1)
    cols = gl.expand_dims(gl.arange(COL, COL + o.shape[1], layout=gl.SliceLayout(0, o.type.layout)), 0)
    at = pointers.outs + (first + rows) * TILE.box_dv + cols
    gl.store(at, o, mask=(rows < work.q.length) & (cols >= 0))


@gluon.jit
def normalised(o, factor):
    """out of the accumulator; an empty row is 0, whatever was summed."""
    by_row = gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, o.type.layout), assert_trivial=True), 1)
    return gl.where(by_row == 0.0, 0.0, o * by_row)


@gluon.jit
def store_rows(o, lse, factor, o_desc, o_smem, pointers, work, row0, sizes, MODE: gl.constexpr, TILE: gl.constexpr):
    """Writes 64 rows of out by TMA, or of a state directly, and of lse; rows past the sequence are not touched."""
    rows = row0 + gl.arange(0, 64, layout=lse.type.layout)
    if MODE.varlen:
        first = work.head.to(gl.int64) * sizes.rows + work.q.start
    else:
        first = ((work.split * sizes.batch + work.batch) * sizes.nheads + work.head).to(gl.int64) * sizes.rows
    gl.store(pointers.lse + first + rows, lse, mask=rows < work.q.length)
    o = [normalised(part, factor) for part in o]
    if not MODE.split and TILE.out_parts == 2 and TILE.narrow == 0:
        o = halves(o[0])
    PIECES: gl.constexpr = len(o)
    WIDTH: gl.constexpr = TILE.box_dv // TILE.out_parts
    if MODE.split:
        for i in gl.static_range(PIECES):
            store_state(o[i], first, work, row0, i * TILE.wide, pointers, TILE)
    else:
        for i in gl.static_range(PIECES):
            copy_out(o[i], o_desc, o_smem, work, row0, MODE, i * WIDTH)


@gluon.jit
def parts_of_q(slots, INDEX: gl.constexpr, TILE: gl.constexpr):
    """q of one consumer as its parts."""
    FIRST: gl.constexpr = INDEX * TILE.parts
    if TILE.parts == 1:
        return (matrix(slots.index(FIRST)),)
    elif TILE.parts == 2:
        return real_channels(slots.index(FIRST), 0, TILE), real_channels(slots.index(FIRST + 1), 1, TILE)
    else:
        return (
            real_channels(slots.index(FIRST), 0, TILE),
            real_channels(slots.index(FIRST + 1), 1, TILE),
            real_channels(slots.index(FIRST + 2), 2, TILE),
        )


@gluon.jit
def take_q(q_ring, n, INDEX: gl.constexpr, TILE: gl.constexpr):
    """q of the ``n``-th tile; if there is room in registers, and then its shared memory is free at once."""
    mbarrier.wait(q_ring.full.index(INDEX), n & 1)
    q = parts_of_q(q_ring.slots, INDEX, TILE)
    if TILE.q_in_registers:
        LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE.block_n, 16])
        OPERAND: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
        q = [part.load(OPERAND) for part in q]
        fence_async_shared()
        tell(TILE.queries_barrier + INDEX, 160)
    return q


@gluon.jit
def consumer(o_desc, o_slots, q_ring, k_ring, v_ring, works, pointers, sizes, scalars, INDEX: gl.constexpr,
             MODE: gl.constexpr, TILE: gl.constexpr):
    """Online softmax of rows [64 INDEX, 64 INDEX + 64) of every tile."""
    DTYPE: gl.constexpr = o_desc.dtype
    n = 0
    it = 0
    begin_turns(INDEX, TILE)
    block = await_block(works, 0)
    while block >= 0:
        work = read_work(works, n, block, sizes, MODE)
        rows = rows_of(work, pointers, sizes, INDEX, MODE, TILE)
        every = rows.blocks
        if (MODE.lower or MODE.upper) and not MODE.segments:
            rows = seen_rows(rows, TILE, MODE)
        sink_log2 = sink_of(work, pointers, sizes, MODE)
        if MODE.upper and not MODE.segments:
            it = leave_out(it, every.last - rows.blocks.last, k_ring, v_ring, INDEX, TILE)
        q = take_q(q_ring, n, INDEX, TILE)
        p, row_max, row_sum = first_block(it, q, k_ring, rows, scalars, DTYPE, INDEX, MODE, TILE)
        p, o, row_max, row_sum = walk(it, q, p, row_max, row_sum, k_ring, v_ring, rows, scalars, DTYPE, INDEX, MODE,
                                      TILE)
        it += rows.blocks.last - rows.blocks.first
        o, lse, factor = last_product(it, p, o, row_max, row_sum, v_ring, rows, sink_log2, scalars, DTYPE, INDEX,
                                      MODE, TILE)
        if MODE.lower and not MODE.segments:
            it = leave_out(it, rows.blocks.first - every.first, k_ring, v_ring, INDEX, TILE)
        store_rows(o, lse, factor, o_desc, o_slots.index(INDEX), pointers, work, rows.row0, sizes, MODE, TILE)
        n += 1
        block = await_block(works, n)
    tma.store_wait(0)


@gluon.jit
def forward_kernel(q_desc, k_desc, v_desc, o_desc, pointers, sizes, scalars, MODE: gl.constexpr, TILE: gl.constexpr,
                   num_warps: gl.constexpr):
    """out and lse of every tile; persistent: a CTA draws tiles until there are none."""
    CONSUMERS: gl.constexpr = TILE.consumers
    PARTS: gl.constexpr = TILE.parts
    q_ring = new_slots(q_desc, CONSUMERS, PARTS)
    k_ring = new_slots(k_desc, TILE.stages, PARTS)
    v_ring = new_slots(v_desc, TILE.stages, 1)
    o_slots = gl.allocate_shared_memory(o_desc.dtype, [CONSUMERS] + o_desc.block_type.shape, o_desc.layout)
    works = new_works(CONSUMERS)
    fence_async_shared()
    if CONSUMERS == 2:
        gl.warp_specialize([
            (consumer, (o_desc, o_slots, q_ring, k_ring, v_ring, works, pointers, sizes, scalars, 0, MODE, TILE)),
            (consumer, (o_desc, o_slots, q_ring, k_ring, v_ring, works, pointers, sizes, scalars, 1, MODE, TILE)),
            (producer, (q_desc, k_desc, v_desc, q_ring, k_ring, v_ring, works, pointers, sizes, MODE, TILE)),
        ], [4, 1], [TILE.registers, 24])
    else:
        gl.warp_specialize([
            (consumer, (o_desc, o_slots, q_ring, k_ring, v_ring, works, pointers, sizes, scalars, 0, MODE, TILE)),
            (consumer, (o_desc, o_slots, q_ring, k_ring, v_ring, works, pointers, sizes, scalars, 1, MODE, TILE)),
            (consumer, (o_desc, o_slots, q_ring, k_ring, v_ring, works, pointers, sizes, scalars, 2, MODE, TILE)),
            (producer, (q_desc, k_desc, v_desc, q_ring, k_ring, v_ring, works, pointers, sizes, MODE, TILE)),
        ], [4, 4, 1], [TILE.registers, TILE.registers, 24])
