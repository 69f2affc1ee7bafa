"""The backward up to 128 channels: a tile owns 128 keys, keeps dk and dv in registers, and walks the query blocks.

Each of two consumer warpgroups holds 64 keys. A step computes s^T = k q^T and p = exp2(c s - lse), dp^T = v dout^T onto
-delta, so that ds = p dp needs no statistic in registers; then dv += p^T dout, dk += ds^T q, and, one step later so
that both warpgroups' ds are there, dq = ds k, which a warp of its own adds to fp32 memory by TMA. The query heads of a
group are walked inside the tile, so dk and dv need no atomics.
"""

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

from tilewise.backends.hopper.backward_capped import capped_step
from tilewise.backends.hopper.backward_parts import (
    dq_writer,
    find_keys,
    hand_over_dq,
    keys_at,
    new_shared,
    producer,
    row_block,
    row_steps,
    start_dq,
)
from tilewise.backends.hopper.backward_scores import (
    add_slope_gradient,
    leaders_of,
    no_slope_gradient,
    only_seen,
    probabilities,
    start_over_channels,
    with_slope_gradient,
)
from tilewise.backends.hopper.barriers import DOUT_READ, Q_READ, await_ds, let_go, meet, tell_ds
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


@gluon.jit
def step(i, n, row0, key0, dk, dv, dslope, shared, slope_log2, leaders, work, scalars, INDEX: gl.constexpr,
         FIRST: gl.constexpr, MASKED: gl.constexpr, MODE: gl.constexpr, TILE: gl.constexpr):
    """One block of query rows against this warpgroup's 64 keys; the first of the ``n``-th tile has no dq to finish."""
    DTYPE: gl.constexpr = shared.ds.dtype
    STAGES: gl.constexpr = TILE.stages
    DOUT_STAGES: gl.constexpr = TILE.dout_stages
    ROWS: gl.constexpr = TILE.block_m
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    ROW: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, dv.type.layout, 2)
    zero = i >> 24  # not known to be 0: keeps the operands' loop-invariant descriptors out of registers
    k = matrix(shared.k.slots.index(zero))
    v = matrix(shared.v.slots.index(zero)).slice(INDEX * 64, 64, 0)
    slot = i % STAGES
    q = matrix(shared.q.slots.index(slot))
    dout_slot = i % DOUT_STAGES
    dout = matrix(shared.dout.slots.index(dout_slot))
    ds_mine = shared.ds.index(i % 2).slice(INDEX * 64, 64, 0)

    mbarrier.wait(shared.q.full.index(slot), (i // STAGES) & 1)
    zeros = gl.zeros([64, ROWS], gl.float32, layout=S_LAYOUT)
    s = start_over_channels(k.slice(INDEX * 64, 64, 0), q, zeros, True, TILE.channels)
    lse = shared.lse.index(slot).load(ROW)  # comes in under the product
    if FIRST:
        s = warpgroup_mma_wait(0, deps=(s,))
    else:
        await_ds(i - 1, INDEX)
        dq = start_dq(shared.ds.index((i + 1) % 2), k, INDEX, TILE)
        s = warpgroup_mma_wait(1, deps=(s,))
        let_go(i + STAGES - 1, STAGES, Q_READ, TILE)
    keys = gl.expand_dims(key0 + gl.arange(0, 64, layout=gl.SliceLayout(1, S_LAYOUT)), 1)
    rows = gl.expand_dims(row0 + gl.arange(0, ROWS, layout=ROW), 0)
    chance, weight = probabilities(s, lse, keys, rows, leaders, slope_log2, work, scalars, MASKED, MODE)
    p = gl.convert_layout(chance.to(DTYPE), P_LAYOUT, assert_trivial=True)

    mbarrier.wait(shared.dout.full.index(dout_slot), (i // DOUT_STAGES) & 1)
    if FIRST:
        mbarrier.wait(shared.v.full.index(0), n & 1)
    else:
        dq = warpgroup_mma_wait(0, deps=(dq,))
        hand_over_dq(dq, shared, i - 1, INDEX)
    minus_delta = gl.expand_dims(shared.delta.index(dout_slot).load(ROW), 0).broadcast_to([64, ROWS])
    dp = start_over_channels(v, dout, minus_delta, False, TILE.channels_v)
    dv = warpgroup_mma(p, dout, dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=(dp,))
    dslope = with_slope_gradient(dslope, chance * dp, row0, key0, work, MODE)
    if FIRST:  # dk and dv of the tile before have left the memory of ds and dq
        tma.store_wait(0)
        meet()
    publish(ds_mine, (weight * dp).to(DTYPE))
    tell_ds(i, INDEX)
    dk = warpgroup_mma(ds_mine, q, dk, is_async=True)
    dv, p = warpgroup_mma_wait(1, deps=(dv, p))  # dk goes on
    let_go(i, DOUT_STAGES, DOUT_READ, TILE)
    return dk, dv, dslope


@gluon.jit
def any_step(i, n, row0, key0, dk, dv, dslope, shared, slope_log2, leaders, work, scalars, INDEX: gl.constexpr,
             FIRST: gl.constexpr, MASKED: gl.constexpr, MODE: gl.constexpr, TILE: gl.constexpr):
    """The same; under a softcap that of ``backward_capped``, which knows no segments.

    128 channels without a band are 9 % slower with it.
    """
    CAPPED: gl.constexpr = MODE.softcap and not MODE.segments
    if CAPPED and (MODE.alibi or MODE.lower or MODE.upper or TILE.block_d == 64):
        return capped_step(i, n, row0, key0, dk, dv, dslope, shared, slope_log2, leaders, work, scalars, INDEX, FIRST,
                           MASKED, MODE, TILE)
    else:
        return step(i, n, row0, key0, dk, dv, dslope, shared, slope_log2, leaders, work, scalars, INDEX, FIRST, MASKED,
                    MODE, TILE)


@gluon.jit
def find_keys_ahead(tile, tiles, pointers, sizes, MODE: gl.constexpr, TILE: gl.constexpr):
    """The same as ``find_keys``, and for a tile behind the last something that nobody uses."""
    return find_keys(gl.maximum(gl.minimum(tile, tiles - 1), 0), pointers, sizes, MODE, TILE)


@gluon.jit
def consumer(dk_desc, dv_desc, shared, tickets, pointers, sizes, scalars, INDEX: gl.constexpr, MODE: gl.constexpr,
             TILE: gl.constexpr):
    """dk and dv of keys [64 INDEX, 64 INDEX + 64) of every tile, and one part of dq."""
    DTYPE: gl.constexpr = dk_desc.dtype
    STAGES: gl.constexpr = TILE.stages
    BLOCK_D: gl.constexpr = TILE.block_d
    ROWS: gl.constexpr = TILE.block_m
    D_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    # dk leaves through the memory of ds, dv through that of dq: the next tile's loads need not wait for them
    DK_SLOTS: gl.constexpr = [4 * ROWS // BLOCK_D] + dk_desc.block_type.shape
    DV_SLOTS: gl.constexpr = [256 // BLOCK_D] + dv_desc.block_type.shape
    dk_smem = reinterpret(shared.ds, DTYPE, DK_SLOTS, dk_desc.layout).index(INDEX)
    dv_smem = reinterpret(shared.dq, DTYPE, DV_SLOTS, dv_desc.layout).index(INDEX)
    tiles = count_tiles(pointers, sizes, sizes.nheads // sizes.group, MODE)
    tile = gl.program_id(0)
    n = 0
    it = 0
    # where a tile found ahead would push numbers of the loop out of the registers it is found late
    AHEAD: gl.constexpr = not (MODE.segments or MODE.softcap or (MODE.varlen and BLOCK_D == 64))
    if AHEAD:
        block, key_head, batch = find_keys_ahead(tile, tiles, pointers, sizes, MODE, TILE)
    while tile < tiles:
        if not AHEAD:
            block, key_head, batch = find_keys(tile, pointers, sizes, MODE, TILE)
        work = keys_at(block, key_head, batch, pointers, sizes, MODE)
        steps = row_steps(work, pointers, sizes, MODE, TILE)
        key0 = work.block * TILE.block_n + INDEX * 64
        slope_log2 = 0.0
        dk = warpgroup_mma_init(gl.zeros([64, BLOCK_D], gl.float32, layout=D_LAYOUT))
        dv = gl.zeros([64, BLOCK_D], gl.float32, layout=D_LAYOUT)
        mbarrier.wait(shared.k.full.index(0), n & 1)
        if MODE.alibi:
            head = work.batch * sizes.nheads + work.head * sizes.group
            slope_log2 = gl.load(pointers.alibi_slopes + head) * LOG2E
        leaders = leaders_of(work, key0, pointers, sizes, S_LAYOUT, MODE)
        if MODE.segments:
            mbarrier.wait(shared.v.full.index(0), n & 1)  # for only_seen, and once more in the first step
            only_seen(shared, work, pointers, sizes, INDEX * 64, TILE)
        dslope = no_slope_gradient(S_LAYOUT, MODE)
        dk, dv, dslope = any_step(it, n, row_block(steps, 0, MODE) * ROWS, key0, dk, dv, dslope, shared, slope_log2,
                                  leaders, work, scalars, INDEX, True, True, MODE, TILE)
        it += 1
        for g in range(0, sizes.group):
            if MODE.alibi:
                slope_log2 = gl.load(pointers.alibi_slopes + head + g) * LOG2E
            done = gl.where(g == 0, 1, 0)
            for t in range(done, steps.masked):
                dk, dv, dslope = any_step(it, n, row_block(steps, t, MODE) * ROWS, key0, dk, dv, dslope, shared,
                                          slope_log2, leaders, work, scalars, INDEX, False, True, MODE, TILE)
                it += 1
            for t in range(gl.maximum(done, steps.masked), steps.count):
                row0 = 0  # only ALiBi asks where an unmasked block lies
                if MODE.alibi:
                    row0 = row_block(steps, t, MODE) * ROWS
                dk, dv, dslope = any_step(it, n, row0, key0, dk, dv, dslope, shared, slope_log2, leaders, work, scalars,
                                          INDEX, False, False, MODE, TILE)
                it += 1
            if MODE.slopes:
                add_slope_gradient(dslope, head + g, pointers)
                dslope = no_slope_gradient(S_LAYOUT, MODE)
        mbarrier.arrive(shared.v.empty.index(0), count=1)
        await_ds(it - 1, INDEX)
        dq = start_dq(shared.ds.index((it + 1) % 2), matrix(shared.k.slots.index(0)), INDEX, TILE)
        tile = read_ticket(tickets, n)
        if AHEAD:  # divisions and loads, hidden by the products
            block, key_head, batch = find_keys_ahead(tile, tiles, pointers, sizes, MODE, TILE)
        dk, dv, dq = warpgroup_mma_wait(0, deps=(dk, dv, dq))
        mbarrier.arrive(shared.k.empty.index(0), count=1)
        let_go(it + STAGES - 1, STAGES, Q_READ, TILE)
        hand_over_dq(dq, shared, it - 1, INDEX)
        meet()
        publish(matrix(dk_smem), (dk * scalars.softmax_scale).to(DTYPE))
        store_box(dk_desc, rows_at(work.k, work.head, key0, MODE), dk_smem)
        mbarrier.wait(shared.dq_added.index(INDEX), (it & 1) ^ 1)
        publish(matrix(dv_smem), dv.to(DTYPE))
        store_box(dv_desc, rows_at(work.k, work.head, key0, MODE), dv_smem)
        n += 1
    tma.store_wait(0)


@gluon.jit
def backward_kernel(q_desc, k_desc, v_desc, dout_desc, lse_desc, delta_desc, dk_desc, dv_desc, dq_desc, pointers, sizes,
                    scalars, MODE: gl.constexpr, TILE: gl.constexpr, num_warps: gl.constexpr):
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
