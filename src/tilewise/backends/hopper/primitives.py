"""What the Hopper kernels share: rings of shared memory, TMA coordinates, dynamic tiles, the band, scores.

The few names of Gluon that changed between releases, and the instructions it has no wrapper for, stand here only.
"""

from __future__ import annotations

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import _core as gluon_core
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from tilewise.backends.hopper.arguments import KeyBlocks, Ring, Span, Work

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
RAGGED = gl.constexpr(1 << 30)  # rows of a packed descriptor: see maps.packed_map
TICKETS = gl.constexpr(2)


load_box = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # the first from triton 3.7 on
store_box = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # the second from triton 3.7 on


@gluon_core.builtin
def reinterpret(smem, dtype, shape, layout, _semantic=None):
    """The same shared memory as a tile of another type, shape and layout."""
    unwrap = gluon_core._unwrap_if_constexpr
    return _semantic.memdesc_reinterpret(smem, unwrap(dtype), [unwrap(size) for size in shape], unwrap(layout))


@gluon_core.builtin
def tma_reduce_add(tensor_desc, coord, src, _semantic=None):
    """Add a tile of shared memory to global memory; counts as a bulk store for ``tma.store_wait``."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle)


@gluon.jit
def begin_early():
    """The next launch may begin, and this one, which may have begun early, goes on once the one before it is done."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def reciprocal(x):
    """1 / x to one unit in the last place but one; 0 for infinity."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon_core.builtin
def scale_moved(o, factor, count, _semantic=None):
    """o * factor, by row; a warp whose rows all have factor 1 skips it. ``count``: elements of o in a thread.

    A thread holds two rows, and its first and its last element are not of the same one.
    """
    count = gluon_core._unwrap_if_constexpr(count)
    first = 2 * count
    text = (
        "{ .reg .pred moved, any;"
        f" setp.neu.f32 moved, ${first}, 0f3F800000; setp.neu.or.f32 moved, ${first + count - 1}, 0f3F800000, moved;"
        " vote.sync.any.pred any, moved, 0xffffffff;"
        + "".join(f" mov.f32 ${i}, ${count + i};" for i in range(count))
        + " @!any bra STILL;"
        + "".join(f" mul.f32 ${i}, ${i}, ${first + i};" for i in range(count))
        + " STILL: }"
    )
    constraints = ",".join(["=&f"] * count + ["f"] * first)
    arguments = [o, factor]
    return gluon_core.inline_asm_elementwise(
        text, constraints, arguments, gl.float32, False, count, _semantic=_semantic
    )


@gluon.jit
def new_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit
def new_ring(desc, STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
    """A ring of tiles of ``desc``; a slot is empty again when every consumer has let it go."""
    slots = gl.allocate_shared_memory(desc.dtype, [STAGES] + desc.block_type.shape, desc.layout)
    return Ring(slots, new_barriers(STAGES, 1), new_barriers(STAGES, CONSUMERS))


@gluon.jit
def new_tickets(READERS: gl.constexpr):
    slots = gl.allocate_shared_memory(gl.int32, [TICKETS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return Ring(slots, new_barriers(TICKETS, 1), new_barriers(TICKETS, READERS))


@gluon.jit
def load(ring, slot, count, desc, coord):
    """Fill ``slot`` for the ``count``-th time (from 0) once its readers have let it go."""
    mbarrier.wait(ring.empty.index(slot), (count & 1) ^ 1)
    mbarrier.expect(ring.full.index(slot), desc.block_type.nbytes)
    load_box(desc, coord, ring.full.index(slot), ring.slots.index(slot))


@gluon.jit
def matrix(tile):
    """The two dimensions of a tile that a descriptor of higher rank filled."""
    RANK: gl.constexpr = len(tile.shape)
    return tile.reshape([tile.shape[RANK - 2], tile.shape[RANK - 1]])


@gluon.jit
def rows_at(span, head, row, MODE: gl.constexpr, COL: gl.constexpr = 0):
    """TMA coordinates of rows from ``row`` on; what lies outside the span reads as zero and is not written."""
    if MODE.varlen:
        return RAGGED, span.start + span.length, head, RAGGED - span.length + row, COL
    else:
        return span.start, head, row, COL


@gluon.jit
def count_tiles(pointers, sizes, nheads, MODE: gl.constexpr):
    """How many tiles there are; the packed form's table begins with the number of its slots."""
    if MODE.varlen:
        return gl.load(pointers.table) * nheads
    else:
        return sizes.tiles


@gluon.jit
def draw(ticket_ptr, tiles):
    """Take the next tile. The last ticket drawn sets the counter back to 0."""
    drawn = gl.atomic_add(ticket_ptr, 1)
    if drawn == tiles - 1:
        gl.store(ticket_ptr, 0)
    return drawn + gl.num_programs(0)


@gluon.jit
def take_ticket(ticket_ptr, tiles):
    """Take the next tile, by one lane of a warp; ``drawn`` tells which, and nothing waits for the number before.

    The counter is back at 0 after the last ticket. A sum would not do: the assembler hands it to all lanes at once.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred first; .reg .u32 lane, last; mov.u32 lane, %laneid; setp.eq.u32 first, lane, 0; mov.u32 $0, 0;"
        " cvt.u32.u64 last, $2; @first atom.global.relaxed.gpu.inc.u32 $0, [$1], last; }", "=&r,l,l",
        [ticket_ptr.to(gl.int64), (tiles - 1).to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def drawn(ticket):
    """The tile that ``take_ticket`` took."""
    number = gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;", "=r,r", [ticket], dtype=gl.int32, is_pure=False, pack=1
    )
    return number + gl.num_programs(0)


@gluon.jit
def draw_ticket(tickets, ticket_ptr, n, tiles):
    """Producer: take the next tile and publish it."""
    tile = draw(ticket_ptr, tiles)
    slot = n % TICKETS
    mbarrier.wait(tickets.empty.index(slot), ((n // TICKETS) & 1) ^ 1)
    tickets.slots.index(slot).store(gl.full([1], tile, gl.int32, layout=gl.BlockedLayout([1], [32], [1], [0])))
    mbarrier.arrive(tickets.full.index(slot), count=1)
    return tile


@gluon.jit
def read_ticket(tickets, n):
    """Everyone else: the tile published after the ``n``-th."""
    slot = n % TICKETS
    mbarrier.wait(tickets.full.index(slot), (n // TICKETS) & 1)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    tile = gl.max(tickets.slots.index(slot).load(layout), 0)
    mbarrier.arrive(tickets.empty.index(slot), count=1)
    return tile


@gluon.jit
def packed_sequence(block, head, batch, pointers, sizes, MODE: gl.constexpr):
    """A tile of one sequence of the packed form; keys that no query sees are cut off its span.

    So what such a key holds never meets a product, as the host sees to in the dense form.
    """
    start_q = gl.load(pointers.cu_seqlens_q + batch)
    start_k = gl.load(pointers.cu_seqlens_k + batch)
    length_q = gl.load(pointers.cu_seqlens_q + batch + 1) - start_q
    length_k = gl.load(pointers.cu_seqlens_k + batch + 1) - start_k
    length_k = gl.where(length_q > 0, length_k, 0)
    shift = length_k - length_q
    upper = shift + sizes.upper
    lower = shift + sizes.lower
    if MODE.top_left:
        upper = gl.minimum(upper, 0)
    if MODE.upper:
        length_k = gl.maximum(gl.minimum(length_k, length_q + upper), 0)
    if MODE.lower:
        cut = gl.minimum(gl.maximum(lower, 0), length_k)
        start_k += cut
        length_k -= cut
        lower -= cut
        upper -= cut
        shift -= cut
    return Work(block, head, batch, Span(start_q, length_q), Span(start_k, length_k), lower, upper, shift, 0)


@gluon.jit
def key_blocks(work, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, MODE: gl.constexpr):
    """Key blocks of a query tile."""
    return blocks_of_rows(work, work.block * BLOCK_M, BLOCK_M, BLOCK_N, MODE)


@gluon.jit
def blocks_of_rows(work, m_begin, ROWS: gl.constexpr, BLOCK_N: gl.constexpr, MODE: gl.constexpr):
    """Key blocks [first, last) of a tile's ROWS rows from ``m_begin`` on, at least one.

    Of them [full_first, full_last) need no mask: a ragged end and a causal or right bound make the last blocks partial,
    a left bound the first.
    """
    m_end = gl.minimum(m_begin + ROWS, work.q.length)
    begin = 0
    end = work.k.length
    full_begin = 0
    full_end = work.k.length
    if MODE.lower:
        begin = gl.maximum(begin, m_begin + work.lower)
        full_begin = gl.maximum(full_begin, m_end - 1 + work.lower)
    if MODE.upper:
        end = gl.minimum(end, m_end + work.upper)
        full_end = gl.minimum(full_end, m_begin + work.upper + 1)
    first = begin // BLOCK_N
    last = gl.maximum((gl.maximum(end, 0) + BLOCK_N - 1) // BLOCK_N, first + 1)
    full_last = gl.minimum(gl.maximum(gl.maximum(full_end, 0) // BLOCK_N, first), last)
    full_first = gl.minimum((full_begin + BLOCK_N - 1) // BLOCK_N, full_last)
    return KeyBlocks(first, gl.maximum(full_first, first), full_last, last)


@gluon.jit
def keep_band(s, rows, cols, work, MODE: gl.constexpr):
    """-inf outside the band and past the last key; ``rows`` and ``cols`` broadcast to the tile, either way round."""
    end = rows * 0 + work.k.length
    if MODE.upper:
        end = gl.minimum(end, rows + (work.upper + 1))
    keep = cols < end
    if MODE.lower:
        keep = keep & (cols >= rows + work.lower)
    return gl.where(keep, s, float("-inf"))


@gluon.jit
def capped(s, scalars):
    """softcap tanh(scale s / softcap) in units of log2, exact to fp32 rounding of its range, and r, for its derivative.

    tanh(x) = 1 - 2 r and tanh'(x) = 4 r (1 - r) with r = 1 / (1 + exp(2 x)).
    """
    r = reciprocal(1.0 + gl.exp2(s * scalars.softcap_in))
    return scalars.softcap_out - (2 * scalars.softcap_out) * r, r


@gluon.jit
def distance(rows, cols, work):
    """|i + shift - j|, by which ALiBi's slope is multiplied."""
    return gl.abs((rows + work.shift - cols).to(gl.float32))


@gluon.jit
def tilt(s, rows, cols, work, slope_log2):
    """ALiBi, in units of log2."""
    return s - slope_log2 * distance(rows, cols, work)


@gluon.jit
def publish(smem, values):
    """Store registers where the copy engine or a matrix product will read them."""
    smem.store(values)
    fence_async_shared()
