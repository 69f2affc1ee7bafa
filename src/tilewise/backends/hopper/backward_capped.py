"""A step of the backward up to 128 channels under a softcap, without segments.

The softcap and its derivative are

    tanh(x) = 1 - 2 r,  tanh'(x) = 4 r (1 - r),  r = 1 / (1 + exp(2 x))

so a probability takes three special functions. It is computed for half of a step's rows at a time: the first half
while dq of the step before is under way, the second when dq has left its registers.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from tilewise.backends.hopper.backward_parts import hand_over_dq, start_dq
from tilewise.backends.hopper.backward_scores import keep_transposed, start_over_channels
from tilewise.backends.hopper.barriers import DOUT_READ, Q_READ, await_ds, let_go, meet, tell_ds
from tilewise.backends.hopper.primitives import matrix, publish
from tilewise.backends.hopper.products import as_left, halves, side_by_side


@gluon.constexpr_function
def pair_text(dtype: str, masked: bool, packed: bool) -> str:
    """PTX for two scores: both p, rounded to a word, and their p tanh'(...), two numbers or packed a word of fp16.

    Behind the scores come the exponents without the share of r, then 2 log2(e) scale / softcap, then the factor of r in
    an exponent. A score that is left out may be NaN, and its exponent is -inf: with a number for r its p and its
    derivative are 0.
    """
    first = 2 if packed else 3
    text = "{ .reg .f32 r<2>, x<2>, w<2>;"
    for i in range(2):
        text += f"mul.f32 x{i}, ${first + i}, ${first + 4}; ex2.approx.ftz.f32 x{i}, x{i};"
        text += f"add.f32 x{i}, x{i}, 0f3F800000; rcp.approx.ftz.f32 r{i}, x{i};"
        text += f"min.f32 r{i}, r{i}, 0f3F800000;" if masked else ""
        text += f"fma.rn.f32 x{i}, r{i}, ${first + 5}, ${first + 2 + i}; ex2.approx.ftz.f32 x{i}, x{i};"
        text += f"neg.f32 w{i}, r{i}; fma.rn.f32 w{i}, w{i}, r{i}, r{i}; mul.f32 w{i}, w{i}, 0f40800000;"
        text += f"mul.f32 w{i}, w{i}, x{i};"
    text += f"cvt.rn.{'bf16x2' if dtype == 'bf16' else 'f16x2'}.f32 $0, x1, x0;"
    return text + ("cvt.rn.f16x2.f32 $1, w1, w0; }" if packed else "mov.f32 $1, w0; mov.f32 $2, w1; }")


@gluon.jit
def neighbours(x):
    """Even and odd columns, which a thread holds side by side."""
    return gl.split(gl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))


@gluon.jit
def together(even, odd, LAYOUT: gl.constexpr):
    """Even and odd columns as one tile."""
    both = gl.reshape(gl.join(even, odd), [even.shape[0], 2 * even.shape[1]])
    return gl.convert_layout(both, LAYOUT, assert_trivial=True)


@gluon.jit
def capped_probabilities(s, start, scalars, DTYPE: gl.constexpr, MASKED: gl.constexpr, PACKED: gl.constexpr):
    """p = exp2(start - 2 softcap log2(e) r), rounded and two neighbours a word, and p tanh'(...).

    Rounded in the same piece of PTX, so that no tile of p in fp32 is ever beside that of its derivative.
    """
    LAYOUT: gl.constexpr = s.type.layout
    TEXT: gl.constexpr = pair_text(DTYPE.name, MASKED, PACKED)
    step = gl.full([], scalars.softcap_in, gl.float32)
    fall = gl.full([], -2 * scalars.softcap_out, gl.float32)
    even, odd = neighbours(s)
    start_even, start_odd = neighbours(start)
    operands = [even, odd, start_even, start_odd, step, fall]
    if PACKED:
        return gl.inline_asm_elementwise(
            TEXT, "=&r,=&r,f,f,f,f,f,f", operands, dtype=(gl.int32, gl.int32), is_pure=True, pack=1
        )
    else:
        words, even, odd = gl.inline_asm_elementwise(
            TEXT, "=&r,=&f,=&f,f,f,f,f,f,f", operands, dtype=(gl.int32, gl.float32, gl.float32), is_pure=True, pack=1
        )
        return words, together(even, odd, LAYOUT)


@gluon.jit
def in_fp32(words, LAYOUT: gl.constexpr, DTYPE: gl.constexpr):
    """The numbers of words of two neighbours."""
    if DTYPE.name == "bf16":
        even, odd = words << 16, words & -65536
        return together(even.to(gl.float32, bitcast=True), odd.to(gl.float32, bitcast=True), LAYOUT)
    else:
        even, odd = gl.inline_asm_elementwise(
            "{ .reg .b16 x, y; mov.b32 {x, y}, $2; cvt.f32.f16 $0, x; cvt.f32.f16 $1, y; }", "=f,=f,r", [words],
            dtype=(gl.float32, gl.float32), is_pure=True, pack=1,
        )  # fmt: skip
        return together(even, odd, LAYOUT)


@gluon.jit
def as_weight(weight, LAYOUT: gl.constexpr, MODE: gl.constexpr):
    """The derivative in fp32."""
    if MODE.slopes:
        return in_fp32(weight, LAYOUT, gl.float16)
    else:
        return weight


@gluon.jit
def by_eights(x):
    """A row statistic in groups of 8 rows. A thread has the same places of every group."""
    return gl.reshape(x, [x.shape[0] // 8, 8])


@gluon.jit
def in_a_row(x, LAYOUT: gl.constexpr):
    """The same without groups."""
    return gl.convert_layout(gl.reshape(x, [8 * x.shape[0]]), gl.SliceLayout(0, LAYOUT), assert_trivial=True)


@gluon.jit
def row_distances(row0, key0, work, LIKE: gl.constexpr, GROUPS: gl.constexpr):
    """From key0 to the first 8 rows from row0 on, and from there to each group of 8: what the assembler knows."""
    first = (row0 + work.shift - key0).to(gl.float32)
    places = gl.arange(0, 8, layout=gl.SliceLayout(0, LIKE)).to(gl.float32)
    groups = 8.0 * gl.arange(0, GROUPS, layout=gl.SliceLayout(1, LIKE)).to(gl.float32)
    return gl.expand_dims(first + places, 0), gl.expand_dims(groups, 1)


@gluon.jit
def key_places(LAYOUT: gl.constexpr):
    """0 to 63, one for each key."""
    return gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT)).to(gl.float32), 1)


@gluon.jit
def distances(rows, groups, LAYOUT: gl.constexpr, MODE: gl.constexpr):
    """|i + shift - j| for each pair, from ``row_distances``; the sign is only looked at where it may be negative."""
    away = gl.expand_dims(in_a_row(rows + groups, LAYOUT), 0) - key_places(LAYOUT)
    if MODE.behind:
        return away
    else:
        return gl.abs(away)


@gluon.jit
def exponents(lse, row0, key0, slope_log2, work, scalars, LAYOUT: gl.constexpr, MODE: gl.constexpr):
    """softcap log2(e) - lse, tilted by ALiBi.

    Where no key lies ahead of its query the distance is a number of the row less one of the key: one addition.
    """
    if MODE.alibi:
        lse = by_eights(lse)
        LIKE: gl.constexpr = lse.type.layout
        rows, groups = row_distances(row0, key0, work, LIKE, lse.shape[0])
        if MODE.behind:
            of_rows = in_a_row((scalars.softcap_out - slope_log2 * rows) - lse - slope_log2 * groups, LAYOUT)
            return gl.expand_dims(of_rows, 0) + slope_log2 * key_places(LAYOUT)
        else:
            of_rows = in_a_row(scalars.softcap_out - lse, LAYOUT)
            return gl.expand_dims(of_rows, 0) - slope_log2 * distances(rows, groups, LAYOUT, MODE)
    else:
        return gl.expand_dims(scalars.softcap_out - lse, 0)


@gluon.jit
def half(s, lse_smem, FROM: gl.constexpr, row0, key0, slope_log2, leaders, work, scalars, DTYPE: gl.constexpr,
         MASKED: gl.constexpr, MODE: gl.constexpr):
    """Words of p^T, and p^T times the derivative of the score, of half of a step's rows, from FROM on.

    The derivative comes in words of fp16 beside the slopes' gradient, which needs the registers.
    """
    LAYOUT: gl.constexpr = s.type.layout
    ROW: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    COUNT: gl.constexpr = s.shape[1]
    lse = lse_smem.slice(FROM, COUNT).load(ROW)
    start = exponents(lse, row0 + FROM, key0, slope_log2, work, scalars, LAYOUT, MODE).broadcast_to([64, COUNT])
    if MASKED:
        keys = gl.expand_dims(key0 + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT)), 1)
        rows = gl.expand_dims(row0 + FROM + gl.arange(0, COUNT, layout=ROW), 0)
        start = keep_transposed(start, keys, rows, leaders, work, float("-inf"), MODE)
    return capped_probabilities(s, start, scalars, DTYPE, MASKED, MODE.slopes)


@gluon.jit
def slope_gradient(words, dp, row0, key0, work, DTYPE: gl.constexpr, MODE: gl.constexpr):
    """Of some rows the sum of p (dp - delta) times the distance for each key, with p as rounded."""
    LAYOUT: gl.constexpr = dp.type.layout
    shape = by_eights(gl.zeros([dp.shape[1]], gl.float32, layout=gl.SliceLayout(0, LAYOUT)))
    LIKE: gl.constexpr = shape.type.layout
    rows, groups = row_distances(row0, key0, work, LIKE, shape.shape[0])
    return gl.sum(in_fp32(words, LAYOUT, DTYPE) * distances(rows, groups, LAYOUT, MODE) * dp, 1)


@gluon.jit
def with_slope_gradient(dslope, left, right, dp, row0, key0, work, DTYPE: gl.constexpr, MODE: gl.constexpr):
    """``backward_scores.with_slope_gradient`` from the words of both halves."""
    if MODE.slopes:
        anew = gl.inline_asm_elementwise(
            "mov.u32 $0, $1;", "=r,r", [gl.to_tensor(key0)], dtype=gl.int32, is_pure=False, pack=1
        )
        KEY: gl.constexpr = dslope.type.layout
        dp_left, dp_right = halves(dp)
        share = slope_gradient(left, dp_left, row0, anew, work, DTYPE, MODE)
        dslope -= gl.convert_layout(share, KEY, assert_trivial=True)
        share = slope_gradient(right, dp_right, row0 + dp_right.shape[1], anew, work, DTYPE, MODE)
        dslope -= gl.convert_layout(share, KEY, assert_trivial=True)
    return dslope


@gluon.jit
def capped_step(i, n, row0, key0, dk, dv, dslope, shared, slope_log2, leaders, work, scalars, INDEX: gl.constexpr,
                FIRST: gl.constexpr, MASKED: gl.constexpr, MODE: gl.constexpr, TILE: gl.constexpr):
    """``backward.step`` under a softcap."""
    DTYPE: gl.constexpr = shared.ds.dtype
    STAGES: gl.constexpr = TILE.stages
    DOUT_STAGES: gl.constexpr = TILE.dout_stages
    ROWS: gl.constexpr = TILE.block_m
    HALF: gl.constexpr = ROWS // 2
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    H_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    ROW: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    D_LAYOUT: gl.constexpr = dv.type.layout
    zero = i >> 24  # not known to be 0: keeps the operands' loop-invariant descriptors out of registers
    k = matrix(shared.k.slots.index(zero))
    v = matrix(shared.v.slots.index(zero)).slice(INDEX * 64, 64, 0)
    slot = i % STAGES
    q = matrix(shared.q.slots.index(slot))
    dout_slot = i % DOUT_STAGES
    dout = matrix(shared.dout.slots.index(dout_slot))
    ds_mine = shared.ds.index(i % 2).slice(INDEX * 64, 64, 0)
    lse = shared.lse.index(slot)

    mbarrier.wait(shared.q.full.index(slot), (i // STAGES) & 1)
    zeros = gl.zeros([64, ROWS], gl.float32, layout=S_LAYOUT)
    s = start_over_channels(k.slice(INDEX * 64, 64, 0), q, zeros, True, TILE.channels)
    if FIRST:
        s = warpgroup_mma_wait(0, deps=(s,))
    else:
        await_ds(i - 1, INDEX)
        dq = start_dq(shared.ds.index((i + 1) % 2), k, INDEX, TILE)
        s = warpgroup_mma_wait(1, deps=(s,))
        let_go(i + STAGES - 1, STAGES, Q_READ, TILE)
    left, right = halves(s)
    left, weight_left = half(left, lse, 0, row0, key0, slope_log2, leaders, work, scalars, DTYPE, MASKED, MODE)
    if not FIRST:
        dq = warpgroup_mma_wait(0, deps=(dq,))
        hand_over_dq(dq, shared, i - 1, INDEX)
    right, weight_right = half(right, lse, HALF, row0, key0, slope_log2, leaders, work, scalars, DTYPE, MASKED, MODE)

    mbarrier.wait(shared.dout.full.index(dout_slot), (i // DOUT_STAGES) & 1)
    if FIRST:
        mbarrier.wait(shared.v.full.index(0), n & 1)
    minus_delta = gl.expand_dims(shared.delta.index(dout_slot).load(ROW), 0).broadcast_to([64, ROWS])
    dp = start_over_channels(v, dout, minus_delta, False, TILE.channels_v)
    p_left, p_right = as_left(left, DTYPE, D_LAYOUT), as_left(right, DTYPE, D_LAYOUT)
    dv = warpgroup_mma(p_left, dout.slice(0, HALF, 0), dv, is_async=True)
    dv = warpgroup_mma(p_right, dout.slice(HALF, HALF, 0), dv, is_async=True)
    dp = warpgroup_mma_wait(2, deps=(dp,))
    dslope = with_slope_gradient(dslope, left, right, dp, row0, key0, work, DTYPE, MODE)
    if FIRST:  # dk and dv of the tile before have left the memory of ds and dq
        tma.store_wait(0)
        meet()
    weight = side_by_side(as_weight(weight_left, H_LAYOUT, MODE), as_weight(weight_right, H_LAYOUT, MODE))
    publish(ds_mine, (weight * dp).to(DTYPE))
    tell_ds(i, INDEX)
    dk = warpgroup_mma(ds_mine, q, dk, is_async=True)
    dv, p_left, p_right = warpgroup_mma_wait(1, deps=(dv, p_left, p_right))  # dk goes on
    let_go(i, DOUT_STAGES, DOUT_READ, TILE)
    return dk, dv, dslope
