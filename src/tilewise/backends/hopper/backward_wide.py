"""The backward up to 256 channels: a tile owns 64 keys, and each consumer half of the channels of dk, dv and dq.

Accumulators of (64, 256) leave no room for a second set, so both consumers compute the same s^T and dp^T: 7 products
for 5, but they never wait for each other, and p and ds go into dv and dk as register operands.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewise.backends.hopper.backward_parts import (
    dq_writer,
    hand_over_dq,
    locate_keys,
    new_shared,
    producer,
    row_block,
    row_steps,
)
from tilewise.backends.hopper.backward_scores import (
    add_slope_gradient,
    leaders_of,
    no_slope_gradient,
    only_seen,
    power_below,
    probabilities,
    start_over_channels,
    with_slope_gradient,
)
from tilewise.backends.hopper.barriers import DOUT_READ, Q_READ, let_go
from tilewise.backends.hopper.primitives import (
    LOG2E,
    begin_early,
    count_tiles,
    matrix,
    new_tickets,
    publish,
    read_ticket,
    reinterpret,
    rows_at,
    store_box,
)

KEYS = gl.constexpr(64)
ROWS = gl.constexpr(64)
HALF = gl.constexpr(128)


@gluon.jit
def start_part(ds, k, COL: gl.constexpr):
    """Issue 64 columns of dq = ds k."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    zeros = gl.zeros([64, 64], gl.float32, layout=LAYOUT)
    return warpgroup_mma(ds.permute((1, 0)), k.slice(COL, 64, 1), zeros, use_acc=False, is_async=True)


@gluon.jit
def step(i, row0, key0, dk, dv, dslope, shared, slope_log2, leaders, work, scalars, INDEX: gl.constexpr,
         MASKED: gl.constexpr, MODE: gl.constexpr, TILE: gl.constexpr):
    """One block of 64 query rows against the tile's 64 keys."""
    DTYPE: gl.constexpr = shared.ds.dtype
    STAGES: gl.constexpr = TILE.stages
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    ROW: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, dv.type.layout, 2)
    zero = i >> 24  # not known to be 0: keeps the operands' loop-invariant descriptors out of registers
    k = matrix(shared.k.slots.index(zero))
    v = matrix(shared.v.slots.index(zero))
    slot = i % STAGES
    q = matrix(shared.q.slots.index(slot))
    dout = matrix(shared.dout.slots.index(zero))
    ds_smem = shared.ds.index(INDEX)

    mbarrier.wait(shared.q.full.index(slot), (i // STAGES) & 1)
    zeros = gl.zeros([64, ROWS], gl.float32, layout=S_LAYOUT)
    s = start_over_channels(k, q, zeros, True, TILE.channels)
    lse = shared.lse.index(slot).load(ROW)  # comes in under the product
    mbarrier.wait(shared.dout.full.index(0), i & 1)
    minus_delta = gl.expand_dims(shared.delta.index(0).load(ROW), 0).broadcast_to([64, ROWS])
    dp = start_over_channels(v, dout, minus_delta, False, TILE.channels_v)
    s = warpgroup_mma_wait(1 if power_below(TILE.channels_v) == TILE.channels_v else 2, deps=(s,))
    keys = gl.expand_dims(key0 + gl.arange(0, 64, layout=gl.SliceLayout(1, S_LAYOUT)), 1)
    rows = gl.expand_dims(row0 + gl.arange(0, ROWS, layout=ROW), 0)
    chance, weight = probabilities(s, lse, keys, rows, leaders, slope_log2, work, scalars, MASKED, MODE)
    p = gl.convert_layout(chance.to(DTYPE), P_LAYOUT, assert_trivial=True)
    dv = warpgroup_mma(p, dout.slice(INDEX * HALF, HALF, 1), dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=(dp,))
    if INDEX == 0:
        dslope = with_slope_gradient(dslope, chance * dp, row0, key0, work, MODE)
    ds = (weight * dp).to(DTYPE)
    publish(ds_smem, ds)
    ds = gl.convert_layout(ds, P_LAYOUT, assert_trivial=True)
    dk = warpgroup_mma(ds, q.slice(INDEX * HALF, HALF, 1), dk, is_async=True)
    dq = start_part(ds_smem, k, INDEX * HALF)
    dv, p = warpgroup_mma_wait(2, deps=(dv, p))
    let_go(i, 1, DOUT_READ, TILE)
    dk, ds, dq = warpgroup_mma_wait(0, deps=(dk, ds, dq))
    let_go(i, STAGES, Q_READ, TILE)
    hand_over_dq(dq, shared, 2 * i, INDEX)
    dq = start_part(ds_smem, k, INDEX * HALF + 64)
    dq = warpgroup_mma_wait(0, deps=(dq,))
    hand_over_dq(dq, shared, 2 * i + 1, INDEX)
    return dk, dv, dslope


@gluon.jit
def consumer(dk_desc, dv_desc, shared, tickets, pointers, sizes, scalars, INDEX: gl.constexpr, MODE: gl.constexpr,
             TILE: gl.constexpr):
    """Channels [128 INDEX, 128 INDEX + 128) of dk, dv and dq of every tile."""
    DTYPE: gl.constexpr = dk_desc.dtype
    D_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    OUT_SLOTS: gl.constexpr = [2] + dk_desc.block_type.shape
    out_smem = reinterpret(shared.dq, DTYPE, OUT_SLOTS, dk_desc.layout).index(INDEX)
    tiles = count_tiles(pointers, sizes, sizes.nheads // sizes.group, MODE)
    tile = gl.program_id(0)
    n = 0
    it = 0
    while tile < tiles:
        work = locate_keys(tile, pointers, sizes, MODE, TILE)
        steps = row_steps(work, pointers, sizes, MODE, TILE)
        key0 = work.block * KEYS
        slope_log2 = 0.0
        dk = gl.zeros([64, HALF], gl.float32, layout=D_LAYOUT)
        dv = gl.zeros([64, HALF], gl.float32, layout=D_LAYOUT)
        mbarrier.wait(shared.k.full.index(0), n & 1)
        mbarrier.wait(shared.v.full.index(0), n & 1)
        leaders = leaders_of(work, key0, pointers, sizes, S_LAYOUT, MODE)
        if MODE.segments:
            only_seen(shared, work, pointers, sizes, 0, TILE)
        dslope = no_slope_gradient(S_LAYOUT, MODE)
        for g in range(0, sizes.group):
            if MODE.alibi:
                head = work.batch * sizes.nheads + work.head * sizes.group + g
                slope_log2 = gl.load(pointers.alibi_slopes + head) * LOG2E
            for t in range(0, steps.masked):
                dk, dv, dslope = step(it, row_block(steps, t, MODE) * ROWS, key0, dk, dv, dslope, shared, slope_log2,
                                      leaders, work, scalars, INDEX, True, MODE, TILE)
                it += 1
            for t in range(steps.masked, steps.count):
                row0 = 0  # only ALiBi asks where an unmasked block lies
                if MODE.alibi:
                    row0 = row_block(steps, t, MODE) * ROWS
                dk, dv, dslope = step(it, row0, key0, dk, dv, dslope, shared, slope_log2, leaders, work, scalars, INDEX,
                                      False, MODE, TILE)
                it += 1
            if MODE.slopes and INDEX == 0:
                add_slope_gradient(dslope, work.batch * sizes.nheads + work.head * sizes.group + g, pointers)
                dslope = no_slope_gradient(S_LAYOUT, MODE)
        mbarrier.arrive(shared.k.empty.index(0), count=1)
        mbarrier.arrive(shared.v.empty.index(0), count=1)
        mbarrier.wait(shared.dq_added.index(INDEX), 1)  # the writer has read this tile's last part
        publish(matrix(out_smem), (dk * scalars.softmax_scale).to(DTYPE))
        store_box(dk_desc, rows_at(work.k, work.head, key0, MODE, INDEX * HALF), out_smem)
        tma.store_wait(0)
        publish(matrix(out_smem), dv.to(DTYPE))
        store_box(dv_desc, rows_at(work.k, work.head, key0, MODE, INDEX * HALF), out_smem)
        tile = read_ticket(tickets, n)
        n += 1
        tma.store_wait(0)


@gluon.jit
def backward_wide_kernel(q_desc, k_desc, v_desc, dout_desc, lse_desc, delta_desc, dk_desc, dv_desc, dq_desc, pointers,
                         sizes, scalars, MODE: gl.constexpr, TILE: gl.constexpr, num_warps: gl.constexpr):
    """dk, dv and the fp32 sum of dq; persistent: a CTA draws key tiles until there are none."""
    shared = new_shared(q_desc, k_desc, v_desc, dout_desc, lse_desc, dq_desc, 2, TILE)
    tickets = new_tickets(3)
    fence_async_shared()
    begin_early()
    gl.warp_specialize([
        (consumer, (dk_desc, dv_desc, shared, tickets, pointers, sizes, scalars, 0, MODE, TILE)),
        (consumer, (dk_desc, dv_desc, shared, tickets, pointers, sizes, scalars, 1, MODE, TILE)),
        (producer, (q_desc, k_desc, v_desc, dout_desc, lse_desc, delta_desc, shared, tickets, pointers, sizes, MODE,
                    TILE)),
        (dq_writer, (dq_desc, shared, tickets, pointers, sizes, MODE, TILE)),
    ], [4, 1, 1], [TILE.registers, 24, 24])
