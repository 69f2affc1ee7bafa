"""Warps that transpose v inside shared memory, since products of e4m3 want the summed dimension, the keys, contiguous.

A tile of v comes in as (keys, channels) and leaves as (channels, keys), where the keys of each 16 stand in the order in
which a thread holds its scores, and the channels of each 16 so that a thread's columns of out are neighbours:

    position 4 q + 2 h + e of the keys holds key 8 h + 2 q + e          q < 4, h < 2, e < 2
    position 8 b + d of the channels holds channel 2 d + b              b < 2, d < 8
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from tilewise.backends.hopper import arguments
from tilewise.backends.hopper.barriers import await_all
from tilewise.backends.hopper.primitives import key_blocks, matrix, reinterpret
from tilewise.backends.hopper.rings import place
from tilewise.backends.hopper.works import await_block, read_work

SLOTS = gl.constexpr(arguments.V_SLOTS)
KEYS = gl.constexpr(32)  # what one warp turns at a time
DIM = gl.constexpr(64)


@gluon.constexpr_function
def turn_layout(keys: int, pairs: int) -> Any:
    """Registers of a part of v in one warp, as pairs of channels: what ldmatrix.trans gives.

    A thread's first four registers are two neighbouring keys and the same two eight keys on.
    """
    across = [[0, 1 << bit] for bit in range(3, pairs.bit_length() - 1)]
    along = [[1 << bit, 0] for bit in range(4, keys.bit_length() - 1)]
    lanes = [[2, 0], [4, 0], [0, 1], [0, 2], [0, 4]]
    return gl.DistributedLinearLayout([[1, 0], [8, 0], *across, *along], lanes, [], [], [keys, pairs])


@gluon.jit
def turn(raw, turned, INDEX: gl.constexpr, WARPS: gl.constexpr):
    """Transposes a warp's share of a tile, KEYS by DIM at a time, which is what the few registers hold.

    Channels travel in pairs of 16 bits. Words of two keys, and the same eight keys on, hold the pair's two channels of
    four keys; the byte permutation makes a word of each channel.
    """
    HEIGHT: gl.constexpr = raw.shape[0]
    WIDTH: gl.constexpr = raw.shape[1]
    PAIRS: gl.constexpr = DIM // 2
    LAYOUT: gl.constexpr = turn_layout(KEYS, PAIRS)
    pairs = reinterpret(raw, gl.int16, [HEIGHT, WIDTH // 2], gl.NVMMASharedLayout(min(WIDTH, 128), 16, 2))
    target = reinterpret(turned, gl.int16, [WIDTH, HEIGHT // 2], gl.NVMMASharedLayout(min(HEIGHT, 128), 16, 2))
    ACROSS: gl.constexpr = WIDTH // DIM
    PARTS: gl.constexpr = HEIGHT // KEYS * ACROSS
    for i in gl.static_range(PARTS * INDEX // WARPS, PARTS * (INDEX + 1) // WARPS):
        x = pairs.slice(i // ACROSS * KEYS, KEYS, 0).slice(i % ACROSS * PAIRS, PAIRS, 1).load(LAYOUT)
        x = gl.inline_asm_elementwise(
            "prmt.b32 $0, $2, $3, 0x6420; prmt.b32 $1, $2, $3, 0x7531;", "=r,=r,r,r", [x], dtype=gl.int16,
            is_pure=True, pack=4,
        )  # fmt: skip
        x = x.reshape([KEYS // 16, 2, 8, PAIRS // 8, 8]).permute([3, 1, 4, 0, 2]).reshape([DIM, KEYS // 2])
        target.slice(i % ACROSS * DIM, DIM, 0).slice(i // ACROSS * KEYS // 2, KEYS // 2, 1).store(x)


@gluon.jit
def turner(raw_ring, v_ring, works, sizes, INDEX: gl.constexpr, MODE: gl.constexpr, TILE: gl.constexpr):
    """One warp of those that transpose v: its part of every block."""
    n = 0
    end = 0
    it = 0
    block = await_block(works, 0)
    while block >= 0:
        work = read_work(works, n, block, sizes, MODE)
        blocks = key_blocks(work, TILE.block_m, TILE.block_n, MODE)
        end += blocks.last - blocks.first
        while it < end:
            slot, count = place(it, SLOTS)
            mbarrier.wait(raw_ring.full.index(slot), count & 1)
            if count > 0:
                await_all(TILE.values_barrier + slot, TILE.around_v)
            turn(matrix(raw_ring.slots.index(slot)), v_ring.slots.index(slot), INDEX, TILE.turners)
            fence_async_shared()
            mbarrier.arrive(raw_ring.empty.index(slot), count=1)
            mbarrier.arrive(v_ring.full.index(slot), count=1)
            it += 1
        n += 1
        block = await_block(works, n)
