"""The forward: one producer warp moves tiles by TMA, each consumer warpgroup runs the online softmax of 64 query rows.

Keys are walked from the last visible block to the first, so that a causal tile starts on its diagonal. The product
q k^T of the next block runs under the softmax of this one.
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

from tilewise.backends.hopper.arguments import Ring
from tilewise.backends.hopper.primitives import (
    LN2,
    LOG2E,
    capped,
    count_tiles,
    draw_ticket,
    keep_band,
    key_blocks,
    load,
    locate,
    matrix,
    new_barriers,
    new_ring,
    new_tickets,
    publish,
    read_ticket,
    rows_at,
    tilt,
)


@gluon.jit
def producer(q_desc, k_desc, v_desc, q_ring, k_ring, v_ring, tickets, pointers, sizes, MODE: gl.constexpr,
             TILE: gl.constexpr):
    """Fetches q of every tile and its k and v blocks, last block first, and draws the next tile."""
    STAGES: gl.constexpr = TILE.stages
    CONSUMERS: gl.constexpr = TILE.consumers
    BLOCK_M: gl.constexpr = 64 * CONSUMERS
    tiles = count_tiles(pointers, sizes, sizes.nheads, MODE)
    tile = gl.program_id(0)
    n = 0
    it = 0
    while tile < tiles:
        work = locate(tile, pointers, sizes, MODE)
        head_k = work.head // sizes.group
        blocks = key_blocks(work, BLOCK_M, TILE.block_n, MODE)
        for c in gl.static_range(CONSUMERS):
            load(q_ring, c, n, q_desc, rows_at(work.q, work.head, work.block * BLOCK_M + c * 64, MODE))
        for t in range(0, blocks.last - blocks.first):
            coord = rows_at(work.k, head_k, (blocks.last - 1 - t) * TILE.block_n, MODE)
            load(k_ring, it % STAGES, it // STAGES, k_desc, coord)
            load(v_ring, it % STAGES, it // STAGES, v_desc, coord)
            it += 1
        tile = draw_ticket(tickets, pointers.ticket, n, tiles)
        n += 1


@gluon.jit
def partial_sums(p):
    """Sums of each row over what one thread holds, (rows, 4): the threads meet only once, after the last block."""
    COLS: gl.constexpr = p.shape[1]
    return gl.sum(gl.sum(gl.reshape(p, [p.shape[0], COLS // 8, 4, 2]), 3), 1)


@gluon.jit
def softmax_step(s, row_max, row_sum, scale_log2, MODE: gl.constexpr, RAISE: gl.constexpr = 0):
    """One block of the online softmax: probabilities against the new maximum, and the factor for what came before.

    Probabilities, and with them row_sum, are 2**RAISE times too large.
    """
    row_max_new = gl.maximum(row_max, gl.max(s, 1))
    shift = row_max_new * scale_log2
    if MODE.lower or MODE.upper or MODE.varlen:  # a row that has seen nothing yet has no maximum to subtract
        shift = gl.where(row_max_new == float("-inf"), 0.0, shift)
    rescale = gl.exp2(row_max * scale_log2 - shift)
    if RAISE:
        shift -= RAISE
    p = gl.exp2(s * scale_log2 - gl.expand_dims(shift, 1))
    sums = partial_sums(p)
    by_thread = gl.convert_layout(rescale, gl.SliceLayout(1, sums.type.layout), assert_trivial=True)
    return p, rescale, row_max_new, row_sum * gl.expand_dims(by_thread, 1) + sums


@gluon.jit
def block_softmax(s, row_max, row_sum, row0, block, blocks, slope_log2, work, scalars, PARTIAL: gl.constexpr,
                  MODE: gl.constexpr, RAISE: gl.constexpr = 0):
    """Scores of a block, masked where it is partial (never, unless PARTIAL), through one softmax step."""
    LAYOUT: gl.constexpr = s.type.layout
    rows = gl.expand_dims(row0 + gl.arange(0, s.shape[0], layout=gl.SliceLayout(1, LAYOUT)), 1)
    cols = gl.expand_dims(block * s.shape[1] + gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, LAYOUT)), 0)
    if MODE.softcap:
        s, _ = capped(s, scalars)
    elif not MODE.raw_scale:
        s = s * scalars.scale_log2
    if MODE.alibi:
        s = tilt(s, rows, cols, work, slope_log2)
    if PARTIAL:  # at compile time; which blocks are partial is known at run time
        if block >= blocks.full_last or block < blocks.full_first:
            s = keep_band(s, rows, cols, work, MODE)
    if MODE.raw_scale:
        return softmax_step(s, row_max, row_sum, scalars.scale_log2, MODE, RAISE)
    else:
        return softmax_step(s, row_max, row_sum, 1.0, MODE, RAISE)


@gluon.jit
def block_step(block, it, q, o, p, row_max, row_sum, k_ring, v_ring, row0, blocks, slope_log2, work, scalars,
               MODE: gl.constexpr, TILE: gl.constexpr):
    """One block: its scores are computed while the block before is multiplied with v, then its softmax."""
    STAGES: gl.constexpr = TILE.stages
    BLOCK_N: gl.constexpr = TILE.block_n
    S_LAYOUT: gl.constexpr = row_max.type.layout.parent
    O_LAYOUT: gl.constexpr = o.type.layout
    here = (it + 1) % STAGES
    before = it % STAGES
    mbarrier.wait(k_ring.full.index(here), ((it + 1) // STAGES) & 1)
    zeros = gl.zeros([64, BLOCK_N], gl.float32, layout=S_LAYOUT)
    s = warpgroup_mma(q, matrix(k_ring.slots.index(here)).permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.wait(v_ring.full.index(before), (it // STAGES) & 1)
    o = warpgroup_mma(p, matrix(v_ring.slots.index(before)), o, is_async=True)
    s = warpgroup_mma_wait(1, deps=(s,))
    mbarrier.arrive(k_ring.empty.index(here), count=1)
    p_new, rescale, row_max, row_sum = block_softmax(
        s, row_max, row_sum, row0, block, blocks, slope_log2, work, scalars, MODE.lower or MODE.upper, MODE
    )
    o, p = warpgroup_mma_wait(0, deps=(o, p))
    mbarrier.arrive(v_ring.empty.index(before), count=1)
    p = gl.convert_layout(p_new.to(p.dtype), p.type.layout, assert_trivial=True)
    by_row = gl.convert_layout(rescale, gl.SliceLayout(1, O_LAYOUT), assert_trivial=True)
    return o * gl.expand_dims(by_row, 1), p, row_max, row_sum


@gluon.jit
def finish_rows(row_max, row_sum, sink_log2, scalars, MODE: gl.constexpr):
    """lse, and the factor that turns the accumulator into out; an empty row has lse -inf (or its sink) and factor 0."""
    total = gl.convert_layout(gl.sum(row_sum, 1), row_max.type.layout)
    top = row_max
    if MODE.raw_scale:
        top = row_max * scalars.scale_log2
    top = gl.where(row_max == float("-inf"), float("-inf"), top)
    if MODE.sink:
        both = gl.maximum(top, sink_log2)
        safe = gl.where(both == float("-inf"), 0.0, both)
        shrink = gl.exp2(top - safe)
        total = total * shrink + gl.exp2(sink_log2 - safe)
        factor = gl.where(total == 0.0, 0.0, shrink / total)
        top = both
    else:
        factor = gl.where(total == 0.0, 0.0, 1.0 / total)
    lse = gl.where(total == 0.0, float("-inf"), top * LN2 + gl.log(total))
    return lse, factor


@gluon.jit
def store_out(o, lse, factor, o_desc, o_smem, pointers, work, row0, sizes, MODE: gl.constexpr):
    """Writes 64 rows of out by TMA and of lse directly; rows past the sequence are not touched."""
    rows = row0 + gl.arange(0, 64, layout=lse.type.layout)
    if MODE.varlen:
        first = work.head.to(gl.int64) * sizes.rows + work.q.start
    else:
        first = (work.batch * sizes.nheads + work.head).to(gl.int64) * sizes.rows
    gl.store(pointers.lse + first + rows, lse, mask=rows < work.q.length)
    by_row = gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, o.type.layout), assert_trivial=True), 1)
    o = gl.where(by_row == 0.0, 0.0, o * by_row)
    publish(matrix(o_smem), o.to(o_desc.dtype))
    tma.async_copy_shared_to_global(o_desc, rows_at(work.q, work.head, row0, MODE), o_smem)


@gluon.jit
def consumer(o_desc, o_slots, q_ring, k_ring, v_ring, tickets, pointers, sizes, scalars, INDEX: gl.constexpr,
             MODE: gl.constexpr, TILE: gl.constexpr):
    """Online softmax of rows [64 INDEX, 64 INDEX + 64) of every tile."""
    DTYPE: gl.constexpr = o_desc.dtype
    STAGES: gl.constexpr = TILE.stages
    BLOCK_N: gl.constexpr = TILE.block_n
    BLOCK_DV: gl.constexpr = TILE.block_dv
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_DV, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    o_smem = o_slots.index(INDEX)
    tiles = count_tiles(pointers, sizes, sizes.nheads, MODE)
    tile = gl.program_id(0)
    n = 0
    it = 0
    while tile < tiles:
        work = locate(tile, pointers, sizes, MODE)
        blocks = key_blocks(work, 64 * TILE.consumers, TILE.block_n, MODE)
        row0 = (work.block * TILE.consumers + INDEX) * 64
        slope_log2 = 0.0
        sink_log2 = 0.0
        if MODE.alibi:
            slope_log2 = gl.load(pointers.alibi_slopes + work.batch * sizes.nheads + work.head) * LOG2E
        if MODE.sink:
            sink_log2 = gl.load(pointers.sink + work.batch * sizes.nheads + work.head) * LOG2E

        mbarrier.wait(q_ring.full.index(INDEX), n & 1)
        q = matrix(q_ring.slots.index(INDEX))
        if TILE.q_in_registers:
            q = q.load(gl.DotOperandLayout(0, S_LAYOUT, 2))
            fence_async_shared()
            mbarrier.arrive(q_ring.empty.index(INDEX), count=1)

        slot = it % STAGES
        mbarrier.wait(k_ring.full.index(slot), (it // STAGES) & 1)
        zeros = gl.zeros([64, BLOCK_N], gl.float32, layout=S_LAYOUT)
        s = warpgroup_mma(q, matrix(k_ring.slots.index(slot)).permute((1, 0)), zeros, use_acc=False, is_async=True)
        row_max = gl.full([64], float("-inf"), gl.float32, layout=gl.SliceLayout(1, S_LAYOUT))
        row_sum = partial_sums(zeros)
        o = gl.zeros([64, BLOCK_DV], gl.float32, layout=O_LAYOUT)
        s = warpgroup_mma_wait(0, deps=(s,))
        mbarrier.arrive(k_ring.empty.index(slot), count=1)
        p, _, row_max, row_sum = block_softmax(
            s, row_max, row_sum, row0, blocks.last - 1, blocks, slope_log2, work, scalars, True, MODE
        )
        p = gl.convert_layout(p.to(DTYPE), P_LAYOUT, assert_trivial=True)
        for t in range(1, blocks.last - blocks.first):
            o, p, row_max, row_sum = block_step(blocks.last - 1 - t, it, q, o, p, row_max, row_sum, k_ring, v_ring,
                                                row0, blocks, slope_log2, work, scalars, MODE, TILE)
            it += 1

        slot = it % STAGES
        mbarrier.wait(v_ring.full.index(slot), (it // STAGES) & 1)
        o = warpgroup_mma(p, matrix(v_ring.slots.index(slot)), o, is_async=True)
        lse, factor = finish_rows(row_max, row_sum, sink_log2, scalars, MODE)
        o, p = warpgroup_mma_wait(0, deps=(o, p))
        mbarrier.arrive(v_ring.empty.index(slot), count=1)
        it += 1
        if TILE.own_out:
            tma.store_wait(0)
        store_out(o, lse, factor, o_desc, o_smem, pointers, work, row0, sizes, MODE)
        if not TILE.own_out:
            tma.store_wait(0)
        if not TILE.q_in_registers:
            mbarrier.arrive(q_ring.empty.index(INDEX), count=1)
        tile = read_ticket(tickets, n)
        n += 1
    tma.store_wait(0)


@gluon.jit
def forward_kernel(q_desc, k_desc, v_desc, o_desc, pointers, sizes, scalars, MODE: gl.constexpr, TILE: gl.constexpr,
                   num_warps: gl.constexpr):
    """out and lse of every tile; persistent: a CTA draws tiles until there are none."""
    CONSUMERS: gl.constexpr = TILE.consumers
    q_slots = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS] + q_desc.block_type.shape, q_desc.layout)
    q_ring = Ring(q_slots, new_barriers(CONSUMERS, 1), new_barriers(CONSUMERS, 1))
    k_ring = new_ring(k_desc, TILE.stages, CONSUMERS)
    v_ring = new_ring(v_desc, TILE.stages, CONSUMERS)
    tickets = new_tickets(CONSUMERS)
    if TILE.own_out:
        o_slots = gl.allocate_shared_memory(o_desc.dtype, [CONSUMERS] + o_desc.block_type.shape, o_desc.layout)
    else:
        o_slots = q_slots
    fence_async_shared()
    if CONSUMERS == 2:
        gl.warp_specialize([
            (consumer, (o_desc, o_slots, q_ring, k_ring, v_ring, tickets, pointers, sizes, scalars, 0, MODE, TILE)),
            (consumer, (o_desc, o_slots, q_ring, k_ring, v_ring, tickets, pointers, sizes, scalars, 1, MODE, TILE)),
            (producer, (q_desc, k_desc, v_desc, q_ring, k_ring, v_ring, tickets, pointers, sizes, MODE, TILE)),
        ], [4, 1], [TILE.registers, 24])
    else:
        gl.warp_specialize([
            (consumer, (o_desc, o_slots, q_ring, k_ring, v_ring, tickets, pointers, sizes, scalars, 0, MODE, TILE)),
            (consumer, (o_desc, o_slots, q_ring, k_ring, v_ring, tickets, pointers, sizes, scalars, 1, MODE, TILE)),
            (consumer, (o_desc, o_slots, q_ring, k_ring, v_ring, tickets, pointers, sizes, scalars, 2, MODE, TILE)),
            (producer, (q_desc, k_desc, v_desc, q_ring, k_ring, v_ring, tickets, pointers, sizes, MODE, TILE)),
        ], [4, 4, 1], [TILE.registers, TILE.registers, 24])
