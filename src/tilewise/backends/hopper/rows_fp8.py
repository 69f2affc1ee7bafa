"""A consumer's 64 rows of the fp8 forward: descales, probabilities as the left operand of p v, and what is written."""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.backends.hopper.arguments import Scalars
from tilewise.backends.hopper.follow import by_threads, over_groups
from tilewise.backends.hopper.primitives import publish, reinterpret, thread_barrier
from tilewise.backends.hopper.softmax import finish_rows

SIGNS = gl.constexpr(0x80808080 - (1 << 32))  # of the four numbers in an int32
LOWER = gl.constexpr(2.0**-5.5)  # 2**-RAISE


@gluon.jit
def descaled(descale, block, work, sizes):
    """What the stored numbers of a tile's head, or of a block of its rows, are multiplied by."""
    if descale is None:
        return 1.0
    else:
        head_k = work.head // sizes.group
        at = work.batch * descale.batch_stride + head_k * descale.head_stride + block * descale.block_stride
        return gl.load(descale.address + at)


@gluon.jit
def of_stored(scalars, factor):
    """The scalars for scores of stored numbers, which times ``factor`` are the real ones."""
    return Scalars(
        scalars.softmax_scale, scalars.scale_log2 * factor, scalars.softcap_in * factor, scalars.softcap_out
    )


@gluon.jit
def negate(tile):
    """Flips the sign of e4m3 numbers in shared memory."""
    ROWS: gl.constexpr = tile.shape[0]
    WORDS: gl.constexpr = tile.shape[1] // 4
    WIDTH: gl.constexpr = tile.shape[1] if tile.shape[1] < 128 else 128
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [gl.num_warps(), 1], [1, 0])
    words = reinterpret(tile, gl.int32, [ROWS, WORDS], gl.NVMMASharedLayout(WIDTH, 32, 2))
    publish(words, words.load(LAYOUT) ^ SIGNS)
    thread_barrier()


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
def times_rows(o, factor):
    """Rows of out times a row state."""
    x = by_threads(o)
    x = x * over_groups(factor, x)
    return gl.convert_layout(gl.reshape(x, o.shape), o.type.layout, assert_trivial=True)


@gluon.constexpr_function
def row_layout(cols: int) -> Any:
    """64 rows over a warpgroup, four neighbouring channels a thread."""
    far = [[0, 1 << bit] for bit in range(4, cols.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], *far], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, cols]
    )


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
def finish(row_max, row_sum, sink_log2, v_descale, pointers, work, row0, sizes, scalars,
           LAYOUT: gl.constexpr, MODE: gl.constexpr):
    """Writes lse of 64 rows; returns the factor that turns the accumulator into out, 0 for an empty row."""
    row_max = gl.convert_layout(gl.max(row_max, 1), LAYOUT)
    lse, factor = finish_rows(row_max, row_sum * LOWER, sink_log2, scalars, MODE)
    rows = row0 + gl.arange(0, 64, layout=lse.type.layout)
    if MODE.varlen:
        first = work.head.to(gl.int64) * sizes.rows + work.q.start
    else:
        first = (work.batch * sizes.nheads + work.head).to(gl.int64) * sizes.rows
    gl.store(pointers.lse + first + rows, lse, mask=rows < work.q.length)
    return factor * (v_descale * LOWER)
