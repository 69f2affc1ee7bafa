"""The backward: a tile owns 128 keys, keeps dk and dv in registers, and walks the query blocks that see them.

Each of two consumer warpgroups holds 64 keys. A step of 64 query rows computes s^T = k q^T onto -lse and dp^T = v dout^T
onto -delta, so that p = exp2(c s) and ds = p dp need no statistics in registers; then dv += p^T dout, dk += ds^T q, and, one
step later so that both warpgroups' ds are there, dq = ds k, which a warp of its own adds to fp32 memory by TMA. The query
heads of a group are walked inside the tile, so dk and dv need no atomics.
"""

# ruff: noqa: N803, N806
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from tilewise.backends.hopper.arguments import Ring, Shared, Span, Steps, Work
from tilewise.backends.hopper.primitives import (
    LOG2E,
    capped,
    count_tiles,
    draw_ticket,
    load,
    matrix,
    new_barriers,
    new_ring,
    new_tickets,
    packed_sequence,
    publish,
    read_ticket,
    rows_at,
    sync_consumers,
    tilt,
    tma_reduce_add,
)

KEYS = gl.constexpr(128)
PART = gl.constexpr(128)  # rows of the fp32 map that hold one part of dq: see fragment_order


@gluon.jit
def locate_keys(tile, pointers, sizes, MODE: gl.constexpr):
    """Tile number to key tile; ``head`` is the key head. Ascending blocks are the heavy ones first under a causal mask."""
    nheads_k = sizes.nheads // sizes.group
    if MODE.varlen:
        slot = tile // nheads_k
        batch = gl.load(pointers.table + 2 * slot + 2)
        block = gl.load(pointers.table + 2 * slot + 3)
        return packed_sequence(block, tile - slot * nheads_k, batch, pointers, sizes, MODE)
    else:
        head = tile // sizes.blocks
        block = tile - head * sizes.blocks
        batch = head // nheads_k
        q = Span(batch, sizes.seqlen_q)
        k = Span(batch, sizes.seqlen_k)
        return Work(block, head - batch * nheads_k, batch, q, k, sizes.lower, sizes.upper, sizes.shift)


@gluon.jit
def row_steps(work, MODE: gl.constexpr, TILE: gl.constexpr):
    """The query blocks of a key tile, at least one."""
    ROWS: gl.constexpr = TILE.block_m
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
    masked = full_first - first + last - full_last
    return Steps(first, full_first, full_last, masked, last - first)


@gluon.jit
def row_block(steps, t, MODE: gl.constexpr):
    """The query block of step t."""
    block = steps.first + t
    if MODE.lower:
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
def load_with_row(ring, rows_smem, slot, count, desc, coord, rows_desc, row):
    """Fill a slot with a tile and the row statistics that go with it."""
    mbarrier.wait(ring.empty.index(slot), (count & 1) ^ 1)
    mbarrier.expect(ring.full.index(slot), desc.block_type.nbytes + rows_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(desc, coord, ring.full.index(slot), ring.slots.index(slot))
    tma.async_copy_global_to_shared(rows_desc, [row], ring.full.index(slot), rows_smem.index(slot))


@gluon.jit
def producer(q_desc, k_desc, v_desc, dout_desc, lse_desc, delta_desc, shared, tickets, pointers, sizes,
             MODE: gl.constexpr, TILE: gl.constexpr):
    """Fetches k and v of every tile and q and dout of its steps; draws the next tile at the end, so heavy ones go first."""
    STAGES: gl.constexpr = TILE.stages
    ROWS: gl.constexpr = TILE.block_m
    tiles = count_tiles(pointers, sizes, sizes.nheads // sizes.group, MODE)
    tile = gl.program_id(0)
    n = 0
    it = 0
    while tile < tiles:
        work = locate_keys(tile, pointers, sizes, MODE)
        steps = row_steps(work, MODE, TILE)
        key0 = work.block * KEYS
        for g in range(0, sizes.group):
            head = work.head * sizes.group + g
            for t in range(0, steps.count):
                block = row_block(steps, t, MODE)
                row = statistics_block(work, sizes, g, block, MODE, TILE) * ROWS
                coord = rows_at(work.q, head, block * ROWS, MODE)
                slot = it % STAGES
                load_with_row(shared.q, shared.lse, slot, it // STAGES, q_desc, coord, lse_desc, row)
                if g + t == 0:
                    load(shared.k, 0, n, k_desc, rows_at(work.k, work.head, key0, MODE))
                load_with_row(shared.dout, shared.delta, slot, it // STAGES, dout_desc, coord, delta_desc, row)
                if g + t == 0:
                    load(shared.v, 0, n, v_desc, rows_at(work.k, work.head, key0, MODE))
                it += 1
        tile = draw_ticket(tickets, pointers.ticket, n, tiles)
        n += 1


@gluon.jit
def dq_writer(dq_desc, shared, tickets, pointers, sizes, MODE: gl.constexpr, TILE: gl.constexpr):
    """Adds each step's dq, one part from each consumer, to fp32 memory."""
    tiles = count_tiles(pointers, sizes, sizes.nheads // sizes.group, MODE)
    tile = gl.program_id(0)
    n = 0
    it = 0
    while tile < tiles:
        work = locate_keys(tile, pointers, sizes, MODE)
        steps = row_steps(work, MODE, TILE)
        for g in range(0, sizes.group):
            for t in range(0, steps.count):
                at = statistics_block(work, sizes, g, row_block(steps, t, MODE), MODE, TILE) * (2 * PART)
                for c in gl.static_range(2):
                    mbarrier.wait(shared.dq.full.index(c), it & 1)
                    tma_reduce_add(dq_desc, [at + c * PART, 0], shared.dq.slots.index(c))
                tma.store_wait(1)
                mbarrier.arrive(shared.dq.empty.index(0), count=1)
                tma.store_wait(0)
                mbarrier.arrive(shared.dq.empty.index(1), count=1)
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
    """Give the dq of step i to the writer."""
    mbarrier.wait(shared.dq.empty.index(INDEX), (i & 1) ^ 1)
    publish(shared.dq.slots.index(INDEX), fragment_order(dq))
    mbarrier.arrive(shared.dq.full.index(INDEX), count=1)


@gluon.jit
def keep_band_transposed(s, keys, rows, work, MODE: gl.constexpr):
    """-inf outside the band and past the last key; bounds are kept for the keys, of which a thread has two."""
    begin = gl.where(keys < work.k.length, 0, 1 << 30)
    if MODE.upper:
        begin = gl.maximum(begin, keys - work.upper)
    keep = rows >= begin
    if MODE.lower:
        keep = keep & (rows <= keys - work.lower)
    return gl.where(keep, s, float("-inf"))


@gluon.jit
def probabilities(s, lse, keys, rows, slope_log2, work, scalars, MASKED: gl.constexpr, MODE: gl.constexpr):
    """p^T of a step, and p^T times the derivative of the score by softmax_scale q k^T (1 without a cap)."""
    if MODE.softcap:
        x, r = capped(s, scalars)
        x = x - gl.expand_dims(lse.load(gl.SliceLayout(0, s.type.layout)), 0)
    else:
        x = s * scalars.scale_log2  # s began at -lse / softmax_scale
    if MODE.alibi:
        x = tilt(x, rows, keys, work, slope_log2)
    if MASKED:
        x = keep_band_transposed(x, keys, rows, work, MODE)
    p = gl.exp2(x)
    if MODE.softcap:
        return p, p * (4.0 * r * (1.0 - r))
    else:
        return p, p


@gluon.jit
def step(i, row0, key0, dk, dv, shared, slope_log2, work, scalars, INDEX: gl.constexpr, FIRST: gl.constexpr,
         MASKED: gl.constexpr, MODE: gl.constexpr, TILE: gl.constexpr):
    """One block of query rows against this warpgroup's 64 keys; the first of a tile has no dq to finish."""
    DTYPE: gl.constexpr = shared.ds.dtype
    STAGES: gl.constexpr = TILE.stages
    ROWS: gl.constexpr = TILE.block_m
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    ROW: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, dv.type.layout, 2)
    zero = i >> 24  # not known to be 0: keeps the operands' loop-invariant descriptors out of registers
    k = matrix(shared.k.slots.index(zero))
    v = matrix(shared.v.slots.index(zero)).slice(INDEX * 64, 64, 0)
    slot = i % STAGES
    q = matrix(shared.q.slots.index(slot))
    dout = matrix(shared.dout.slots.index(slot))
    ds_mine = shared.ds.index(i % 2).slice(INDEX * 64, 64, 0)

    mbarrier.wait(shared.q.full.index(slot), (i // STAGES) & 1)
    lse = shared.lse.index(slot)
    k_mine = k.slice(INDEX * 64, 64, 0)
    if MODE.softcap:
        start = gl.zeros([64, ROWS], gl.float32, layout=S_LAYOUT)
        s = warpgroup_mma(k_mine, q.permute((1, 0)), start, use_acc=False, is_async=True)
    else:
        start = gl.expand_dims(lse.load(ROW), 0).broadcast_to([64, ROWS])
        s = warpgroup_mma(k_mine, q.permute((1, 0)), start, is_async=True)
    if FIRST:
        s = warpgroup_mma_wait(0, deps=(s,))
    else:
        sync_consumers()  # ds of step i - 1 is complete
        dq = start_dq(shared.ds.index((i + 1) % 2), k, INDEX, TILE)
        s = warpgroup_mma_wait(1, deps=(s,))
        mbarrier.arrive(shared.q.empty.index((i + STAGES - 1) % STAGES), count=1)
    keys = gl.expand_dims(key0 + gl.arange(0, 64, layout=gl.SliceLayout(1, S_LAYOUT)), 1)
    rows = gl.expand_dims(row0 + gl.arange(0, ROWS, layout=ROW), 0)
    p, weight = probabilities(s, lse, keys, rows, slope_log2, work, scalars, MASKED, MODE)
    p = gl.convert_layout(p.to(DTYPE), P_LAYOUT, assert_trivial=True)

    mbarrier.wait(shared.dout.full.index(slot), (i // STAGES) & 1)
    if not FIRST:
        dq = warpgroup_mma_wait(0, deps=(dq,))
        hand_over_dq(dq, shared, i - 1, INDEX)
    minus_delta = gl.expand_dims(shared.delta.index(slot).load(ROW), 0).broadcast_to([64, ROWS])
    dp = warpgroup_mma(v, dout.permute((1, 0)), minus_delta, is_async=True)
    dv = warpgroup_mma(p, dout, dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=(dp,))
    publish(ds_mine, (weight * dp).to(DTYPE))
    dk = warpgroup_mma(ds_mine, q, dk, is_async=True)
    dv, p = warpgroup_mma_wait(1, deps=(dv, p))  # dk goes on
    mbarrier.arrive(shared.dout.empty.index(slot), count=1)
    return dk, dv


@gluon.jit
def consumer(dk_desc, dv_desc, shared, tickets, pointers, sizes, scalars, INDEX: gl.constexpr, MODE: gl.constexpr,
             TILE: gl.constexpr):
    """dk and dv of keys [64 INDEX, 64 INDEX + 64) of every tile, and one part of dq."""
    DTYPE: gl.constexpr = dk_desc.dtype
    STAGES: gl.constexpr = TILE.stages
    BLOCK_D: gl.constexpr = TILE.block_d
    ROWS: gl.constexpr = TILE.block_m
    D_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    # dk leaves through the memory of ds, dv through that of dq: the next tile's loads need not wait for them
    dk_smem = shared.ds._reinterpret(DTYPE, [4 * ROWS // BLOCK_D] + dk_desc.block_type.shape, dk_desc.layout).index(INDEX)
    dv_smem = shared.dq.slots._reinterpret(DTYPE, [256 // BLOCK_D] + dv_desc.block_type.shape, dv_desc.layout).index(INDEX)
    tiles = count_tiles(pointers, sizes, sizes.nheads // sizes.group, MODE)
    tile = gl.program_id(0)
    n = 0
    it = 0
    while tile < tiles:
        work = locate_keys(tile, pointers, sizes, MODE)
        steps = row_steps(work, MODE, TILE)
        key0 = work.block * KEYS + INDEX * 64
        slope_log2 = 0.0
        dk = warpgroup_mma_init(gl.zeros([64, BLOCK_D], gl.float32, layout=D_LAYOUT))
        dv = gl.zeros([64, BLOCK_D], gl.float32, layout=D_LAYOUT)
        mbarrier.wait(shared.k.full.index(0), n & 1)
        mbarrier.wait(shared.v.full.index(0), n & 1)
        if MODE.alibi:
            head = work.batch * sizes.nheads + work.head * sizes.group
            slope_log2 = gl.load(pointers.alibi_slopes + head) * LOG2E
        dk, dv = step(it, row_block(steps, 0, MODE) * ROWS, key0, dk, dv, shared, slope_log2, work, scalars,
                      INDEX, True, True, MODE, TILE)
        it += 1
        for g in range(0, sizes.group):
            if MODE.alibi:
                slope_log2 = gl.load(pointers.alibi_slopes + head + g) * LOG2E
            done = gl.where(g == 0, 1, 0)
            for t in range(done, steps.masked):
                dk, dv = step(it, row_block(steps, t, MODE) * ROWS, key0, dk, dv, shared, slope_log2, work, scalars,
                              INDEX, False, True, MODE, TILE)
                it += 1
            for t in range(gl.maximum(done, steps.masked), steps.count):
                row0 = 0  # only ALiBi asks where an unmasked block lies
                if MODE.alibi:
                    row0 = row_block(steps, t, MODE) * ROWS
                dk, dv = step(it, row0, key0, dk, dv, shared, slope_log2, work, scalars,
                              INDEX, False, False, MODE, TILE)
                it += 1
        sync_consumers()
        dq = start_dq(shared.ds.index((it + 1) % 2), matrix(shared.k.slots.index(0)), INDEX, TILE)
        dk, dv, dq = warpgroup_mma_wait(0, deps=(dk, dv, dq))
        mbarrier.arrive(shared.k.empty.index(0), count=1)
        mbarrier.arrive(shared.v.empty.index(0), count=1)
        mbarrier.arrive(shared.q.empty.index((it + STAGES - 1) % STAGES), count=1)
        hand_over_dq(dq, shared, it - 1, INDEX)
        sync_consumers()
        publish(matrix(dk_smem), (dk * scalars.softmax_scale).to(DTYPE))
        tma.async_copy_shared_to_global(dk_desc, rows_at(work.k, work.head, key0, MODE), dk_smem)
        mbarrier.wait(shared.dq.empty.index(INDEX), (it & 1) ^ 1)
        publish(matrix(dv_smem), dv.to(DTYPE))
        tma.async_copy_shared_to_global(dv_desc, rows_at(work.k, work.head, key0, MODE), dv_smem)
        tile = read_ticket(tickets, n)
        n += 1
        tma.store_wait(0)
        sync_consumers()


@gluon.jit
def backward_kernel(q_desc, k_desc, v_desc, dout_desc, lse_desc, delta_desc, dk_desc, dv_desc, dq_desc, pointers, sizes,
                    scalars, MODE: gl.constexpr, TILE: gl.constexpr, num_warps: gl.constexpr):
    """dk, dv and the fp32 sum of dq; persistent: a CTA draws key tiles until there are none."""
    STAGES: gl.constexpr = TILE.stages
    ROWS: gl.constexpr = TILE.block_m
    DTYPE: gl.constexpr = q_desc.dtype
    dq_slots = gl.allocate_shared_memory(gl.float32, [2, PART, 32], dq_desc.layout)
    shared = Shared(
        new_ring(q_desc, STAGES, 2),
        new_ring(dout_desc, STAGES, 2),
        new_ring(k_desc, 1, 2),
        new_ring(v_desc, 1, 2),
        gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], lse_desc.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], lse_desc.layout),
        gl.allocate_shared_memory(DTYPE, [2, KEYS, ROWS], gl.NVMMASharedLayout(128, 16, 2)),
        Ring(dq_slots, new_barriers(2, 1), new_barriers(2, 1)),
    )
    tickets = new_tickets(3)
    fence_async_shared()
    gl.warp_specialize([
        (consumer, (dk_desc, dv_desc, shared, tickets, pointers, sizes, scalars, 0, MODE, TILE)),
        (consumer, (dk_desc, dv_desc, shared, tickets, pointers, sizes, scalars, 1, MODE, TILE)),
        (producer, (q_desc, k_desc, v_desc, dout_desc, lse_desc, delta_desc, shared, tickets, pointers, sizes, MODE, TILE)),
        (dq_writer, (dq_desc, shared, tickets, pointers, sizes, MODE, TILE)),
    ], [4, 1, 1], [TILE.registers, 24, 24])
