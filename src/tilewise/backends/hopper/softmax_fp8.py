"""The online softmax of the fp8 forward, against a maximum that may lag behind.

e4m3 holds probabilities up to 448, so the maximum follows the scores only where they pass it by LAZY. A warp without
such a row has nothing to exchange, and looks no further than its threads' own scores (``follow.py``).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.backends.hopper.follow import by_threads, follow, largest
from tilewise.backends.hopper.softmax import kept_scores
from tilewise.backends.hopper.words_fp8 import by_words, first_word, held_words

# a row's maximum is stored as 2**RAISE = 45, what passes it by LAZY as 416. Against 7 and 1.8, where the maximum moves
# more often, +2 % with 128 and 256 channels, +1 % with 64; out of random values is off by 0.0262 rms for 0.0257
RAISE = gl.constexpr(5.5)
LAZY = gl.constexpr(3.2)  # in units of log2


@gluon.jit
def new_state(value, COLS: gl.constexpr, LAYOUT: gl.constexpr):
    """A row state for blocks of COLS columns."""
    return gl.max(gl.max(by_threads(gl.full([64, COLS], value, gl.float32, layout=LAYOUT)), 3), 1)


@gluon.jit
def block_softmax(s, row_max, row_sum, row0, block, blocks, slope_log2, work, scalars, PARTIAL: gl.constexpr,
                  MODE: gl.constexpr, TILE: gl.constexpr):
    """Probabilities of a block in words, and row_sum, 2**RAISE times too large; the factor for what came before.

    Unless PARTIAL, no row's maximum was negative before.
    """
    s, scale_log2 = kept_scores(s, row0, block, blocks, slope_log2, work, scalars, PARTIAL, MODE)
    x = by_threads(s)
    row_max, rescale = follow(largest(x, PARTIAL), row_max, scale_log2, LAZY)
    base = row_max
    if PARTIAL:
        base = gl.where(row_max == float("-inf"), 0.0, row_max)  # a row that has seen nothing has none
    keys = by_words(s)
    raised = gl.convert_layout(RAISE - base * scale_log2, gl.SliceLayout(1, keys[0].type.layout), assert_trivial=True)
    words, sums = held_words(keys, scale_log2, gl.expand_dims(raised, 1), s.shape[1] // 8, TILE.held)
    sums = gl.convert_layout(first_word(sums), row_sum.type.layout, assert_trivial=True)
    return gl.reshape(words, [s.shape[0], s.shape[1] // 4]), rescale, row_max, row_sum * rescale + sums
