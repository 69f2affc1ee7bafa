"""A maximum that follows only scores that outgrow it a lot, so that most turns need not rescale what came before."""

from __future__ import annotations

import triton
import triton.language as tl

# in log2 units: probabilities grow to 2**8 at most, far inside the range of fp16, and v has to be smaller than 2**119
LAZY = tl.constexpr(8.0)


@triton.constexpr_function
def _multiply_where_moved(count: int) -> str:
    """PTX: the first ``count`` operands, which are also the next ones, times the last ones, unless all these are 1.

    A warp takes one way. A thread holds two rows, of which elements 0 and 2 are.
    """
    first = 2 * count
    return (
        "{ .reg .pred moved, any;"
        f" setp.neu.f32 moved, ${first}, 0f3F800000; setp.neu.or.f32 moved, ${first + 2}, 0f3F800000, moved;"
        " vote.sync.any.pred any, moved, 0xffffffff;"
        " @!any bra STILL;"
        + "".join(f" mul.f32 ${i}, ${i}, ${first + (i & 2)};" for i in range(count))
        + " STILL: }"
    )


@triton.constexpr_function
def _operands(count: int) -> str:
    return ",".join(["=&f"] * count + [str(i) for i in range(count)] + ["f"] * count)


@triton.jit
def followed(top, row_max, unit):
    """The maximum of rows after scores of up to ``top``, of which one log2 unit is ``unit``."""
    return tl.where(top - row_max > LAZY * unit, top, row_max)


@triton.jit
def rescaled(acc, factor, VOTES: tl.constexpr):
    """acc * factor, by row. VOTES: acc is that of a wgmma, 16 rows a warp; a warp of rows with factor 1 skips it."""
    if VOTES:
        COUNT: tl.constexpr = acc.shape[1] // 2  # elements of a thread
        return tl.inline_asm_elementwise(
            _multiply_where_moved(COUNT), _operands(COUNT), [acc, spread(factor, acc.shape[1])],
            dtype=tl.float32, is_pure=False, pack=COUNT)
    else:
        return acc * factor[:, None]


@triton.jit
def spread(x, COLS: tl.constexpr):
    """What is known by row, or by row and part (primitives.partial_sums), for every column; nothing moves."""
    if len(x.shape) == 1:
        return tl.broadcast_to(x[:, None], [x.shape[0], COLS])
    else:
        parts = tl.broadcast_to(x[:, None, :], [x.shape[0], COLS // x.shape[1], x.shape[1]])
        return tl.reshape(parts, [x.shape[0], COLS])
