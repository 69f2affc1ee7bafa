"""What the backward kernels share of a step: products over the real channels, and p^T."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from tilewise.backends.hopper.arguments import Leaders
from tilewise.backends.hopper.kept_segments import load_leaders, zero_unseen
from tilewise.backends.hopper.primitives import distance, matrix, tilt
from tilewise.backends.hopper.products import halves


@gluon.jit
def start_over_channels(a, b, start, FRESH: gl.constexpr, CHANNELS: gl.constexpr):
    """Issue a b^T, onto ``start`` unless FRESH, summed over the channels that are not padding: a product or two."""
    FIRST: gl.constexpr = power_below(CHANNELS)
    x = warpgroup_mma(a.slice(0, FIRST, 1), b.slice(0, FIRST, 1).permute((1, 0)), start, use_acc=not FRESH,
                      is_async=True)
    if FIRST < CHANNELS:
        REST: gl.constexpr = CHANNELS - FIRST
        x = warpgroup_mma(a.slice(FIRST, REST, 1), b.slice(FIRST, REST, 1).permute((1, 0)), x, is_async=True)
    return x


@gluon.constexpr_function
def power_below(count: int) -> int:
    """The largest power of two that is no larger."""
    return 1 << (count.bit_length() - 1)


@gluon.jit
def keep_transposed(x, keys, rows, leaders, work, OTHER: gl.constexpr, MODE: gl.constexpr):
    """OTHER outside the band, past the last key and between segments.

    Bounds are kept for the keys, of which a thread has two.
    """
    begin = gl.where(keys < work.k.length, 0, 1 << 30)
    if MODE.upper:
        begin = gl.maximum(begin, keys - work.upper)
    keep = rows >= begin
    if MODE.lower:
        keep = keep & (rows <= keys - work.lower)
    if MODE.segments:
        row_leaders = gl.load(leaders.queries + rows, mask=rows < work.q.length, other=-2)
        keep = keep & (row_leaders == gl.expand_dims(leaders.keys, 1))
    return gl.where(keep, x, OTHER)


@gluon.jit
def capped_probabilities(s, shift, scalars):
    """p = exp2(softcap tanh(scale s / softcap) + shift), and p tanh'(...), with tanh as in ``primitives.capped``.

    One piece of PTX, so that the numbers on the way to a probability live for that one only.
    """
    step = gl.full([], scalars.softcap_in, gl.float32)
    top = gl.full([], scalars.softcap_out, gl.float32)
    return gl.inline_asm_elementwise(
        """{ .reg .f32 r, x;
        mul.f32 x, $2, $4; ex2.approx.ftz.f32 x, x; add.f32 x, x, 0f3F800000; rcp.approx.ftz.f32 r, x;
        add.f32 x, $3, $5; fma.rn.f32 x, r, $6, x; ex2.approx.ftz.f32 x, x;
        neg.f32 $1, r; fma.rn.f32 r, $1, r, r; mul.f32 r, r, 0f40800000;
        mul.f32 $1, r, x; mov.f32 $0, x; }""",
        "=&f,=&f,f,f,f,f,f", [s, shift, step, top, -2 * top], dtype=(gl.float32, gl.float32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def probabilities(s, lse, keys, rows, leaders, slope_log2, work, scalars, MASKED: gl.constexpr, MODE: gl.constexpr):
    """p^T of a step, and p^T times the derivative of the score by softmax_scale q k^T (1 without a cap)."""
    lse = gl.expand_dims(lse, 0)
    if MODE.softcap:
        shift = -lse
        if MODE.alibi:
            shift = tilt(shift, rows, keys, work, slope_log2)
        p, weight = capped_probabilities(s, shift, scalars)
        if MASKED:
            p = keep_transposed(p, keys, rows, leaders, work, 0.0, MODE)
            weight = keep_transposed(weight, keys, rows, leaders, work, 0.0, MODE)
        return p, weight
    else:
        x = s * scalars.scale_log2 - lse
        if MODE.alibi:
            x = tilt(x, rows, keys, work, slope_log2)
        if MASKED:
            x = keep_transposed(x, keys, rows, leaders, work, float("-inf"), MODE)
        p = gl.exp2(x)
        return p, p


@gluon.jit
def leaders_of(work, key0, pointers, sizes, S_LAYOUT: gl.constexpr, MODE: gl.constexpr):
    """Leaders of 64 keys from ``key0`` on, and where those of the queries are; nothing without segments."""
    if MODE.segments:
        of_queries = pointers.leaders_q + work.batch.to(gl.int64) * sizes.seqlen_q
        of_keys = pointers.leaders_k + work.batch.to(gl.int64) * sizes.seqlen_k
        return Leaders(load_leaders(of_keys, key0, work.k.length, 64, gl.SliceLayout(1, S_LAYOUT), -1), of_queries)
    else:
        return 0


@gluon.jit
def only_seen(shared, work, pointers, sizes, FROM: gl.constexpr, TILE: gl.constexpr):
    """Zeros for those of 64 of a tile's keys and values, from FROM on, that no query sees."""
    if gl.load(pointers.unseen + work.batch * sizes.blocks + work.block) != 0:
        of_keys = pointers.leaders_k + work.batch.to(gl.int64) * sizes.seqlen_k
        key0 = work.block * TILE.block_n
        zero_unseen(matrix(shared.k.slots.index(0)), of_keys, key0, work.k.length, FROM, 64)
        zero_unseen(matrix(shared.v.slots.index(0)), of_keys, key0, work.k.length, FROM, 64)


@gluon.jit
def no_slope_gradient(S_LAYOUT: gl.constexpr, MODE: gl.constexpr):
    """The sum of a head's slope gradient over what each key of a warpgroup has met."""
    if MODE.slopes:
        return gl.zeros([64], gl.float32, layout=gl.SliceLayout(1, S_LAYOUT))
    else:
        return 0.0


@gluon.jit
def slope_gradient(dp, row0, key0, work):
    """Of a part of the columns, the sum of dp times the distance for each key."""
    LAYOUT: gl.constexpr = dp.type.layout
    rows = gl.expand_dims(row0 + gl.arange(0, dp.shape[1], layout=gl.SliceLayout(0, LAYOUT)), 0)
    keys = gl.expand_dims(key0 + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT)), 1)
    return gl.sum(dp * distance(rows, keys, work), 1)


@gluon.jit
def with_slope_gradient(dslope, dp, row0, key0, work, MODE: gl.constexpr):
    """The same sum with a step's share; ``dp``: p (dp - delta). The slope's factor in a score is minus the distance.

    A quarter of the columns at a time, and from a number that is not known to be the keys': all distances at once, or
    kept since the scores, would take a register each.
    """
    if MODE.slopes:
        anew = gl.inline_asm_elementwise(
            "mov.u32 $0, $1;", "=r,r", [gl.to_tensor(key0)], dtype=gl.int32, is_pure=False, pack=1
        )
        low, high = halves(dp)
        QUARTER: gl.constexpr = dp.shape[1] // 4
        for i in gl.static_range(4):
            first, second = halves(low if i < 2 else high)
            share = slope_gradient(first if i % 2 == 0 else second, row0 + i * QUARTER, anew, work)
            dslope -= gl.convert_layout(share, dslope.type.layout, assert_trivial=True)
        return dslope
    else:
        return dslope


@gluon.jit
def add_slope_gradient(dslope, head, pointers):
    """Add a tile's share to a head's slope gradient, in any order."""
    LAYOUT: gl.constexpr = dslope.type.layout
    gl.atomic_add(pointers.slope_gradients + head + gl.zeros([64], gl.int32, layout=LAYOUT), dslope)
