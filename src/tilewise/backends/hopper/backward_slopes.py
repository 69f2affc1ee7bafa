"""The slopes' gradient by a launch of its own, where the registers of the main kernel do not hold it beside dk and dv.

Tiles and their steps are those of ``backward_wide``, but the consumers take the steps in turns, so that the products of
one run under the exponentials of the other, and of the products only s^T and dp^T are left.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait

from tilewise.backends.hopper.backward_parts import locate_keys, new_shared, producer, row_block, row_steps
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
from tilewise.backends.hopper.primitives import LOG2E, begin_early, count_tiles, matrix, new_tickets, read_ticket

ROWS = gl.constexpr(64)


@gluon.jit
def step(i, row0, key0, dslope, shared, slope_log2, leaders, work, scalars, MASKED: gl.constexpr, MODE: gl.constexpr,
         TILE: gl.constexpr):
    """One block of 64 query rows against the tile's 64 keys."""
    STAGES: gl.constexpr = TILE.stages
    DOUT_STAGES: gl.constexpr = TILE.dout_stages
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    ROW: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    k = matrix(shared.k.slots.index(0))
    v = matrix(shared.v.slots.index(0))
    slot = i % STAGES
    q = matrix(shared.q.slots.index(slot))
    dout_slot = i % DOUT_STAGES
    dout = matrix(shared.dout.slots.index(dout_slot))

    mbarrier.wait(shared.q.full.index(slot), (i // STAGES) & 1)
    zeros = gl.zeros([64, ROWS], gl.float32, layout=S_LAYOUT)
    s = start_over_channels(k, q, zeros, True, TILE.channels)
    lse = shared.lse.index(slot).load(ROW)
    mbarrier.wait(shared.dout.full.index(dout_slot), (i // DOUT_STAGES) & 1)
    minus_delta = gl.expand_dims(shared.delta.index(dout_slot).load(ROW), 0).broadcast_to([64, ROWS])
    dp = start_over_channels(v, dout, minus_delta, False, TILE.channels_v)
    s = warpgroup_mma_wait(1 if power_below(TILE.channels_v) == TILE.channels_v else 2, deps=(s,))
    keys = gl.expand_dims(key0 + gl.arange(0, 64, layout=gl.SliceLayout(1, S_LAYOUT)), 1)
    rows = gl.expand_dims(row0 + gl.arange(0, ROWS, layout=ROW), 0)
    p, _ = probabilities(s, lse, keys, rows, leaders, slope_log2, work, scalars, MASKED, MODE)
    let_go(i, STAGES, Q_READ, TILE)
    dp = warpgroup_mma_wait(0, deps=(dp,))
    let_go(i, DOUT_STAGES, DOUT_READ, TILE)
    return with_slope_gradient(dslope, p * dp, row0, key0, work, MODE)


@gluon.jit
def consumer(shared, tickets, pointers, sizes, scalars, INDEX: gl.constexpr, MODE: gl.constexpr, TILE: gl.constexpr):
    """Every second step of every tile: those whose numbers, counted over all tiles, leave INDEX when halved."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    tiles = count_tiles(pointers, sizes, sizes.nheads // sizes.group, MODE)
    tile = gl.program_id(0)
    n = 0
    it = 0
    while tile < tiles:
        work = locate_keys(tile, pointers, sizes, MODE, TILE)
        steps = row_steps(work, pointers, sizes, MODE, TILE)
        key0 = work.block * TILE.block_n
        mbarrier.wait(shared.k.full.index(0), n & 1)
        mbarrier.wait(shared.v.full.index(0), n & 1)
        leaders = leaders_of(work, key0, pointers, sizes, S_LAYOUT, MODE)
        if MODE.segments:
            only_seen(shared, work, pointers, sizes, 0, TILE)
        for g in range(0, sizes.group):
            head = work.batch * sizes.nheads + work.head * sizes.group + g
            slope_log2 = gl.load(pointers.alibi_slopes + head) * LOG2E
            dslope = no_slope_gradient(S_LAYOUT, MODE)
            for t in range((it + INDEX) & 1, steps.masked, 2):
                dslope = step(it + t, row_block(steps, t, MODE) * ROWS, key0, dslope, shared, slope_log2, leaders, work,
                              scalars, True, MODE, TILE)
            for t in range(steps.masked + ((it + steps.masked + INDEX) & 1), steps.count, 2):
                dslope = step(it + t, row_block(steps, t, MODE) * ROWS, key0, dslope, shared, slope_log2, leaders, work,
                              scalars, False, MODE, TILE)
            it += steps.count
            add_slope_gradient(dslope, head, pointers)
        mbarrier.arrive(shared.k.empty.index(0), count=1)
        mbarrier.arrive(shared.v.empty.index(0), count=1)
        tile = read_ticket(tickets, n)
        n += 1


@gluon.jit
def slopes_kernel(q_desc, k_desc, v_desc, dout_desc, lse_desc, delta_desc, dk_desc, dv_desc, dq_desc, pointers, sizes,
                  scalars, MODE: gl.constexpr, TILE: gl.constexpr, num_warps: gl.constexpr):
    """The slopes' gradient, from the arguments of ``backward_wide_kernel``; it writes nothing else."""
    shared = new_shared(q_desc, k_desc, v_desc, dout_desc, lse_desc, dq_desc, 0, TILE)
    tickets = new_tickets(2)
    fence_async_shared()
    begin_early()
    gl.warp_specialize([
        (consumer, (shared, tickets, pointers, sizes, scalars, 0, MODE, TILE)),
        (consumer, (shared, tickets, pointers, sizes, scalars, 1, MODE, TILE)),
        (producer, (q_desc, k_desc, v_desc, dout_desc, lse_desc, delta_desc, shared, tickets, pointers, sizes, MODE,
                    TILE)),
    ], [4, 1], [TILE.registers, 24])
