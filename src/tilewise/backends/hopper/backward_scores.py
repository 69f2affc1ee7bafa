"""What the backward kernels share of a step: products over the real channels, and p^T."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from tilewise.backends.hopper.primitives import tilt


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
def keep_band_transposed(x, keys, rows, work, OTHER: gl.constexpr, MODE: gl.constexpr):
    """OTHER outside the band and past the last key; bounds are kept for the keys, of which a thread has two."""
    begin = gl.where(keys < work.k.length, 0, 1 << 30)
    if MODE.upper:
        begin = gl.maximum(begin, keys - work.upper)
    keep = rows >= begin
    if MODE.lower:
        keep = keep & (rows <= keys - work.lower)
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
def probabilities(s, lse, keys, rows, slope_log2, work, scalars, MASKED: gl.constexpr, MODE: gl.constexpr):
    """p^T of a step, and p^T times the derivative of the score by softmax_scale q k^T (1 without a cap)."""
    lse = gl.expand_dims(lse, 0)
    if MODE.softcap:
        shift = -lse
        if MODE.alibi:
            shift = tilt(shift, rows, keys, work, slope_log2)
        p, weight = capped_probabilities(s, shift, scalars)
        if MASKED:
            p = keep_band_transposed(p, keys, rows, work, 0.0, MODE)
            weight = keep_band_transposed(weight, keys, rows, work, 0.0, MODE)
        return p, weight
    else:
        x = s * scalars.scale_log2 - lse
        if MODE.alibi:
            x = tilt(x, rows, keys, work, slope_log2)
        if MASKED:
            x = keep_band_transposed(x, keys, rows, work, float("-inf"), MODE)
        p = gl.exp2(x)
        return p, p
