"""The fp8 forward: q, k, v in e4m3, scores, softmax and sums in fp32, out in bf16.

As the forward of ``forward.py``, with three differences. Warps of their own transpose v (``turn.py``). Probabilities
are stored in e4m3, 2**RAISE times too large, so that those under 2**-17 are lost, not those under 2**-9
(``rows_fp8.py``). And every block's product with v starts at zero and is added to fp32 registers, where the rescaling
multiplies anyway: Hopper sums products of e4m3 with 13 bits after the point and cuts off the rest, which takes a share
of a sum that grows with its length (measured without this: 0.7 % of 1024 equal values, 24 % of 16384).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewise.backends.hopper.arguments import Ring, Scalars
from tilewise.backends.hopper.primitives import (
    LOG2E,
    count_tiles,
    draw_ticket,
    key_blocks,
    load,
    matrix,
    new_barriers,
    new_ring,
    new_tickets,
    read_ticket,
    rows_at,
)
from tilewise.backends.hopper.rows_fp8 import (
    RAISE,
    as_operand,
    as_words,
    descaled,
    finish,
    negate,
    store_rows,
    times_rows,
)
from tilewise.backends.hopper.softmax import block_scores, exponentials, partial_sums
from tilewise.backends.hopper.turn import TURNERS, turner
from tilewise.backends.hopper.works import locate

SMALLEST = gl.constexpr(1e-30)  # in place of a descale of 0: 0 times the -inf of a masked score is NaN


@gluon.jit
def producer(q_desc, k_desc, v_desc, q_ring, k_ring, raw_ring, tickets, pointers, sizes, MODE: gl.constexpr,
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
            load(raw_ring, it % TURNERS, it // TURNERS, v_desc, coord)
            it += 1
        tile = draw_ticket(tickets, pointers.ticket, n, tiles)
        n += 1


@gluon.jit
def scores(q, k_ring, it, STAGES: gl.constexpr, S_LAYOUT: gl.constexpr, BLOCK_N: gl.constexpr):
    """Starts q k^T of the ``it``-th block."""
    mbarrier.wait(k_ring.full.index(it % STAGES), (it // STAGES) & 1)
    zeros = gl.zeros([64, BLOCK_N], gl.float32, layout=S_LAYOUT)
    k = matrix(k_ring.slots.index(it % STAGES))
    return warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def block_softmax(s, row_max, row_sum, row0, block, blocks, slope_log2, work, scalars, PARTIAL: gl.constexpr,
                  MODE: gl.constexpr, TILE: gl.constexpr):
    """Probabilities of a block, and with them row_sum, 2**RAISE times too large; the factor for what came before."""
    x, rescale, row_max = block_scores(s, row_max, row0, block, blocks, slope_log2, work, scalars, PARTIAL, MODE, TILE,
                                       RAISE)
    p, row_sum = exponentials(x, rescale, row_sum)
    return p, rescale, row_max, row_sum


@gluon.jit
def weighted(words, v_ring, it, STAGES: gl.constexpr, O_LAYOUT: gl.constexpr):
    """Starts p v of the ``it``-th block, from zero."""
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 4)
    p = as_operand(words, P_LAYOUT)
    mbarrier.wait(v_ring.full.index(it % STAGES), (it // STAGES) & 1)
    v = v_ring.slots.index(it % STAGES).permute((1, 0))
    WIDTH: gl.constexpr = v.shape[1]
    zeros = gl.zeros([64, WIDTH], gl.float32, layout=O_LAYOUT)
    return warpgroup_mma(p, v, zeros, use_acc=False, is_async=True)


@gluon.jit
def block_step(block, it, q, o, words, rescale, row_max, row_sum, k_ring, v_ring, row0, blocks, slope_log2, work,
               scalars, MODE: gl.constexpr, TILE: gl.constexpr):
    """One block: its scores are computed while the block before is multiplied with v, then its softmax.

    ``rescale`` is due to ``o`` before the product of the block before is added.
    """
    STAGES: gl.constexpr = TILE.stages
    BLOCK_N: gl.constexpr = TILE.block_n
    S_LAYOUT: gl.constexpr = row_max.type.layout.parent
    O_LAYOUT: gl.constexpr = o.type.layout
    s = scores(q, k_ring, it + 1, STAGES, S_LAYOUT, BLOCK_N)
    pv = weighted(words, v_ring, it, STAGES, O_LAYOUT)
    s = warpgroup_mma_wait(1, deps=(s,))
    mbarrier.arrive(k_ring.empty.index((it + 1) % STAGES), count=1)
    p, rescale_new, row_max, row_sum = block_softmax(
        s, row_max, row_sum, row0, block, blocks, slope_log2, work, scalars, MODE.lower or MODE.upper, MODE, TILE
    )
    # full as before; but the assembler, which moves the wait below over arithmetic, moves it over no branch
    mbarrier.wait(v_ring.full.index(it % STAGES), (it // STAGES) & 1)
    pv = warpgroup_mma_wait(0, deps=(pv,))
    mbarrier.arrive(v_ring.empty.index(it % STAGES), count=1)
    o = times_rows(o, rescale) + pv
    return o, as_words(p), rescale_new, row_max, row_sum


@gluon.jit
def overlapped(it, q, k_ring, v_ring, row0, blocks, slope_log2, work, scalars, MODE: gl.constexpr, TILE: gl.constexpr):
    """A tile's blocks, each product with v under the next scores; returns unscaled out and the softmax state."""
    STAGES: gl.constexpr = TILE.stages
    BLOCK_N: gl.constexpr = TILE.block_n
    BLOCK_DV: gl.constexpr = TILE.block_dv
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_DV, 32])
    s = scores(q, k_ring, it, STAGES, S_LAYOUT, BLOCK_N)
    row_max = gl.full([64], float("-inf"), gl.float32, layout=gl.SliceLayout(1, S_LAYOUT))
    row_sum = partial_sums(gl.zeros([64, BLOCK_N], gl.float32, layout=S_LAYOUT))
    o = gl.zeros([64, BLOCK_DV], gl.float32, layout=O_LAYOUT)
    s = warpgroup_mma_wait(0, deps=(s,))
    mbarrier.arrive(k_ring.empty.index(it % STAGES), count=1)
    p, rescale, row_max, row_sum = block_softmax(
        s, row_max, row_sum, row0, blocks.last - 1, blocks, slope_log2, work, scalars, True, MODE, TILE
    )
    words = as_words(p)
    for t in range(1, blocks.last - blocks.first):
        o, words, rescale, row_max, row_sum = block_step(
            blocks.last - 1 - t, it, q, o, words, rescale, row_max, row_sum, k_ring, v_ring, row0, blocks, slope_log2,
            work, scalars, MODE, TILE,
        )  # fmt: skip
        it += 1
    pv = weighted(words, v_ring, it, STAGES, O_LAYOUT)
    pv = warpgroup_mma_wait(0, deps=(pv,))
    mbarrier.arrive(v_ring.empty.index(it % STAGES), count=1)
    return times_rows(o, rescale) + pv, row_max, row_sum


@gluon.jit
def part(p, v_ring, slot, INDEX: gl.constexpr, LAYOUT: gl.constexpr):
    """Starts p v for 64 channels of v, from zero."""
    v = v_ring.slots.index(slot).slice(64 * INDEX, 64, 0).permute((1, 0))
    zeros = gl.zeros([64, 64], gl.float32, layout=LAYOUT)
    return warpgroup_mma(p, v, zeros, use_acc=False, is_async=True)


@gluon.jit
def step_in_parts(block, it, q, o0, o1, o2, o3, row_max, row_sum, k_ring, v_ring, row0, blocks, slope_log2, work,
                  scalars, PARTIAL: gl.constexpr, MODE: gl.constexpr, TILE: gl.constexpr):
    """One block for 256 channels of v, 64 at a time: there are no registers for more in flight."""
    STAGES: gl.constexpr = TILE.stages
    BLOCK_N: gl.constexpr = TILE.block_n
    S_LAYOUT: gl.constexpr = row_max.type.layout.parent
    O_LAYOUT: gl.constexpr = o0.type.layout
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 4)
    slot = it % STAGES
    s = scores(q, k_ring, it, STAGES, S_LAYOUT, BLOCK_N)
    s = warpgroup_mma_wait(0, deps=(s,))
    mbarrier.arrive(k_ring.empty.index(slot), count=1)
    p, rescale, row_max, row_sum = block_softmax(
        s, row_max, row_sum, row0, block, blocks, slope_log2, work, scalars, PARTIAL, MODE, TILE
    )
    p = as_operand(as_words(p), P_LAYOUT)
    mbarrier.wait(v_ring.full.index(slot), (it // STAGES) & 1)
    pv0 = part(p, v_ring, slot, 0, O_LAYOUT)
    pv1 = part(p, v_ring, slot, 1, O_LAYOUT)
    pv0 = warpgroup_mma_wait(1, deps=(pv0,))
    o0 = times_rows(o0, rescale) + pv0
    pv2 = part(p, v_ring, slot, 2, O_LAYOUT)
    pv1 = warpgroup_mma_wait(1, deps=(pv1,))
    o1 = times_rows(o1, rescale) + pv1
    pv3 = part(p, v_ring, slot, 3, O_LAYOUT)
    pv2 = warpgroup_mma_wait(1, deps=(pv2,))
    o2 = times_rows(o2, rescale) + pv2
    pv3 = warpgroup_mma_wait(0, deps=(pv3,))
    mbarrier.arrive(v_ring.empty.index(slot), count=1)
    o3 = times_rows(o3, rescale) + pv3
    return o0, o1, o2, o3, row_max, row_sum


@gluon.jit
def in_parts(it, q, k_ring, v_ring, row0, blocks, slope_log2, work, scalars, MODE: gl.constexpr, TILE: gl.constexpr):
    """A tile's blocks, one after the other; returns unscaled out and the softmax state."""
    BLOCK_N: gl.constexpr = TILE.block_n
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32])
    row_max = gl.full([64], float("-inf"), gl.float32, layout=gl.SliceLayout(1, S_LAYOUT))
    row_sum = partial_sums(gl.zeros([64, BLOCK_N], gl.float32, layout=S_LAYOUT))
    o = gl.zeros([64, 64], gl.float32, layout=O_LAYOUT)
    o0, o1, o2, o3, row_max, row_sum = step_in_parts(
        blocks.last - 1, it, q, o, o, o, o, row_max, row_sum, k_ring, v_ring, row0, blocks, slope_log2, work, scalars,
        True, MODE, TILE,
    )  # fmt: skip
    for t in range(1, blocks.last - blocks.first):
        it += 1
        # the mask is there for its branch, over which the assembler does not spread the scores' registers: without it
        # 26 registers of a step are spilled
        o0, o1, o2, o3, row_max, row_sum = step_in_parts(
            blocks.last - 1 - t, it, q, o0, o1, o2, o3, row_max, row_sum, k_ring, v_ring, row0, blocks, slope_log2,
            work, scalars, True, MODE, TILE,
        )  # fmt: skip
    return o0, o1, o2, o3, row_max, row_sum


@gluon.jit
def consumer(q_ring, k_ring, v_ring, tickets, pointers, sizes, scalars, INDEX: gl.constexpr, MODE: gl.constexpr,
             TILE: gl.constexpr):
    """Online softmax of rows [64 INDEX, 64 INDEX + 64) of every tile."""
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
        of_scores = descaled(pointers.q_descale, work, sizes) * descaled(pointers.k_descale, work, sizes)
        of_values = descaled(pointers.v_descale, work, sizes)

        mbarrier.wait(q_ring.full.index(INDEX), n & 1)
        q = matrix(q_ring.slots.index(INDEX))
        if pointers.q_descale is not None or pointers.k_descale is not None:
            if of_scores < 0.0:  # the softmax below takes its maximum before it scales
                negate(q)
            of_scores = gl.maximum(gl.abs(of_scores), SMALLEST)
        real = Scalars(scalars.softmax_scale, scalars.scale_log2 * of_scores, scalars.softcap_in * of_scores,
                       scalars.softcap_out)
        if TILE.parts == 1:
            o, row_max, row_sum = overlapped(it, q, k_ring, v_ring, row0, blocks, slope_log2, work, real, MODE, TILE)
        else:
            o0, o1, o2, o3, row_max, row_sum = in_parts(it, q, k_ring, v_ring, row0, blocks, slope_log2, work, real,
                                                        MODE, TILE)
        it += blocks.last - blocks.first
        mbarrier.arrive(q_ring.empty.index(INDEX), count=1)
        factor = finish(row_max, row_sum, sink_log2, of_values, pointers, work, row0, sizes, real, MODE)
        if TILE.parts == 1:
            store_rows(o, factor, 0, pointers, work, row0, sizes, MODE, TILE)
        else:
            store_rows(o0, factor, 0, pointers, work, row0, sizes, MODE, TILE)
            store_rows(o1, factor, 64, pointers, work, row0, sizes, MODE, TILE)
            store_rows(o2, factor, 128, pointers, work, row0, sizes, MODE, TILE)
            store_rows(o3, factor, 192, pointers, work, row0, sizes, MODE, TILE)
        tile = read_ticket(tickets, n)
        n += 1


@gluon.jit
def forward_fp8_kernel(q_desc, k_desc, v_desc, pointers, sizes, scalars, MODE: gl.constexpr, TILE: gl.constexpr,
                       num_warps: gl.constexpr):
    """out and lse of every tile; persistent: a CTA draws tiles until there are none."""
    CONSUMERS: gl.constexpr = TILE.consumers
    WIDTH: gl.constexpr = TILE.block_n if TILE.block_n < 128 else 128
    q_slots = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS] + q_desc.block_type.shape, q_desc.layout)
    q_ring = Ring(q_slots, new_barriers(CONSUMERS, 1), new_barriers(CONSUMERS, 1))
    k_ring = new_ring(k_desc, TILE.stages, CONSUMERS)
    raw_ring = new_ring(v_desc, TURNERS, 1)
    v_slots = gl.allocate_shared_memory(
        v_desc.dtype, [TILE.stages, TILE.block_dv, TILE.block_n], gl.NVMMASharedLayout(WIDTH, 8, 2)
    )
    v_ring = Ring(v_slots, new_barriers(TILE.stages, 1), new_barriers(TILE.stages, CONSUMERS))
    tickets = new_tickets(CONSUMERS + TURNERS)
    SMALL: gl.constexpr = TILE.small_registers
    fence_async_shared()
    if CONSUMERS == 2:
        gl.warp_specialize([
            (consumer, (q_ring, k_ring, v_ring, tickets, pointers, sizes, scalars, 0, MODE, TILE)),
            (consumer, (q_ring, k_ring, v_ring, tickets, pointers, sizes, scalars, 1, MODE, TILE)),
            (turner, (raw_ring, v_ring, tickets, pointers, sizes, 0, MODE, TILE)),
            (turner, (raw_ring, v_ring, tickets, pointers, sizes, 1, MODE, TILE)),
            (producer, (q_desc, k_desc, v_desc, q_ring, k_ring, raw_ring, tickets, pointers, sizes, MODE, TILE)),
        ], [4, 1, 1, 1], [TILE.registers, SMALL, SMALL, SMALL])
    else:
        gl.warp_specialize([
            (consumer, (q_ring, k_ring, v_ring, tickets, pointers, sizes, scalars, 0, MODE, TILE)),
            (consumer, (q_ring, k_ring, v_ring, tickets, pointers, sizes, scalars, 1, MODE, TILE)),
            (consumer, (q_ring, k_ring, v_ring, tickets, pointers, sizes, scalars, 2, MODE, TILE)),
            (turner, (raw_ring, v_ring, tickets, pointers, sizes, 0, MODE, TILE)),
            (turner, (raw_ring, v_ring, tickets, pointers, sizes, 1, MODE, TILE)),
            (producer, (q_desc, k_desc, v_desc, q_ring, k_ring, raw_ring, tickets, pointers, sizes, MODE, TILE)),
        ], [4, 4, 1, 1, 1], [TILE.registers, TILE.registers, SMALL, SMALL, SMALL])
