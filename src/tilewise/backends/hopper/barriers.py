"""The backward's hardware barriers: who tells whom, without a meeting of those who only tell.

Triton's arrival at an mbarrier makes the four warps of a consumer meet first. At a named barrier a warp arrives and
goes on, and only the side that waits stops. A barrier counts one round at a time, so an arrival must not come before
the round ahead of it is over: where the arriving side may run ahead, two barriers take turns, one for each slot.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# of the 16 that a CTA has Triton takes one for each partition and one more
MEETING = gl.constexpr(5)  # both consumers
Q_READ = gl.constexpr(6)  # two slots: the consumers to the producer
DOUT_READ = gl.constexpr(8)  # two slots: the consumers to the producer
DQ_WRITTEN = gl.constexpr(10)  # one for each consumer, to the writer of dq
DS_WRITTEN = gl.constexpr(12)  # two slots for each consumer, to the other

CONSUMERS = gl.constexpr(256)  # threads
CONSUMER_AND_WARP = gl.constexpr(128 + 32)


@gluon.jit
def tell(barrier, threads):
    """Arrive and go on. ``threads``: of both sides together."""
    gl.inline_asm_elementwise(
        "bar.arrive $1, $2; mov.u32 $0, $1;", "=r,r,r", [gl.to_tensor(barrier), gl.to_tensor(threads)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def tell_if(condition, barrier, threads):
    """The same if a condition holds that is one for all threads; no branch, over which no instruction would move."""
    gl.inline_asm_elementwise(
        "{ .reg .pred so; setp.ne.s32 so, $3, 0; @so bar.arrive $1, $2; mov.u32 $0, $1; }", "=r,r,r,r",
        [gl.to_tensor(barrier), gl.to_tensor(threads), gl.to_tensor(condition).to(gl.int32)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def pin(sums):
    """The same sums, two in a thread and none negative.

    The assembler moves a wait over arithmetic, but over no branch: here is one that needs the sums, and is never taken.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred on; setp.geu.f32 on, $2, 0f00000000; setp.geu.and.f32 on, $3, 0f00000000, on;"
        " vote.sync.all.pred on, on, 0xffffffff;"
        " AGAIN: @on bra ON; nanosleep.u32 1; bra AGAIN; ON: mov.f32 $0, $2; mov.f32 $1, $3; }",
        "=f,=f,f,f", [sums], dtype=gl.float32, is_pure=False, pack=2,
    )  # fmt: skip


@gluon.jit
def hold(sums):
    """The same sums, and no branch: the assembler moves a wait over no arrival, and here is one that never comes."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred come; setp.lt.f32 come, $2, 0f00000000; setp.lt.or.f32 come, $3, 0f00000000, come;"
        " @come bar.arrive 15, 256; mov.f32 $0, $2; mov.f32 $1, $3; }",
        "=f,=f,f,f", [sums], dtype=gl.float32, is_pure=False, pack=2,
    )  # fmt: skip


@gluon.jit
def await_all(barrier, threads):
    """Arrive and wait for everyone else."""
    gl.inline_asm_elementwise(
        "bar.sync $1, $2; mov.u32 $0, $1;", "=r,r,r", [gl.to_tensor(barrier), gl.to_tensor(threads)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def meet():
    """Both consumers of a tile meet."""
    await_all(MEETING, CONSUMERS)


@gluon.jit
def let_go(step, STAGES: gl.constexpr, READ: gl.constexpr, TILE: gl.constexpr):
    """Consumer: the slot of this step has been read."""
    tell(READ + step % STAGES, TILE.around)


@gluon.jit
def await_slot(step, STAGES: gl.constexpr, READ: gl.constexpr, TILE: gl.constexpr):
    """Producer: the slot that this step takes is empty."""
    gl.static_assert(STAGES <= 2)
    if step >= STAGES:
        await_all(READ + step % STAGES, TILE.around)


@gluon.jit
def tell_ds(step, INDEX: gl.constexpr):
    """Consumer INDEX has written its half of this step's ds."""
    tell(DS_WRITTEN + 2 * INDEX + step % 2, CONSUMERS)


@gluon.jit
def await_ds(step, INDEX: gl.constexpr):
    """The other consumer has written its half of this step's ds."""
    await_all(DS_WRITTEN + 2 * (1 - INDEX) + step % 2, CONSUMERS)
