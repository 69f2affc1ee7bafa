"""The online softmax: scores against the running maximum, probabilities, row sums, lse."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.backends.hopper.primitives import LN2, capped, keep_band, scale_moved, tilt

LAZY = gl.constexpr(8.0)  # a lazy maximum lets probabilities grow to 2**8, far inside the range of fp16


@gluon.jit
def partial_sums(p):
    """Sums of each row over what one thread holds, (rows, 4): the threads meet only once, after the last block."""
    COLS: gl.constexpr = p.shape[1]
    return gl.sum(gl.sum(gl.reshape(p, [p.shape[0], COLS // 8, 4, 2]), 3), 1)


@gluon.jit
def shifted(s, row_max, scale_log2, MODE: gl.constexpr, TILE: gl.constexpr, RAISE: gl.constexpr):
    """Scores against the new maximum, in units of log2, plus RAISE; the factor for what came before; the maximum."""
    top = gl.max(s, 1)
    if TILE.lazy:
        row_max_new = gl.where((top - row_max) * scale_log2 > LAZY, top, row_max)
    else:
        row_max_new = gl.maximum(row_max, top)
    base = row_max_new
    if MODE.lower or MODE.upper or MODE.varlen:  # a row that has seen nothing yet has no maximum to subtract
        base = gl.where(row_max_new == float("-inf"), 0.0, row_max_new)
    rescale = gl.exp2((row_max - base) * scale_log2)  # exactly 1 where the maximum stays
    shift = base * scale_log2
    if RAISE:
        shift -= RAISE
    return s * scale_log2 - gl.expand_dims(shift, 1), rescale, row_max_new


@gluon.jit
def exponentials(x, rescale, row_sum):
    """Probabilities, and the row sums with them."""
    p = gl.exp2(x)
    sums = partial_sums(p)
    by_thread = gl.convert_layout(rescale, gl.SliceLayout(1, sums.type.layout), assert_trivial=True)
    return p, row_sum * gl.expand_dims(by_thread, 1) + sums


@gluon.jit
def kept_scores(s, row0, block, blocks, slope_log2, work, scalars, PARTIAL: gl.constexpr, MODE: gl.constexpr):
    """Scores of a block, masked where it is partial (never, unless PARTIAL), and what turns them into units of log2."""
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
        return s, scalars.scale_log2
    else:
        return s, 1.0


@gluon.jit
def block_scores(s, row_max, row0, block, blocks, slope_log2, work, scalars, PARTIAL: gl.constexpr, MODE: gl.constexpr,
                 TILE: gl.constexpr, RAISE: gl.constexpr = 0):
    """Scores of a block, masked where it is partial (never, unless PARTIAL), against the new maximum."""
    s, scale_log2 = kept_scores(s, row0, block, blocks, slope_log2, work, scalars, PARTIAL, MODE)
    return shifted(s, row_max, scale_log2, MODE, TILE, RAISE)


@gluon.jit
def rescaled(o, rescale, TILE: gl.constexpr):
    """The accumulator against the new maximum."""
    by_row = gl.expand_dims(gl.convert_layout(rescale, gl.SliceLayout(1, o.type.layout), assert_trivial=True), 1)
    if TILE.lazy:
        return scale_moved(o, by_row, TILE.block_dv // 2)
    else:
        return o * by_row


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
