"""What the backward kernels share: where a key tile works, who fetches, who adds dq to memory."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
)

from tilewise.backends.hopper.arguments import KeyBlocks, Shared, Slots, Span, Steps, Work
from tilewise.backends.hopper.barriers import (
    CONSUMER_AND_WARP,
    DOUT_READ,
    DQ_WRITTEN,
    Q_READ,
    await_all,
    await_slot,
    tell,
)
from tilewise.backends.hopper.kept_segments import met_blocks
from tilewise.backends.hopper.primitives import (
    count_tiles,
    draw_ticket,
    load,
    load_box,
    new_barriers,
    new_ring,
    packed_sequence,
    publish,
    read_ticket,
    rows_at,
    tma_reduce_add,
)

PART = gl.constexpr(128)  # rows of the fp32 map that hold one part of dq: see fragment_order


@gluon.jit
def draw_order(tile, blocks, sizes):
    """Head and block of a tile: heads in groups, and in a group by ascending block."""
    group = tile // (blocks * sizes.heads_in_flight)
    within = tile - group * (blocks * sizes.heads_in_flight)
    block = within // sizes.heads_in_flight
    return group * sizes.heads_in_flight + within - block * sizes.heads_in_flight, block


@gluon.jit
def find_keys(tile, pointers, sizes, MODE: gl.constexpr, TILE: gl.constexpr):
    """Tile number to block, key head and batch. In a group of heads block 0, the heaviest if causal, is first.

    A packed sequence's tiles are numbered like those of a batch of one, behind the tiles of longer sequences.
    """
    nheads_k = sizes.nheads // sizes.group
    if MODE.varlen:
        slot = tile // nheads_k  # some slot of the same sequence
        batch = gl.load(pointers.table + 2 * slot + 2)
        first = slot - gl.load(pointers.table + 2 * slot + 3)
        length = gl.load(pointers.cu_seqlens_k + batch + 1) - gl.load(pointers.cu_seqlens_k + batch)
        blocks = gl.maximum((length + TILE.block_n - 1) // TILE.block_n, 1)  # 0 where there is no tile at all
        head, block = draw_order(tile - first * nheads_k, blocks, sizes)
        return block, head, batch
    else:
        head, block = draw_order(tile, sizes.blocks, sizes)
        batch = head // nheads_k
        return block, head - batch * nheads_k, batch


@gluon.jit
def keys_at(block, head, batch, pointers, sizes, MODE: gl.constexpr):
    """The key tile; ``head`` is the key head."""
    if MODE.varlen:
        return packed_sequence(block, head, batch, pointers, sizes, MODE)
    else:
        q = Span(batch, sizes.seqlen_q)
        k = Span(batch, sizes.seqlen_k)
        return Work(block, head, batch, q, k, sizes.lower, sizes.upper, sizes.shift, 0)


@gluon.jit
def locate_keys(tile, pointers, sizes, MODE: gl.constexpr, TILE: gl.constexpr):
    """Tile number to key tile."""
    block, head, batch = find_keys(tile, pointers, sizes, MODE, TILE)
    return keys_at(block, head, batch, pointers, sizes, MODE)


@gluon.jit
def row_steps(work, pointers, sizes, MODE: gl.constexpr, TILE: gl.constexpr):
    """The query blocks of a key tile, at least one."""
    ROWS: gl.constexpr = TILE.block_m
    KEYS: gl.constexpr = TILE.block_n
    n_begin = work.block * KEYS
    n_end = gl.minimum(n_begin + KEYS, work.k.length)
    blocks = (work.q.length + ROWS - 1) // ROWS
    first = 0
    last = blocks
    full_first = 0
    full_last = blocks
    if MODE.upper:
        first = gl.maximum(n_begin - work.upper, 0) // ROWS
        full_first = (gl.maximum(n_end - 1 - work.upper, 0) + ROWS - 1) // ROWS
    if MODE.lower:
        last = gl.minimum((gl.maximum(n_end - work.lower, 0) + ROWS - 1) // ROWS, blocks)
        full_last = gl.minimum(gl.maximum(n_begin - work.lower + 1, 0) // ROWS, last)
    first = gl.maximum(gl.minimum(first, last - 1), 0)
    last = gl.maximum(last, first + 1)
    if n_begin + KEYS > work.k.length:  # a ragged last block masks every step
        full_last = first
    full_last = gl.minimum(gl.maximum(full_last, first), last)
    full_first = gl.minimum(gl.maximum(full_first, first), full_last)
    if MODE.segments:
        owner = work.batch * sizes.blocks + work.block
        met = met_blocks(KeyBlocks(first, full_first, full_last, last), owner, pointers)
        first, full_first, full_last, last = met.first, met.full_first, met.full_last, met.last
    masked = full_first - first + last - full_last
    return Steps(first, full_first, full_last, masked, last - first)


@gluon.jit
def row_block(steps, t, MODE: gl.constexpr):
    """The query block of step t."""
    block = steps.first + t
    if MODE.lower or MODE.segments:
        leading = steps.full_first - steps.first
        block = gl.where(t < leading, block, steps.full_last + t - leading)
        block = gl.where(t < steps.masked, block, steps.full_first + t - steps.masked)
    return block


@gluon.jit
def statistics_block(work, sizes, g, block, MODE: gl.constexpr, TILE: gl.constexpr):
    """Number of a block of rows in the fp32 dq, lse and delta, g-th query head of the group.

    In the packed form a sequence begins at block start // block_m + its number, which leaves room for its ragged end.
    """
    head = work.head * sizes.group + g
    if MODE.varlen:
        return head * sizes.row_blocks + work.q.start // TILE.block_m + work.batch + block
    else:
        return (work.batch * sizes.nheads + head) * sizes.row_blocks + block


@gluon.jit
def load_with_row(tiles, rows_smem, it, STAGES: gl.constexpr, READ: gl.constexpr, desc, coord, rows_desc, row,
                  TILE: gl.constexpr):
    """Fill the slot of a step, once it is empty, with a tile and the row statistics that go with it."""
    slot = it % STAGES
    await_slot(it, STAGES, READ, TILE)
    mbarrier.expect(tiles.full.index(slot), desc.block_type.nbytes + rows_desc.block_type.nbytes)
    load_box(desc, coord, tiles.full.index(slot), tiles.slots.index(slot))
    load_box(rows_desc, [row], tiles.full.index(slot), rows_smem.index(slot))


@gluon.jit
def producer(q_desc, k_desc, v_desc, dout_desc, lse_desc, delta_desc, shared, tickets, pointers, sizes,
             MODE: gl.constexpr, TILE: gl.constexpr):
    """Fetches k and v of every tile, q and dout of its steps; draws a tile late, so that heavy ones go first."""
    STAGES: gl.constexpr = TILE.stages
    DOUT_STAGES: gl.constexpr = TILE.dout_stages
    ROWS: gl.constexpr = TILE.block_m
    tiles = count_tiles(pointers, sizes, sizes.nheads // sizes.group, MODE)
    tile = gl.program_id(0)
    n = 0
    it = 0
    while tile < tiles:
        work = locate_keys(tile, pointers, sizes, MODE, TILE)
        steps = row_steps(work, pointers, sizes, MODE, TILE)
        key0 = work.block * TILE.block_n
        for g in range(0, sizes.group):
            head = work.head * sizes.group + g
            for t in range(0, steps.count):
                block = row_block(steps, t, MODE)
                row = statistics_block(work, sizes, g, block, MODE, TILE) * ROWS
                coord = rows_at(work.q, head, block * ROWS, MODE)
                load_with_row(shared.q, shared.lse, it, STAGES, Q_READ, q_desc, coord, lse_desc, row, TILE)
                load_with_row(shared.dout, shared.delta, it, DOUT_STAGES, DOUT_READ, dout_desc, coord, delta_desc, row,
                              TILE)
                if g + t == 0:  # up to 128 channels the tile before has read v earlier than k
                    load(shared.v, 0, n, v_desc, rows_at(work.k, work.head, key0, MODE))
                    load(shared.k, 0, n, k_desc, rows_at(work.k, work.head, key0, MODE))
                it += 1
        tile = draw_ticket(tickets, pointers.ticket, n, tiles)
        n += 1


@gluon.jit
def dq_writer(dq_desc, shared, tickets, pointers, sizes, MODE: gl.constexpr, TILE: gl.constexpr):
    """Adds each step's dq, the same number of parts from each consumer, to fp32 memory."""
    EACH: gl.constexpr = TILE.parts // 2
    tiles = count_tiles(pointers, sizes, sizes.nheads // sizes.group, MODE)
    tile = gl.program_id(0)
    n = 0
    it = 0
    while tile < tiles:
        work = locate_keys(tile, pointers, sizes, MODE, TILE)
        steps = row_steps(work, pointers, sizes, MODE, TILE)
        for g in range(0, sizes.group):
            for t in range(0, steps.count):
                at = statistics_block(work, sizes, g, row_block(steps, t, MODE), MODE, TILE) * (2 * EACH)
                for part in gl.static_range(EACH):
                    for c in gl.static_range(2):
                        await_all(DQ_WRITTEN + c, CONSUMER_AND_WARP)
                        tma_reduce_add(dq_desc, [(at + c * EACH + part) * PART, 0], shared.dq.index(c))
                    tma.store_wait(1)
                    mbarrier.arrive(shared.dq_added.index(0), count=1)
                    tma.store_wait(0)
                    mbarrier.arrive(shared.dq_added.index(1), count=1)
                    it += 1
        tile = read_ticket(tickets, n)
        n += 1


@gluon.jit
def fragment_order(dq):
    """A part of dq, (64, 64), in the order in which threads hold it, (128, 32): stores meet no bank conflicts.

    ``preprocess.after_kernel`` undoes it.
    """
    x = gl.reshape(dq, [4, 2, 4, 2, 8, 4, 2])
    return gl.reshape(gl.permute(x, (4, 0, 2, 3, 5, 1, 6)), [PART, 32])


@gluon.jit
def start_dq(ds, k, INDEX: gl.constexpr, TILE: gl.constexpr):
    """Issue this consumer's part of dq = ds k, from the ds of both."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    zeros = gl.zeros([64, 64], gl.float32, layout=LAYOUT)
    if TILE.block_m == 64:
        return warpgroup_mma(ds.permute((1, 0)), k.slice(INDEX * 64, 64, 1), zeros, use_acc=False, is_async=True)
    else:
        rows = ds.slice(INDEX * 64, 64, 1).permute((1, 0))
        return warpgroup_mma(rows, k, zeros, use_acc=False, is_async=True)


@gluon.jit
def hand_over_dq(dq, shared, i, INDEX: gl.constexpr):
    """Give the i-th part of dq to the writer."""
    mbarrier.wait(shared.dq_added.index(INDEX), (i & 1) ^ 1)
    publish(shared.dq.index(INDEX), fragment_order(dq))
    tell(DQ_WRITTEN + INDEX, CONSUMER_AND_WARP)


@gluon.jit
def new_shared(q_desc, k_desc, v_desc, dout_desc, lse_desc, dq_desc, DS: gl.constexpr, TILE: gl.constexpr):
    """Shared memory of a backward kernel with DS buffers of ds; without any it makes no dq either."""
    STAGES: gl.constexpr = TILE.stages
    DOUT_STAGES: gl.constexpr = TILE.dout_stages
    ROWS: gl.constexpr = TILE.block_m
    q = Slots(gl.allocate_shared_memory(q_desc.dtype, [STAGES] + q_desc.block_type.shape, q_desc.layout),
              new_barriers(STAGES, 1))  # fmt: skip
    dout = Slots(gl.allocate_shared_memory(dout_desc.dtype, [DOUT_STAGES] + dout_desc.block_type.shape,
                                           dout_desc.layout), new_barriers(DOUT_STAGES, 1))  # fmt: skip
    k, v = new_ring(k_desc, 1, 2), new_ring(v_desc, 1, 2)
    lse = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], lse_desc.layout)
    delta = gl.allocate_shared_memory(gl.float32, [DOUT_STAGES, ROWS], lse_desc.layout)
    if DS == 0:
        return Shared(q, dout, k, v, lse, delta, 0, 0, 0)  # in place of None, which no function may return
    else:
        ds = gl.allocate_shared_memory(q_desc.dtype, [DS, TILE.block_n, ROWS], gl.NVMMASharedLayout(128, 16, 2))
        dq = gl.allocate_shared_memory(gl.float32, [2, PART, 32], dq_desc.layout)
        return Shared(q, dout, k, v, lse, delta, ds, dq, new_barriers(2, 1))
