"""The fp8 forward where v comes transposed, once for all tiles of queries: see ``forward_fp8.py``.

Nobody transposes, which leaves issue slots and the time of shared memory to the products, and takes less energy.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from tilewise.backends.hopper.forward_fp8 import consumer, producer
from tilewise.backends.hopper.primitives import new_ring
from tilewise.backends.hopper.rings import new_slots
from tilewise.backends.hopper.turn import SLOTS
from tilewise.backends.hopper.works import new_works


@gluon.jit
def forward_fp8_turned_kernel(q_desc, k_desc, v_desc, pointers, sizes, scalars, MODE: gl.constexpr, TILE: gl.constexpr,
                              num_warps: gl.constexpr):
    """out and lse of every tile; persistent: a CTA draws tiles until there are none."""
    SMALL: gl.constexpr = TILE.small_registers
    gl.static_assert(TILE.consumers == 2)
    q_ring = new_ring(q_desc, TILE.consumers, 1)
    k_ring = new_slots(k_desc, TILE.stages, 1)
    v_ring = new_slots(v_desc, SLOTS, 1)
    works = new_works(TILE.consumers)
    fence_async_shared()
    gl.warp_specialize([
        (consumer, (q_ring, k_ring, v_ring, works, pointers, sizes, scalars, 0, MODE, TILE)),
        (consumer, (q_ring, k_ring, v_ring, works, pointers, sizes, scalars, 1, MODE, TILE)),
        (producer, (q_desc, k_desc, v_desc, q_ring, k_ring, v_ring, works, pointers, sizes, MODE, TILE)),
    ], [4, 1], [TILE.registers, SMALL])
