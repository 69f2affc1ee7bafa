"""The online softmax of the fp8 forward, against a maximum that may lag behind.

e4m3 holds probabilities up to 448, so the maximum follows the scores only where they pass it by LAZY. A warp without
such a row has nothing to exchange, and looks no further than its threads' own scores. A row state is (rows, 4): of
each of the four threads that share a row, its part of the row's sum, or the row's maximum.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.backends.hopper.softmax import kept_scores

RAISE = gl.constexpr(7)  # a row's maximum is stored as 2**RAISE = 128, what passes it by LAZY as 446
FOLLOW = gl.constexpr("""{
.reg .pred moved, any; .reg .f32 t, a, b;
sub.f32 a, $4, $6; mul.f32 a, a, $8; setp.gt.f32 moved, a, LAZY;
sub.f32 b, $5, $7; mul.f32 b, b, $9; setp.gt.or.f32 any, b, LAZY, moved;
vote.sync.any.pred any, any, 0xffffffff;
mov.f32 $0, $6; mov.f32 $1, $7; mov.f32 $2, ONE; mov.f32 $3, ONE;
@!any bra STILL;
shfl.sync.bfly.b32 t, $4, 1, 31, 0xffffffff; max.f32 a, $4, t;
shfl.sync.bfly.b32 t, a, 2, 31, 0xffffffff; max.f32 a, a, t;
shfl.sync.bfly.b32 t, $5, 1, 31, 0xffffffff; max.f32 b, $5, t;
shfl.sync.bfly.b32 t, b, 2, 31, 0xffffffff; max.f32 b, b, t;
sub.f32 t, a, $6; mul.f32 t, t, $8; setp.gt.f32 moved, t, LAZY; neg.f32 t, t; ex2.approx.ftz.f32 t, t;
selp.f32 $0, a, $6, moved; selp.f32 $2, t, ONE, moved;
sub.f32 t, b, $7; mul.f32 t, t, $9; setp.gt.f32 moved, t, LAZY; neg.f32 t, t; ex2.approx.ftz.f32 t, t;
selp.f32 $1, b, $7, moved; selp.f32 $3, t, ONE, moved;
STILL: }""".replace("LAZY", "0f3FE66666").replace("ONE", "0f3F800000"))  # LAZY: 1.8, in units of log2


@gluon.jit
def by_threads(x):
    """(64, columns) as (64, groups, 4 threads, 2)."""
    return gl.reshape(x, [x.shape[0], x.shape[1] // 8, 4, 2])


@gluon.jit
def over_groups(row):
    """A row state against ``by_threads``."""
    return gl.expand_dims(gl.expand_dims(row, 1), 3)


@gluon.jit
def new_state(value, COLS: gl.constexpr, LAYOUT: gl.constexpr):
    """A row state for blocks of COLS columns."""
    return gl.max(gl.max(by_threads(gl.full([64, COLS], value, gl.float32, layout=LAYOUT)), 3), 1)


@gluon.jit
def follow(top, row_max, scale_log2):
    """The maximum after a block whose largest scores in this thread are ``top``; the factor for what came before."""
    return gl.inline_asm_elementwise(
        FOLLOW, "=&f,=&f,=&f,=&f,f,f,f,f,f,f", [top, row_max, scale_log2], dtype=(gl.float32, gl.float32),
        is_pure=False, pack=2,
    )  # fmt: skip


@gluon.jit
def block_softmax(s, row_max, row_sum, row0, block, blocks, slope_log2, work, scalars, PARTIAL: gl.constexpr,
                  MODE: gl.constexpr):
    """Probabilities of a block, and with them row_sum, 2**RAISE times too large; the factor for what came before."""
    s, scale_log2 = kept_scores(s, row0, block, blocks, slope_log2, work, scalars, PARTIAL, MODE)
    x = by_threads(s)
    row_max, rescale = follow(gl.max(gl.max(x, 3), 1), row_max, scale_log2)
    base = gl.where(row_max == float("-inf"), 0.0, row_max)  # a row that has seen nothing has none
    p = gl.exp2(x * scale_log2 - over_groups(base * scale_log2 - RAISE))
    return gl.reshape(p, s.shape), rescale, row_max, row_sum * rescale + gl.sum(gl.sum(p, 3), 1)
