"""Segments inside the kernels: which blocks a tile meets, which pairs it keeps, and unseen rows out of the products."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from tilewise.backends.hopper.arguments import KeyBlocks
from tilewise.backends.hopper.primitives import thread_barrier


@gluon.jit
def met_blocks(blocks, owner, pointers):
    """Of a tile's blocks those that its segments meet, at least one; ``owner``: the number of the tile in the table."""
    at = pointers.meetings + 4 * owner
    first = gl.minimum(gl.maximum(blocks.first, gl.load(at)), blocks.last - 1)
    last = gl.maximum(gl.minimum(blocks.last, gl.load(at + 1)), first + 1)
    full_last = gl.minimum(gl.maximum(gl.minimum(blocks.full_last, gl.load(at + 3)), first), last)
    full_first = gl.minimum(gl.maximum(gl.maximum(blocks.full_first, gl.load(at + 2)), first), full_last)
    return KeyBlocks(first, full_first, full_last, last)


@gluon.jit
def load_leaders(leaders, first, length, COUNT: gl.constexpr, LAYOUT: gl.constexpr, NOBODY: gl.constexpr):
    """Leaders of COUNT rows from ``first`` on; past the end NOBODY."""
    rows = first + gl.arange(0, COUNT, layout=LAYOUT)
    return gl.load(leaders + rows, mask=rows < length, other=NOBODY)


@gluon.jit
def keep_segments(s, block, rows):
    """-inf for the scores of a block's pairs that are not of one segment."""
    COLUMN: gl.constexpr = gl.SliceLayout(0, s.type.layout)
    keys = load_leaders(rows.leaders_k, block * s.shape[1], rows.work.k.length, s.shape[1], COLUMN, -1)
    return gl.where(gl.expand_dims(rows.leaders, 1) == gl.expand_dims(keys, 0), s, float("-inf"))


@gluon.jit
def zero_unseen(tile, leaders, first, length, FROM: gl.constexpr, COUNT: gl.constexpr):
    """Zeros for those of COUNT rows of a tile, from FROM on, whose keys no query sees: 0 NaN would be NaN.

    ``first``: the tile's first key. All threads have to have met before a product reads the tile. Others may read and
    write it meanwhile: what they find or leave in a row that is seen is the same.
    """
    WIDTH: gl.constexpr = tile.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    for row in gl.static_range(FROM, FROM + COUNT, 16):
        part = tile.slice(row, 16, 0)
        keys = load_leaders(leaders, first + row, length, 16, gl.SliceLayout(1, LAYOUT), -1)
        part.store(gl.where(gl.expand_dims(keys, 1) >= 0, part.load(LAYOUT), 0.0).to(tile.dtype))
    fence_async_shared()
    thread_barrier()
