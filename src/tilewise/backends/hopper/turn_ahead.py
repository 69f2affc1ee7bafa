"""v transposed once, before an fp8 forward whose tiles of queries would each transpose it again: see ``turn.py``."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from tilewise import descale
from tilewise.backends.hopper.primitives import load_box, matrix, new_barriers, store_box
from tilewise.backends.hopper.turn import turn

KEYS = gl.constexpr(descale.BLOCK)
CHANNELS = 64  # of a block of keys


@gluon.jit
def turn_kernel(v_desc, turned_desc, heads, blocks, PARTS: gl.constexpr, num_warps: gl.constexpr):
    """One warp transposes a part of a block of keys: (batch, heads, keys, channels) to (.., channels, keys)."""
    raw = gl.allocate_shared_memory(v_desc.dtype, v_desc.block_type.shape, v_desc.layout)
    turned = gl.allocate_shared_memory(v_desc.dtype, turned_desc.block_type.shape, turned_desc.layout)
    full = new_barriers(1, 1)
    fence_async_shared()
    program = gl.program_id(0)
    channel = program % PARTS * turned_desc.block_type.shape[2]
    block = program // PARTS % blocks
    head = program // PARTS // blocks
    mbarrier.expect(full.index(0), v_desc.block_type.nbytes)
    load_box(v_desc, [head // heads, head % heads, block * KEYS, channel], full.index(0), raw)
    mbarrier.wait(full.index(0), 0)
    turn(matrix(raw), matrix(turned), 0, 1)
    fence_async_shared()
    store_box(turned_desc, [head // heads, head % heads, channel, block * KEYS], turned)
    tma.store_wait(0)
