"""What crosses from the host to the kernels, and between the parts of a kernel: named tuples.

Triton flattens a named tuple of run-time values into scalars and pointers; a named tuple given as ``gl.constexpr`` is
one compile-time value, so ``MODE.upper`` costs nothing and a feature that is off leaves no code behind.
"""

from __future__ import annotations

from typing import Any, NamedTuple

V_SLOTS = 2  # of v as it comes, and as many of v transposed
OPEN = 1 << 30  # a band's bound that nothing reaches
ALL, FREE = 4, -1  # of four quarters; the assembler chooses


class Sizes(NamedTuple):
    """Lengths and counts of one call, all int32.

    Dense: pair (i, j) is kept iff lower <= j - i <= upper. Packed: the same with j - i - (length_k - length_q).
    """

    batch: int
    nheads: int
    group: int  # query heads that share one key head
    seqlen_q: int
    seqlen_k: int
    lower: int
    upper: int
    shift: int  # alibi measures |i + shift - j|
    blocks: int  # tiles of one head (packed: slots of the tile table)
    heads_in_flight: int  # heads whose tiles are worked on together, so that their keys stay in L2
    tiles: int
    rows: int  # rows of one head in lse (packed: total_q)
    splits: int = 1  # ranges that the keys of a query tile are cut into, each a tile of its own
    split_keys: int = 0  # keys of a range


class Scalars(NamedTuple):
    """Floating-point facts of one call, fp32."""

    softmax_scale: float
    scale_log2: float  # softmax_scale * log2(e)
    softcap_in: float  # softmax_scale * 2 * log2(e) / softcap
    softcap_out: float  # softcap * log2(e)


class Pointers(NamedTuple):
    """Plain addresses; None leaves no trace in the kernel."""

    ticket: Any  # int32 (1,): the next tile; 0 before and after every launch
    lse: Any = None  # fp32 (batch, nheads, seqlen_q), packed (nheads, total_q), split (splits, batch, nheads, seqlen_q)
    outs: Any = None  # split only: fp32 (splits, batch, nheads, seqlen_q, block_dv)
    alibi_slopes: Any = None  # fp32 (batch, nheads)
    sink: Any = None  # fp32 (batch, nheads)
    cu_seqlens_q: Any = None  # int32 (batch + 1,)
    cu_seqlens_k: Any = None
    table: Any = None  # int32: number of slots, 0, then sequence and block of every slot: see schedule.py
    leaders_q: Any = None  # int32 (batch, seqlen_q): see segments.py
    leaders_k: Any = None  # int32 (batch, seqlen_k)
    meetings: Any = None  # int32 (batch, query tiles, 4)
    unseen: Any = None  # int32 (batch, key blocks): whether a block has keys that no query sees


class Mode(NamedTuple):
    """Compile-time features: each combination is one specialisation of a kernel."""

    lower: bool = False  # the band has a lower bound (left window)
    upper: bool = False  # the band has an upper bound (causal, right window)
    top_left: bool = False  # packed only: the upper bound is also <= 0
    varlen: bool = False
    split: bool = False  # a tile sees one range of the keys, and its state is merged with the others' afterwards
    softcap: bool = False
    alibi: bool = False
    sink: bool = False
    segments: bool = False
    slopes: bool = False  # backward: alibi_slopes have a gradient
    behind: bool = False  # backward, softcap and ALiBi: no key that is kept lies ahead of its query
    by_block: bool = False  # fp8: k or v has a descale for each block of keys
    raw_scale: bool = True  # the scale is positive and nothing is added: scores need no pass of their own


class ForwardTile(NamedTuple):
    """Compile-time sizes of the forward: ``consumers`` warpgroups of 64 query rows share each key tile."""

    block_n: int
    block_d: int
    block_dv: int
    stages: int
    consumers: int
    registers: int  # of a consumer's thread
    q_in_registers: bool
    out_parts: int  # out leaves in so many goes, for want of shared memory
    lazy: bool  # the maximum follows only what outgrows it a lot, and a warp without such a row leaves out as it is
    votes: bool = False  # lazy, and a warp without such a row does not even compare its threads' maxima
    held: int = ALL  # quarters of a full block's exponentials that come before the wait for p v; of a masked one's all
    turns: bool = False  # the consumers start their products in turn
    halved: bool = False  # half of the next scores start beside p v, the others in the registers that p leaves
    one_loop: bool = False  # windows: one for full blocks too, which takes less registers, and less code to fetch

    @property
    def block_m(self) -> int:
        """Query rows of a tile."""
        return 64 * self.consumers

    @property
    def keys_barrier(self) -> int:
        """First of the named barriers at which k slots are let go; Triton takes one for each partition and one more."""
        return self.consumers + 2

    @property
    def values_barrier(self) -> int:
        """The same of v."""
        return self.keys_barrier + self.stages

    @property
    def queries_barrier(self) -> int:
        """The same of q."""
        return self.values_barrier + self.stages

    @property
    def turns_barrier(self) -> int:
        """First of those at which the consumers take turns."""
        return self.queries_barrier + self.consumers

    @property
    def parts(self) -> int:
        """Boxes that q and k come in: one if ``block_d`` is a power of two, else of 64 channels, the last cut short."""
        return 1 if self.block_d & (self.block_d - 1) == 0 else -(-self.block_d // 64)

    @property
    def part_d(self) -> int:
        """Channels of such a box."""
        return self.block_d if self.parts == 1 else 64

    @property
    def box_dv(self) -> int:
        """Channels of the one box that v comes in: a power of two."""
        return 1 << (self.block_dv - 1).bit_length()

    @property
    def wide(self) -> int:
        """Columns of the accumulator, or of the larger of the two that no power of two falls into."""
        return self.block_dv if self.block_dv == self.box_dv else self.box_dv // 2

    @property
    def narrow(self) -> int:
        """Columns of the smaller accumulator, if there is one."""
        return self.block_dv - self.wide


class Descale(NamedTuple):
    """What a stored e4m3 number is multiplied by: fp32 at ``address`` and so many strides on."""

    address: Any
    batch_stride: int  # 0 for one number
    head_stride: int
    block_stride: int = 0  # one for each 128 rows of a head, or 0


class Fp8Pointers(NamedTuple):
    """Plain addresses of the fp8 forward; None leaves no trace in the kernel."""

    ticket: Any  # int32 (1,): the next tile; 0 before and after every launch
    lse: Any  # fp32 (batch, nheads, seqlen_q), packed (nheads, total_q)
    out: Any  # bf16 (batch, seqlen_q, nheads, headdim_v), packed (total_q, nheads, headdim_v), contiguous
    q_descale: Any = None
    k_descale: Any = None
    v_descale: Any = None
    unseen: Any = None  # keys that the first block, which begins where a block of descales does, has before k and v do
    alibi_slopes: Any = None  # fp32 (batch, nheads)
    sink: Any = None  # fp32 (batch, nheads)
    cu_seqlens_q: Any = None  # int32 (batch + 1,)
    cu_seqlens_k: Any = None
    table: Any = None  # int32: see schedule.py


class Fp8Tile(NamedTuple):
    """Compile-time sizes of the fp8 forward."""

    block_n: int
    block_d: int
    block_dv: int
    stages: int  # of k
    consumers: int
    registers: int  # of a consumer's thread
    small_registers: int  # of the other warps' threads
    columns: int = 0  # headdim_v
    turns: bool = True  # the consumers start their products in turn
    turners: int = 2  # warps that transpose v; 0: it has been transposed before
    held: int = 3  # words between the exponentials of a word and what comes before them: see words_fp8.py; 0: any

    @property
    def block_m(self) -> int:
        """Query rows of a tile."""
        return 64 * self.consumers

    @property
    def around_k(self) -> int:
        """Threads that meet over a slot of k: those that read it, and the warp that fills it."""
        return 128 * self.consumers + 32

    @property
    def around_v(self) -> int:
        """The same of the transposed v, with as many warps as transpose it, or the one that fetches it."""
        return 128 * self.consumers + 32 * max(1, self.turners)

    @property
    def parts(self) -> int:
        """Parts of 64 channels that out falls in."""
        return self.block_dv // 64

    @property
    def keys_barrier(self) -> int:
        """First of the named barriers at which k slots are let go; Triton takes one for each partition and one more."""
        return self.consumers + self.turners + 2

    @property
    def values_barrier(self) -> int:
        """The same of the transposed v."""
        return self.keys_barrier + self.stages

    @property
    def turns_barrier(self) -> int:
        """The first of those at which the consumers take turns."""
        return self.values_barrier + V_SLOTS


class Ring(NamedTuple):
    """Slots of shared memory that one side fills and the other empties, with an mbarrier for each event."""

    slots: Any
    full: Any
    empty: Any


class Slots(NamedTuple):
    """Slots of shared memory, with an mbarrier each for their being full; named barriers tell that they are empty."""

    slots: Any
    full: Any


class Span(NamedTuple):
    """Rows of one sequence: dense ``start`` is the batch index, packed the first token."""

    start: Any
    length: Any


class Work(NamedTuple):
    """One tile: where it lies and which pairs it keeps (lower <= j - i <= upper)."""

    block: Any
    head: Any
    batch: Any
    q: Any
    k: Any
    lower: Any
    upper: Any
    shift: Any
    split: Any  # which range of the keys: see Sizes.splits


class KeyBlocks(NamedTuple):
    """The key blocks [first, last) of a query tile; [full_first, full_last) need no mask."""

    first: Any
    full_first: Any
    full_last: Any
    last: Any


class Rows(NamedTuple):
    """The 64 query rows of a tile that one consumer works on, from ``row0`` on."""

    work: Any
    blocks: Any
    row0: Any
    slope_log2: Any
    leaders: Any = None  # int32 (64,): see segments.py
    leaders_k: Any = None  # address of the first key's
    unseen: Any = None  # address of the first block's


class Leaders(NamedTuple):
    """What says which pairs of a key tile are of one segment: see segments.py."""

    keys: Any  # int32 (64,): of this warpgroup's keys
    queries: Any  # address of the first query's


class BackwardTile(NamedTuple):
    """Compile-time sizes of the backward: a tile of ``block_n`` keys walked in steps of ``block_m`` query rows.

    dq of a step falls in parts of (64, 64), as many for each of the two consumers: the column halves of 64 rows of 128
    channels, the row halves of 128 rows of 64, or the column quarters of 64 rows of 256.
    """

    block_m: int
    block_n: int
    block_d: int
    stages: int  # of q, at most 2
    dout_stages: int
    registers: int
    channels: int = 0  # of q and k that products sum over: the rest of block_d is padding
    channels_v: int = 0
    readers: int = 2  # consumers that read a step's q and dout

    @property
    def around(self) -> int:
        """Threads around a slot of q or dout: those that read it, and the warp that fills it."""
        return 128 * self.readers + 32

    @property
    def parts(self) -> int:
        """Parts of dq in a step."""
        return self.block_m * self.block_d // 4096


class BackwardPointers(NamedTuple):
    """Plain addresses of the backward's main kernel; None leaves no trace."""

    ticket: Any  # int32 (1,): the next tile; 0 before and after every launch
    alibi_slopes: Any = None
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    table: Any = None
    leaders_q: Any = None  # int32 (batch, seqlen_q): see segments.py
    leaders_k: Any = None  # int32 (batch, seqlen_k)
    meetings: Any = None  # int32 (batch, key blocks, 4)
    unseen: Any = None  # int32 (batch, key blocks)
    slope_gradients: Any = None  # fp32 (batch, nheads), 0 before


class BackwardSizes(NamedTuple):
    """Lengths and counts of one backward call, all int32; the band as in ``Sizes``."""

    batch: int
    nheads: int
    group: int
    seqlen_q: int
    seqlen_k: int
    lower: int
    upper: int
    shift: int
    blocks: int  # key blocks of one head (packed: slots of the tile table)
    heads_in_flight: int  # key heads whose tiles are drawn together, a divisor of all; packed: of one sequence
    tiles: int
    row_blocks: int  # blocks of block_m rows that one query head has in the fp32 dq, lse and delta


class Steps(NamedTuple):
    """The query blocks a key tile meets: the masked ones first, [first, full_first) and [full_last, last)."""

    first: Any
    full_first: Any
    full_last: Any
    masked: Any  # how many steps need the mask
    count: Any


class Shared(NamedTuple):
    """Shared memory of the backward; ds, dq and dq_added are 0 in a kernel that makes no dq."""

    q: Slots
    dout: Slots
    k: Ring
    v: Ring
    lse: Any
    delta: Any
    ds: Any  # two buffers of (keys, block_m rows)
    dq: Any  # a part of dq for each consumer
    dq_added: Any  # an mbarrier for each: the part has been read
