"""The online softmax: scores against the running maximum, probabilities, row sums, lse."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.backends.hopper import arguments
from tilewise.backends.hopper.barriers import hold, pin
from tilewise.backends.hopper.follow import by_threads, follow, over_groups
from tilewise.backends.hopper.kept_segments import keep_segments
from tilewise.backends.hopper.primitives import LN2, capped, keep_band, scale_moved, tilt

ALL = gl.constexpr(arguments.ALL)
FREE = gl.constexpr(arguments.FREE)
LAZY = gl.constexpr(8.0)  # a lazy maximum lets probabilities grow to 2**8, far inside the range of fp16


@gluon.jit
def partial_sums(p):
    """Sums of each row over what one thread holds, (rows, 4): the threads meet only once, after the last block."""
    return gl.sum(gl.sum(by_threads(p), 3), 1)


@gluon.jit
def new_max(row_sum, S_LAYOUT: gl.constexpr, TILE: gl.constexpr):
    """The maximum before the first block, in the form that ``shifted`` takes it."""
    LAYOUT: gl.constexpr = row_sum.type.layout
    if TILE.votes:
        return gl.full([64, 4], float("-inf"), gl.float32, layout=LAYOUT)
    else:
        return gl.full([64], float("-inf"), gl.float32, layout=gl.SliceLayout(1, S_LAYOUT))


@gluon.jit
def thread_tops(s):
    """The largest score of each row in one thread, (rows, 4).

    Of neighbours first: comparisons that wait for each other took 22 % of the time at 128 channels.
    """
    tops = gl.reshape(s, [s.shape[0], s.shape[1] // 32, 2, 2, 4, 2])
    return gl.max(gl.max(gl.max(gl.max(tops, 5), 3), 2), 1)


@gluon.jit
def seen(row_max, MODE: gl.constexpr):
    """The maximum to subtract: none of a row that has seen nothing yet."""
    if MODE.lower or MODE.upper or MODE.varlen or MODE.segments:
        return gl.where(row_max == float("-inf"), 0.0, row_max)
    else:
        return row_max


@gluon.jit
def shifted(s, row_max, scale_log2, MODE: gl.constexpr, TILE: gl.constexpr):
    """Scores against the new maximum, in units of log2; the factor for what came before; the maximum."""
    LAYOUT: gl.constexpr = s.type.layout
    if TILE.votes:
        row_max, rescale = follow(thread_tops(s), row_max, scale_log2, LAZY)
        x = by_threads(s)
        x = x * scale_log2 - over_groups(seen(row_max, MODE) * scale_log2, x)
        return gl.convert_layout(gl.reshape(x, s.shape), LAYOUT, assert_trivial=True), rescale, row_max
    else:
        top = gl.convert_layout(gl.max(thread_tops(s), 1), row_max.type.layout, assert_trivial=True)
        if TILE.lazy:
            row_max_new = gl.where((top - row_max) * scale_log2 > LAZY, top, row_max)
        else:
            row_max_new = gl.maximum(row_max, top)
        base = seen(row_max_new, MODE)
        rescale = gl.exp2((row_max - base) * scale_log2)  # exactly 1 where the maximum stays
        return s * scale_log2 - gl.expand_dims(base * scale_log2, 1), rescale, row_max_new


@gluon.jit
def quarters(p):
    """Four parts of the columns, ``by_threads``; no data moves."""
    x = gl.permute(gl.reshape(p, [p.shape[0], 2, 2, p.shape[1] // 32, 4, 2]), [0, 3, 4, 5, 1, 2])
    low, high = gl.split(x)
    first, third = gl.split(low)
    second, fourth = gl.split(high)
    return first, second, third, fourth


@gluon.jit
def exponentials(x, rescale, row_sum, HELD: gl.constexpr):
    """Probabilities, and the row sums with them. A wait behind this stays behind HELD quarters of them, unless FREE."""
    p = gl.exp2(x)
    LAYOUT: gl.constexpr = row_sum.type.layout
    if len(rescale.shape) == 1:
        rescale = gl.expand_dims(gl.convert_layout(rescale, gl.SliceLayout(1, LAYOUT), assert_trivial=True), 1)
    if HELD == ALL:
        row_sum = pin(row_sum * rescale + partial_sums(p))
    elif HELD == FREE:
        row_sum = row_sum * rescale + partial_sums(p)
    else:
        parts = quarters(p)
        row_sum = row_sum * rescale
        for i in gl.static_range(4):
            if i == HELD:
                row_sum = hold(row_sum)
            row_sum += gl.convert_layout(gl.sum(gl.sum(parts[i], 3), 1), LAYOUT, assert_trivial=True)
    return p, row_sum


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
def block_scores(s, row_max, block, rows, scalars, PARTIAL: gl.constexpr, MODE: gl.constexpr, TILE: gl.constexpr):
    """Scores of a block, masked where it is partial (never, unless PARTIAL), against the new maximum."""
    blocks = rows.blocks
    s, scale_log2 = kept_scores(s, rows.row0, block, blocks, rows.slope_log2, rows.work, scalars, PARTIAL, MODE)
    if MODE.segments:
        if block >= blocks.full_last or block < blocks.full_first:
            s = keep_segments(s, block, rows)
    return shifted(s, row_max, scale_log2, MODE, TILE)


@gluon.jit
def rescaled(o, rescale, TILE: gl.constexpr):
    """An accumulator against the new maximum."""
    LAYOUT: gl.constexpr = o.type.layout
    if TILE.votes:
        x = by_threads(o)
        x = scale_moved(x, over_groups(rescale, x), o.shape[1] // 2)
        return gl.convert_layout(gl.reshape(x, o.shape), LAYOUT, assert_trivial=True)
    else:
        by_row = gl.expand_dims(gl.convert_layout(rescale, gl.SliceLayout(1, LAYOUT), assert_trivial=True), 1)
        if TILE.lazy:
            return scale_moved(o, by_row, o.shape[1] // 2)
        else:
            return o * by_row


@gluon.jit
def finish_rows(row_max, row_sum, sink_log2, scalars, MODE: gl.constexpr):
    """lse, and the factor that turns the accumulator into out; an empty row has lse -inf (or its sink) and factor 0."""
    if len(row_max.shape) == 2:
        row_max = gl.max(row_max, 1)
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
