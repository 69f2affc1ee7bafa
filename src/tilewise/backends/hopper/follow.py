"""A maximum that follows only scores that outgrow it a lot, and a warp without such a score exchanges nothing.

A row state is (rows, 4): of each of the four threads that share a row, its part of the row's sum, or the row's maximum.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

FOLLOW = gl.constexpr("""{
.reg .pred moved, any; .reg .f32 t, a, b;
sub.f32 a, $4, $6; mul.f32 a, a, $8; setp.gt.f32 moved, a, $10;
sub.f32 b, $5, $7; mul.f32 b, b, $9; setp.gt.or.f32 any, b, $10, moved;
vote.sync.any.pred any, any, 0xffffffff;
mov.f32 $0, $6; mov.f32 $1, $7; mov.f32 $2, ONE; mov.f32 $3, ONE;
@!any bra STILL;
shfl.sync.bfly.b32 t, $4, 1, 31, 0xffffffff; max.f32 a, $4, t;
shfl.sync.bfly.b32 t, a, 2, 31, 0xffffffff; max.f32 a, a, t;
shfl.sync.bfly.b32 t, $5, 1, 31, 0xffffffff; max.f32 b, $5, t;
shfl.sync.bfly.b32 t, b, 2, 31, 0xffffffff; max.f32 b, b, t;
sub.f32 t, a, $6; mul.f32 t, t, $8; setp.gt.f32 moved, t, $10; neg.f32 t, t; ex2.approx.ftz.f32 t, t;
selp.f32 $0, a, $6, moved; selp.f32 $2, t, ONE, moved;
sub.f32 t, b, $7; mul.f32 t, t, $9; setp.gt.f32 moved, t, $10; neg.f32 t, t; ex2.approx.ftz.f32 t, t;
selp.f32 $1, b, $7, moved; selp.f32 $3, t, ONE, moved;
STILL: }""".replace("ONE", "0f3F800000"))


@gluon.jit
def by_threads(x):
    """(64, columns) as (64, groups, 4 threads, 2)."""
    return gl.reshape(x, [x.shape[0], x.shape[1] // 8, 4, 2])


@gluon.jit
def over_groups(row, x):
    """A row state in the shape of ``x``, which is ``by_threads``."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, x.type.layout))
    return gl.expand_dims(gl.expand_dims(gl.convert_layout(row, LAYOUT, assert_trivial=True), 1), 3)


@gluon.jit
def follow(tops, row_max, scale_log2, lazy):
    """The maximum after a block whose largest scores in this thread are ``tops``, and the factor for what came before.

    The maximum moves where they outgrow it by ``lazy``, in units of log2.
    """
    tops = gl.convert_layout(tops, row_max.type.layout, assert_trivial=True)
    return gl.inline_asm_elementwise(
        FOLLOW, "=&f,=&f,=&f,=&f,f,f,f,f,f,f,f,f", [tops, row_max, scale_log2, lazy], dtype=(gl.float32, gl.float32),
        is_pure=False, pack=2,
    )  # fmt: skip


@gluon.jit
def some_negative(row_max):
    """Whether a row of the warpgroup has a negative maximum."""
    return gl.min(gl.min(row_max, 1), 0) < 0.0


@gluon.jit
def largest(x, PARTIAL: gl.constexpr):
    """Each thread's largest score of its rows, x being ``by_threads``; too small where negative, unless PARTIAL.

    Floating-point numbers compare as the integers that their bits are where one of them is positive, and the largest of
    three integers takes one instruction.
    """
    if PARTIAL:
        return gl.max(gl.max(x, 3), 1)
    else:
        tops = gl.max(gl.max(x.to(gl.int32, bitcast=True), 1), 2).to(gl.float32, bitcast=True)
        return gl.convert_layout(tops, gl.SliceLayout(1, gl.SliceLayout(3, x.type.layout)), assert_trivial=True)
