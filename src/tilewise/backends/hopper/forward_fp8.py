"""The fp8 forward: q, k, v in e4m3, scores, softmax and sums in fp32, out in bf16.

Products of e4m3 numbers take both operands with their summed dimension contiguous. For p v that is the keys, so warps
of their own transpose every tile of v inside shared memory. They leave the keys of each 16 in the order in which the
scores lie in registers, and the channels of each 16 in the order that makes out's rows contiguous in a thread.

Hopper sums such products with 13 bits after the point, so that a long sum loses its tail. ``promote`` starts every
block's product at zero and adds it to fp32 registers, where the rescaling multiplies anyway.
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
from tilewise.backends.hopper.forward import finish_rows, partial_sums
from tilewise.backends.hopper.primitives import (
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

SMALLEST = gl.constexpr(1e-30)  # in place of a descale of 0: 0 times the -inf of a masked score is NaN
SIGNS = gl.constexpr(0x80808080 - (1 << 32))  # of the four numbers in an int32
RAISE = gl.constexpr(8.0)  # log2 of what a row's largest probability is stored as: 256, of e4m3's 448


@gluon.jit
def producer(q_desc, k_desc, v_desc, q_ring, k_ring, raw_ring, tickets, pointers, sizes, MODE: gl.constexpr,
             TILE: gl.constexpr):
    """Fetches q of every tile and its k and v blocks, last block first, and draws the next tile."""
    STAGES: gl.constexpr = TILE.stages
    RAW_STAGES: gl.constexpr = TILE.v_stages
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
            load(raw_ring, it % RAW_STAGES, it // RAW_STAGES, v_desc, coord)
            it += 1
        tile = draw_ticket(tickets, pointers.ticket, n, tiles)
        n += 1


TURN_KEYS = gl.constexpr(32)  # what one warp turns at a time
TURN_DIM = gl.constexpr(64)


@gluon.constexpr_function
def turn_layout(keys, pairs):
    """Registers of a part of v in one warp, as pairs of channels: what ldmatrix.trans gives.

    A thread's first four registers are two neighbouring keys and the same two eight keys on.
    """
    across = [[0, 1 << bit] for bit in range(3, pairs.bit_length() - 1)]
    along = [[1 << bit, 0] for bit in range(4, keys.bit_length() - 1)]
    lanes = [[2, 0], [4, 0], [0, 1], [0, 2], [0, 4]]
    return gl.DistributedLinearLayout([[1, 0], [8, 0], *across, *along], lanes, [], [], [keys, pairs])


@gluon.jit
def turn(raw, turned):
    """Transposes (keys, channels) of raw into (channels, keys), each 16 of either in the order the head tells.

    Channels travel in pairs of 16 bits. Words of two keys, and the same eight keys on, hold the pair's two channels of
    four keys; the byte permutation makes a word of each channel.
    """
    KEYS: gl.constexpr = raw.shape[0]
    DIM: gl.constexpr = raw.shape[1]
    PAIRS: gl.constexpr = TURN_DIM // 2
    LAYOUT: gl.constexpr = turn_layout(TURN_KEYS, PAIRS)
    pairs = raw._reinterpret(gl.int16, [KEYS, DIM // 2], gl.NVMMASharedLayout(min(DIM, 128), 16, 2))
    target = turned._reinterpret(gl.int16, [DIM, KEYS // 2], gl.NVMMASharedLayout(min(KEYS, 128), 16, 2))
    for key in gl.static_range(0, KEYS, TURN_KEYS):
        for pair in gl.static_range(0, DIM // 2, PAIRS):
            x = pairs.slice(key, TURN_KEYS, 0).slice(pair, PAIRS, 1).load(LAYOUT)
            x = gl.inline_asm_elementwise(
                "prmt.b32 $0, $2, $3, 0x6420; prmt.b32 $1, $2, $3, 0x7531;", "=r,=r,r,r", [x], dtype=gl.int16,
                is_pure=True, pack=4,
            )  # fmt: skip
            x = x.reshape([TURN_KEYS // 16, 2, 8, PAIRS // 8, 8]).permute([3, 1, 4, 0, 2])
            x = x.reshape([TURN_DIM, TURN_KEYS // 2])
            target.slice(2 * pair, TURN_DIM, 0).slice(key // 2, TURN_KEYS // 2, 1).store(x)


@gluon.jit
def turner(raw_ring, v_ring, tickets, pointers, sizes, INDEX: gl.constexpr, MODE: gl.constexpr, TILE: gl.constexpr):
    """One warp of those that transpose v: every ``TILE.turners``-th block, the INDEX-th first."""
    STAGES: gl.constexpr = TILE.stages
    RAW_STAGES: gl.constexpr = TILE.v_stages
    tiles = count_tiles(pointers, sizes, sizes.nheads, MODE)
    tile = gl.program_id(0)
    n = 0
    end = 0
    it = INDEX
    while tile < tiles:
        work = locate(tile, pointers, sizes, MODE)
        blocks = key_blocks(work, 64 * TILE.consumers, TILE.block_n, MODE)
        end += blocks.last - blocks.first
        while it < end:
            slot = it % STAGES
            stored = it % RAW_STAGES
            mbarrier.wait(raw_ring.full.index(stored), (it // RAW_STAGES) & 1)
            mbarrier.wait(v_ring.empty.index(slot), ((it // STAGES) & 1) ^ 1)
            if not TILE.idle:
                turn(matrix(raw_ring.slots.index(stored)), v_ring.slots.index(slot))
            fence_async_shared()
            mbarrier.arrive(raw_ring.empty.index(stored), count=1)
            mbarrier.arrive(v_ring.full.index(slot), count=1)
            it += TILE.turners
        tile = read_ticket(tickets, n)
        n += 1


@gluon.jit
def softmax_step(s, row_max, row_sum, scale_log2, MODE: gl.constexpr):
    """One block of the online softmax, its probabilities 2**RAISE times too large, and the factor for the blocks before."""
    row_max_new = gl.maximum(row_max, gl.max(s, 1))
    shift = row_max_new * scale_log2
    if MODE.lower or MODE.upper or MODE.varlen:  # a row that has seen nothing yet has no maximum to subtract
        shift = gl.where(row_max_new == float("-inf"), 0.0, shift)
    rescale = gl.exp2(row_max * scale_log2 - shift)
    p = gl.exp2(s * scale_log2 - gl.expand_dims(shift - RAISE, 1))
    sums = partial_sums(p)
    by_thread = gl.convert_layout(rescale, gl.SliceLayout(1, sums.type.layout), assert_trivial=True)
    return p, rescale, row_max_new, row_sum * gl.expand_dims(by_thread, 1) + sums


@gluon.jit
def block_softmax(s, row_max, row_sum, row0, block, blocks, slope_log2, work, scalars, PARTIAL: gl.constexpr,
                  MODE: gl.constexpr):
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
        return softmax_step(s, row_max, row_sum, scalars.scale_log2, MODE)
    else:
        return softmax_step(s, row_max, row_sum, 1.0, MODE)


@gluon.jit
def as_words(p):
    """Probabilities in e4m3, four keys a word: keys 2q, 2q + 1, 2q + 8 and 2q + 9 of each 16, which a thread holds."""
    KEYS: gl.constexpr = p.shape[1]
    p = p.reshape([64, KEYS // 16, 2, 4, 2]).permute([0, 1, 3, 2, 4])
    first, second = gl.split(p)
    a, c = gl.split(first)
    b, d = gl.split(second)
    words = gl.inline_asm_elementwise(
        "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; "
        "mov.b32 $0, {low, high}; }", "=r,r,r,r,r", [a, b, c, d], dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip
    return words.reshape([64, KEYS // 4])


@gluon.jit
def as_operand(words, LAYOUT: gl.constexpr):
    """Words of four e4m3 numbers as the left operand of a product. Moves nothing.

    Four words of a thread, of two rows and two 16s of keys, become four registers of four bytes; which word and which
    byte are named by each other's place, and change names again.
    """
    WORDS: gl.constexpr = words.shape[1]
    a, b, c, d = gl.inline_asm_elementwise(
        "mov.b32 $0, $4; mov.b32 $1, $5; mov.b32 $2, $6; mov.b32 $3, $7;", "=r,=r,=r,=r,r,r,r,r", [words],
        dtype=(gl.int8, gl.int8, gl.int8, gl.int8), is_pure=True, pack=4,
    )  # fmt: skip
    p = gl.join(gl.join(a, c), gl.join(b, d))  # (rows, words, keys' 16, row)
    p = p.reshape([4, 2, 8, WORDS // 8, 2, 4, 2, 2]).permute([0, 7, 2, 3, 6, 5, 4, 1]).reshape([64, 4 * WORDS])
    return gl.convert_layout(p, LAYOUT).to(gl.float8e4nv, bitcast=True)


@gluon.jit
def scores(q, k_ring, it, STAGES: gl.constexpr, S_LAYOUT: gl.constexpr, BLOCK_N: gl.constexpr):
    """Starts q k^T of the ``it``-th block."""
    mbarrier.wait(k_ring.full.index(it % STAGES), (it // STAGES) & 1)
    zeros = gl.zeros([64, BLOCK_N], gl.float32, layout=S_LAYOUT)
    k = matrix(k_ring.slots.index(it % STAGES))
    return warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def weighted(words, o, v_ring, it, STAGES: gl.constexpr, PROMOTE: gl.constexpr):
    """Starts p v of the ``it``-th block, onto ``o`` or from zero."""
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, o.type.layout, 4)
    p = as_operand(words, P_LAYOUT)
    mbarrier.wait(v_ring.full.index(it % STAGES), (it // STAGES) & 1)
    v = v_ring.slots.index(it % STAGES).permute((1, 0))
    if PROMOTE:
        LAYOUT: gl.constexpr = o.type.layout
        zeros = gl.zeros([64, o.shape[1]], gl.float32, layout=LAYOUT)
        return warpgroup_mma(p, v, zeros, use_acc=False, is_async=True)
    else:
        return warpgroup_mma(p, v, o, is_async=True)


@gluon.jit
def times_rows(o, factor):
    return o * gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, o.type.layout), assert_trivial=True), 1)


@gluon.jit
def own_turn(INDEX: gl.constexpr):
    """Waits until the other consumer has started its products."""
    if INDEX == 0:
        gl.inline_asm_elementwise("bar.sync 8, 256; mov.u32 $0, $1;", "=r,r", [gl.to_tensor(0)], dtype=gl.int32,
                                  is_pure=False, pack=1)
    else:
        gl.inline_asm_elementwise("bar.sync 9, 256; mov.u32 $0, $1;", "=r,r", [gl.to_tensor(0)], dtype=gl.int32,
                                  is_pure=False, pack=1)


@gluon.jit
def others_turn(INDEX: gl.constexpr):
    """Lets the other consumer start its products."""
    if INDEX == 0:
        gl.inline_asm_elementwise("bar.arrive 9, 256; mov.u32 $0, $1;", "=r,r", [gl.to_tensor(0)], dtype=gl.int32,
                                  is_pure=False, pack=1)
    else:
        gl.inline_asm_elementwise("bar.arrive 8, 256; mov.u32 $0, $1;", "=r,r", [gl.to_tensor(0)], dtype=gl.int32,
                                  is_pure=False, pack=1)


@gluon.jit
def block_step(block, it, q, o, p, rescale, row_max, row_sum, k_ring, v_ring, row0, blocks, slope_log2, work, scalars,
               INDEX: gl.constexpr, MODE: gl.constexpr, TILE: gl.constexpr):
    """One block: its scores are computed while the block before is multiplied with v, then its softmax.

    ``rescale`` is due to ``o`` before the product of the block before is added.
    """
    STAGES: gl.constexpr = TILE.stages
    BLOCK_N: gl.constexpr = TILE.block_n
    S_LAYOUT: gl.constexpr = row_max.type.layout.parent
    if TILE.pingpong:
        own_turn(INDEX)
    s = scores(q, k_ring, it + 1, STAGES, S_LAYOUT, BLOCK_N)
    pv = weighted(p, o, v_ring, it, STAGES, TILE.promote)
    if TILE.pingpong:
        others_turn(INDEX)
    s = warpgroup_mma_wait(1, deps=(s,))
    mbarrier.arrive(k_ring.empty.index((it + 1) % STAGES), count=1)
    p_new, rescale_new, row_max, row_sum = block_softmax(
        s, row_max, row_sum, row0, block, blocks, slope_log2, work, scalars, MODE.lower or MODE.upper, MODE
    )
    if TILE.pin:
        mbarrier.wait(v_ring.full.index(it % STAGES), (it // STAGES) & 1)
    pv = warpgroup_mma_wait(0, deps=(pv,))
    mbarrier.arrive(v_ring.empty.index(it % STAGES), count=1)
    if TILE.promote:
        o = times_rows(o, rescale) + pv
    else:
        o = times_rows(pv, rescale_new)
    return o, as_words(p_new), rescale_new, row_max, row_sum


@gluon.jit
def descaled(descale, work, sizes):
    """What the stored numbers of a tile's head are multiplied by."""
    if descale is None:
        return 1.0
    else:
        head_k = work.head // sizes.group
        return gl.load(descale.address + work.batch * descale.batch_stride + head_k * descale.head_stride)


@gluon.constexpr_function
def row_layout(cols):
    """64 rows over a warpgroup, four neighbouring channels a thread: ``as stored`` of the accumulator's layout."""
    far = [[0, 1 << bit] for bit in range(4, cols.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], *far], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, cols]
    )


@gluon.jit
def negate(tile):
    """Flips the sign of e4m3 numbers in shared memory."""
    ROWS: gl.constexpr = tile.shape[0]
    WORDS: gl.constexpr = tile.shape[1] // 4
    WIDTH: gl.constexpr = tile.shape[1] if tile.shape[1] < 128 else 128
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [gl.num_warps(), 1], [1, 0])
    words = tile._reinterpret(gl.int32, [ROWS, WORDS], gl.NVMMASharedLayout(WIDTH, 32, 2))
    publish(words, words.load(LAYOUT) ^ SIGNS)
    gl.thread_barrier()


@gluon.jit
def store_rows(o, factor, FIRST: gl.constexpr, pointers, work, row0, sizes, MODE: gl.constexpr, TILE: gl.constexpr):
    """64 rows of out and its channels from FIRST on; those of each 16 come back in order."""
    COLS: gl.constexpr = o.shape[1]
    DIM: gl.constexpr = TILE.columns
    LAYOUT: gl.constexpr = row_layout(COLS)
    by_row = gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, o.type.layout), assert_trivial=True), 1)
    o = gl.where(by_row == 0.0, 0.0, o * by_row)
    o = o.reshape([64, COLS // 16, 2, 8]).permute([0, 1, 3, 2]).reshape([64, COLS])
    o = gl.convert_layout(o.to(gl.bfloat16), LAYOUT)
    rows = row0 + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    cols = FIRST + gl.arange(0, COLS, layout=gl.SliceLayout(0, LAYOUT))
    if MODE.varlen:
        first = work.q.start.to(gl.int64)
    else:
        first = work.q.start.to(gl.int64) * sizes.seqlen_q
    at = ((first + rows) * sizes.nheads + work.head) * DIM
    at = gl.expand_dims(pointers.out + at, 1) + gl.expand_dims(cols, 0)
    at = gl.max_contiguous(gl.multiple_of(at, [1, 8]), [1, 4])
    keep = gl.expand_dims(rows < work.q.length, 1)
    if FIRST + COLS > DIM:
        keep = keep & gl.expand_dims(cols < DIM, 0)
    gl.store(at, o, mask=keep)


@gluon.jit
def finish(row_max, row_sum, sink_log2, v_descale, pointers, work, row0, sizes, scalars, MODE: gl.constexpr):
    """Writes lse of 64 rows; returns the factor that turns the accumulator into out, 0 for an empty row."""
    LOWER: gl.constexpr = 0.00390625  # 2**-RAISE
    lse, factor = finish_rows(row_max, row_sum * LOWER, sink_log2, scalars, MODE)
    rows = row0 + gl.arange(0, 64, layout=lse.type.layout)
    if MODE.varlen:
        first = work.head.to(gl.int64) * sizes.rows + work.q.start
    else:
        first = (work.batch * sizes.nheads + work.head).to(gl.int64) * sizes.rows
    gl.store(pointers.lse + first + rows, lse, mask=rows < work.q.length)
    return factor * (v_descale * LOWER)


@gluon.jit
def overlapped(it, q, k_ring, v_ring, row0, blocks, slope_log2, work, scalars, INDEX: gl.constexpr,
               MODE: gl.constexpr, TILE: gl.constexpr):
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
        s, row_max, row_sum, row0, blocks.last - 1, blocks, slope_log2, work, scalars, True, MODE
    )
    p = as_words(p)
    for t in range(1, blocks.last - blocks.first):
        o, p, rescale, row_max, row_sum = block_step(blocks.last - 1 - t, it, q, o, p, rescale, row_max, row_sum, k_ring,
                                                     v_ring, row0, blocks, slope_log2, work, scalars, INDEX, MODE,
                                                     TILE)
        it += 1
    pv = weighted(p, o, v_ring, it, STAGES, TILE.promote)
    pv = warpgroup_mma_wait(0, deps=(pv,))
    mbarrier.arrive(v_ring.empty.index(it % STAGES), count=1)
    if TILE.promote:
        o = times_rows(o, rescale) + pv
    else:
        o = pv
    return o, row_max, row_sum


@gluon.jit
def part(p, v_ring, slot, INDEX: gl.constexpr, registers):
    """Starts p v for 64 channels of v, in the ``registers`` of what is no longer needed."""
    v = v_ring.slots.index(slot).slice(64 * INDEX, 64, 0).permute((1, 0))
    return warpgroup_mma(p, v, registers, use_acc=False, is_async=True)


@gluon.jit
def halves(s, LAYOUT: gl.constexpr):
    """The columns of a tile of scores, 64 and 64."""
    a, b = gl.split(s.reshape([64, 2, 64]).permute([0, 2, 1]))
    return gl.convert_layout(a, LAYOUT, assert_trivial=True), gl.convert_layout(b, LAYOUT, assert_trivial=True)


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
        s, row_max, row_sum, row0, block, blocks, slope_log2, work, scalars, PARTIAL, MODE
    )
    left, right = halves(p, O_LAYOUT)
    p = as_operand(as_words(p), P_LAYOUT)
    mbarrier.wait(v_ring.full.index(slot), (it // STAGES) & 1)
    if TILE.flight == 2:
        pv0 = part(p, v_ring, slot, 0, left)
        pv1 = part(p, v_ring, slot, 1, right)
        pv0 = warpgroup_mma_wait(1, deps=(pv0,))
        o0 = times_rows(o0, rescale) + pv0
        pv2 = part(p, v_ring, slot, 2, pv0)
        pv1 = warpgroup_mma_wait(1, deps=(pv1,))
        o1 = times_rows(o1, rescale) + pv1
        pv3 = part(p, v_ring, slot, 3, pv1)
        pv2 = warpgroup_mma_wait(1, deps=(pv2,))
        o2 = times_rows(o2, rescale) + pv2
        pv3 = warpgroup_mma_wait(0, deps=(pv3,))
        mbarrier.arrive(v_ring.empty.index(slot), count=1)
        o3 = times_rows(o3, rescale) + pv3
    else:
        pv = warpgroup_mma_wait(0, deps=(part(p, v_ring, slot, 0, left),))
        o0 = times_rows(o0, rescale) + pv
        pv = warpgroup_mma_wait(0, deps=(part(p, v_ring, slot, 1, pv),))
        o1 = times_rows(o1, rescale) + pv
        pv = warpgroup_mma_wait(0, deps=(part(p, v_ring, slot, 2, pv),))
        o2 = times_rows(o2, rescale) + pv
        pv = warpgroup_mma_wait(0, deps=(part(p, v_ring, slot, 3, pv),))
        mbarrier.arrive(v_ring.empty.index(slot), count=1)
        o3 = times_rows(o3, rescale) + pv
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
        o0, o1, o2, o3, row_max, row_sum = step_in_parts(
            blocks.last - 1 - t, it, q, o0, o1, o2, o3, row_max, row_sum, k_ring, v_ring, row0, blocks, slope_log2,
            work, scalars, MODE.lower or MODE.upper, MODE, TILE,
        )  # fmt: skip
    return o0, o1, o2, o3, row_max, row_sum


@gluon.jit
def consumer(q_ring, k_ring, v_ring, tickets, pointers, sizes, scalars, INDEX: gl.constexpr, MODE: gl.constexpr,
             TILE: gl.constexpr):
    """Online softmax of rows [64 INDEX, 64 INDEX + 64) of every tile."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE.block_n, 32])
    tiles = count_tiles(pointers, sizes, sizes.nheads, MODE)
    tile = gl.program_id(0)
    n = 0
    it = 0
    if TILE.pingpong and INDEX == 1:
        others_turn(INDEX)
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
        if TILE.q_in_registers:
            q = q.load(gl.DotOperandLayout(0, S_LAYOUT, 4))
            fence_async_shared()
            mbarrier.arrive(q_ring.empty.index(INDEX), count=1)
        if TILE.parts == 1:
            o, row_max, row_sum = overlapped(it, q, k_ring, v_ring, row0, blocks, slope_log2, work, real, INDEX, MODE,
                                             TILE)
        else:
            o0, o1, o2, o3, row_max, row_sum = in_parts(it, q, k_ring, v_ring, row0, blocks, slope_log2, work, real,
                                                        MODE, TILE)
        it += blocks.last - blocks.first
        if not TILE.q_in_registers:
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
    raw_ring = new_ring(v_desc, TILE.v_stages, 1)
    v_slots = gl.allocate_shared_memory(
        v_desc.dtype, [TILE.stages, TILE.block_dv, TILE.block_n], gl.NVMMASharedLayout(WIDTH, 8, 2)
    )
    v_ring = Ring(v_slots, new_barriers(TILE.stages, 1), new_barriers(TILE.stages, CONSUMERS))
    tickets = new_tickets(CONSUMERS + 3)
    fence_async_shared()
    if CONSUMERS == 2:
        gl.warp_specialize([
            (consumer, (q_ring, k_ring, v_ring, tickets, pointers, sizes, scalars, 0, MODE, TILE)),
            (consumer, (q_ring, k_ring, v_ring, tickets, pointers, sizes, scalars, 1, MODE, TILE)),
            (turner, (raw_ring, v_ring, tickets, pointers, sizes, 0, MODE, TILE)),
            (turner, (raw_ring, v_ring, tickets, pointers, sizes, 1, MODE, TILE)),
            (turner, (raw_ring, v_ring, tickets, pointers, sizes, 2, MODE, TILE)),
            (producer, (q_desc, k_desc, v_desc, q_ring, k_ring, raw_ring, tickets, pointers, sizes, MODE, TILE)),
        ], [4, 1, 1, 1, 1], [TILE.registers, TILE.small_registers, TILE.small_registers, TILE.small_registers,
                             TILE.small_registers])
    else:
        gl.warp_specialize([
            (consumer, (q_ring, k_ring, v_ring, tickets, pointers, sizes, scalars, 0, MODE, TILE)),
            (consumer, (q_ring, k_ring, v_ring, tickets, pointers, sizes, scalars, 1, MODE, TILE)),
            (consumer, (q_ring, k_ring, v_ring, tickets, pointers, sizes, scalars, 2, MODE, TILE)),
            (turner, (raw_ring, v_ring, tickets, pointers, sizes, 0, MODE, TILE)),
            (turner, (raw_ring, v_ring, tickets, pointers, sizes, 1, MODE, TILE)),
            (turner, (raw_ring, v_ring, tickets, pointers, sizes, 2, MODE, TILE)),
            (producer, (q_desc, k_desc, v_desc, q_ring, k_ring, raw_ring, tickets, pointers, sizes, MODE, TILE)),
        ], [4, 4, 1, 1, 1, 1], [TILE.registers, TILE.registers, TILE.small_registers, TILE.small_registers,
                                TILE.small_registers, TILE.small_registers])
