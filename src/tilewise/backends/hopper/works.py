"""The forward's tiles: where a tile lies, and the ring through which the producer hands it to the consumers.

One warp looks a tile up, divisions and loads of the table and all, while the consumers work on the one before.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tilewise.backends.hopper.arguments import KeyBlocks, Ring, Rows, Span, Work
from tilewise.backends.hopper.kept_segments import load_leaders, met_blocks
from tilewise.backends.hopper.primitives import (
    LOG2E,
    TICKETS,
    blocks_of_rows,
    key_blocks,
    new_barriers,
    packed_sequence,
)

FIELDS = gl.constexpr(10)


@gluon.jit
def new_works(READERS: gl.constexpr):
    """A ring of tiles, each field of a ``Work`` in a word of its own."""
    slots = gl.allocate_shared_memory(gl.int32, [TICKETS * FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return Ring(slots, new_barriers(TICKETS, 1), new_barriers(TICKETS, READERS))


@gluon.jit
def part_of_keys(work, sizes):
    """The tile cut down to its range of the keys; a range past the last key is empty, and all its scores are masked."""
    first = work.split * sizes.split_keys
    length = gl.maximum(gl.minimum(sizes.split_keys, work.k.length - first), 0)
    k = Span(work.k.start, length)
    lower, upper, shift = work.lower - first, work.upper - first, work.shift - first
    return Work(work.block, work.head, work.batch, work.q, k, lower, upper, shift, work.split)


@gluon.jit
def dense_tile(block, head, batch, split, sizes, MODE: gl.constexpr):
    """A tile of the dense form."""
    q, k = Span(batch, sizes.seqlen_q), Span(batch, sizes.seqlen_k)
    work = Work(block, head, batch, q, k, sizes.lower, sizes.upper, sizes.shift, split)
    if MODE.split:
        work = part_of_keys(work, sizes)
    return work


@gluon.jit
def locate(tile, pointers, sizes, MODE: gl.constexpr):
    """Tile number to tile: heads in groups that share L2; in a group the last block, the longest if causal, first.

    Counted from the end, so that a group of fewer heads is the first: the longest tile of a few heads, drawn when
    the others are done, would leave the machine idle.
    """
    if MODE.varlen:
        slot = tile // sizes.nheads
        batch = gl.load(pointers.table + 2 * slot + 2)
        block = gl.load(pointers.table + 2 * slot + 3)
        return packed_sequence(block, tile - slot * sizes.nheads, batch, pointers, sizes, MODE)
    else:
        split = 0
        tile = sizes.tiles - 1 - tile
        if MODE.split:
            split = tile % sizes.splits
            tile = tile // sizes.splits
        per_group = sizes.blocks * sizes.heads_in_flight
        first = tile // per_group * sizes.heads_in_flight
        width = gl.minimum(sizes.heads_in_flight, sizes.batch * sizes.nheads - first)
        within = tile % per_group
        head = first + within % width
        batch = head // sizes.nheads
        block = within // width
        return dense_tile(block, head - batch * sizes.nheads, batch, split, sizes, MODE)


@gluon.jit
def put(works, field, value):
    """Write one word."""
    works.slots.index(field).store(gl.full([1], value, gl.int32, layout=gl.BlockedLayout([1], [32], [1], [0])))


@gluon.jit
def take(works, field):
    """Read one word; every thread gets it."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(works.slots.index(field).load(layout), 0)


@gluon.jit
def publish_work(works, n, work, MODE: gl.constexpr):
    """Producer: the ``n``-th tile of this CTA."""
    slot = n % TICKETS
    first = slot * FIELDS
    mbarrier.wait(works.empty.index(slot), ((n // TICKETS) & 1) ^ 1)
    put(works, first, work.block)
    put(works, first + 1, work.head)
    put(works, first + 2, work.batch)
    if MODE.split:
        put(works, first + 3, work.split)
    if MODE.varlen:
        put(works, first + 3, work.q.start)
        put(works, first + 4, work.q.length)
        put(works, first + 5, work.k.start)
        put(works, first + 6, work.k.length)
        put(works, first + 7, work.lower)
        put(works, first + 8, work.upper)
        put(works, first + 9, work.shift)
    mbarrier.arrive(works.full.index(slot), count=1)


@gluon.jit
def publish_end(works, n):
    """Producer: there is no ``n``-th tile."""
    slot = n % TICKETS
    mbarrier.wait(works.empty.index(slot), ((n // TICKETS) & 1) ^ 1)
    put(works, slot * FIELDS, -1)
    mbarrier.arrive(works.full.index(slot), count=1)


@gluon.jit
def publish_tile(works, n, tile, tiles, pointers, sizes, MODE: gl.constexpr):
    """Producer: the ``n``-th tile of this CTA, or that there is none."""
    if tile < tiles:
        publish_work(works, n, locate(tile, pointers, sizes, MODE), MODE)
    else:
        publish_end(works, n)


@gluon.jit
def await_block(works, n):
    """Consumer: the query block of the ``n``-th tile, or -1 if there is none."""
    slot = n % TICKETS
    mbarrier.wait(works.full.index(slot), (n // TICKETS) & 1)
    return take(works, slot * FIELDS)


@gluon.jit
def read_work(works, n, block, sizes, MODE: gl.constexpr):
    """Consumer: the rest of the ``n``-th tile."""
    work = peek_work(works, n, block, sizes, MODE)
    mbarrier.arrive(works.empty.index(n % TICKETS), count=1)
    return work


@gluon.jit
def peek_work(works, n, block, sizes, MODE: gl.constexpr):
    """The same, and it stays in the ring."""
    first = n % TICKETS * FIELDS
    head = take(works, first + 1)
    batch = take(works, first + 2)
    if MODE.varlen:
        q = Span(take(works, first + 3), take(works, first + 4))
        k = Span(take(works, first + 5), take(works, first + 6))
        lower, upper, shift = take(works, first + 7), take(works, first + 8), take(works, first + 9)
        work = Work(block, head, batch, q, k, lower, upper, shift, 0)
    else:
        split = 0
        if MODE.split:
            split = take(works, first + 3)
        work = dense_tile(block, head, batch, split, sizes, MODE)
    return work


@gluon.jit
def tile_blocks(work, pointers, sizes, MODE: gl.constexpr, TILE: gl.constexpr):
    """Key blocks of a query tile."""
    blocks = key_blocks(work, TILE.block_m, TILE.block_n, MODE)
    if MODE.segments:
        blocks = met_blocks(blocks, work.batch * sizes.blocks + work.block, pointers)
    return blocks


@gluon.jit
def rows_of(work, pointers, sizes, INDEX: gl.constexpr, MODE: gl.constexpr, TILE: gl.constexpr):
    """Rows [64 INDEX, 64 INDEX + 64) of a tile."""
    slope_log2 = 0.0
    if MODE.alibi:
        slope_log2 = gl.load(pointers.alibi_slopes + work.batch * sizes.nheads + work.head) * LOG2E
    blocks = tile_blocks(work, pointers, sizes, MODE, TILE)
    row0 = (work.block * TILE.consumers + INDEX) * 64
    if MODE.segments:
        LAYOUT: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE.block_n, 16]))
        leaders_q = pointers.leaders_q + work.batch.to(gl.int64) * sizes.seqlen_q
        leaders_k = pointers.leaders_k + work.batch.to(gl.int64) * sizes.seqlen_k
        unseen = pointers.unseen + work.batch * ((sizes.seqlen_k + TILE.block_n - 1) // TILE.block_n)
        leaders = load_leaders(leaders_q, row0, work.q.length, 64, LAYOUT, -2)
        return Rows(work, blocks, row0, slope_log2, leaders, leaders_k, unseen)
    else:
        return Rows(work, blocks, row0, slope_log2, 0, 0, 0)


@gluon.jit
def seen_rows(rows, TILE: gl.constexpr, MODE: gl.constexpr):
    """The same rows with only those of the tile's blocks that some of them see, at least one."""
    every = rows.blocks
    own = blocks_of_rows(rows.work, rows.row0, 64, TILE.block_n, MODE)
    first = gl.minimum(own.first, every.last - 1)
    last = gl.maximum(gl.minimum(own.last, every.last), first + 1)
    full_last = gl.minimum(gl.maximum(own.full_last, first), last)
    full_first = gl.minimum(gl.maximum(own.full_first, first), full_last)
    blocks = KeyBlocks(first, full_first, full_last, last)
    return Rows(rows.work, blocks, rows.row0, rows.slope_log2, rows.leaders, rows.leaders_k, rows.unseen)


@gluon.jit
def sink_of(work, pointers, sizes, MODE: gl.constexpr):
    """The sink of a tile's rows in units of log2, counted once."""
    sink_log2 = 0.0
    if MODE.sink:
        sink_log2 = gl.load(pointers.sink + work.batch * sizes.nheads + work.head) * LOG2E
        if MODE.split:
            sink_log2 = gl.where(work.split == 0, sink_log2, float("-inf"))
    return sink_log2
