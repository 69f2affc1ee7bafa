"""What crosses from the host to the kernels: named tuples, so that a kernel reads ``strides.q.head``.

Triton flattens a named tuple of run-time values into scalars and pointers; a named tuple given as ``tl.constexpr`` is
one compile-time value, so that ``MODE.upper`` costs nothing in the kernel and a feature that is off leaves no code.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Stride(NamedTuple):
    """Strides of a (batch, seqlen, nheads, headdim) tensor in units of ``Mode.align`` elements; varlen: batch is 0."""

    batch: int
    row: int
    head: int
    channel: int


class PairStride(NamedTuple):
    """Strides of a tensor that broadcasts to (batch, nheads, seqlen_q, seqlen_k), in units of its ``align`` in Mode."""

    batch: int
    head: int
    row: int
    col: int


class Divisor(NamedTuple):
    """A divisor of numbers below 2**31, as the product and the shift that stand for it (places.divided)."""

    multiplier: int  # 32 bits, stored as int32
    shift: int


def divisor_of(divisor: int) -> Divisor:
    """The least power of two that reaches it bounds the error of the product, which then never reaches a whole.

    Granlund and Montgomery, "Division by invariant integers using multiplication" (1994). By 0 nothing is divided.
    """
    shift = max(divisor - 1, 0).bit_length()
    multiplier = 2 ** (31 + shift) // max(divisor, 1) + 1
    return Divisor(multiplier - 2**32 if multiplier >= 2**31 else multiplier, shift)


class Sizes(NamedTuple):
    """Lengths of one call. For varlen ``seqlen_q`` and ``seqlen_k`` are upper bounds of the sequences' lengths."""

    batch: int
    nheads: int
    group: int  # query heads for each key head
    seqlen_q: int
    seqlen_k: int
    total_q: int
    total_k: int
    window_left: int  # keys left and right of i + seqlen_k - seqlen_q that query i sees
    window_right: int
    batch_offset: int  # added to the batch index in dropout's counter
    together: int  # heads whose blocks alternate in the order of programs (places.place)
    by_nheads: Divisor  # so that nothing is divided before a dense forward can load
    by_group: Divisor


class Scalars(NamedTuple):
    """Floating-point facts of one call."""

    softmax_scale: float
    softcap: float
    keep_scale: float  # 1 / (1 - dropout_p), 0 when everything is dropped
    max_dropped: int  # a Philox word up to this one, seen as uint32, drops its pair (stored as int32)


class Extras(NamedTuple):
    """Pointers that only some problems have; None leaves no trace in the kernel."""

    bias: Any = None
    mask: Any = None
    alibi_slopes: Any = None  # (batch, nheads) fp32
    sink: Any = None  # (batch, nheads) fp32
    seed: Any = None  # one int64
    segments_q: Any = None  # (batch, seqlen_q), contiguous
    segments_k: Any = None
    cu_seqlens_q: Any = None  # (batch + 1,)
    cu_seqlens_k: Any = None
    lists: Any = None  # block lists of blocks.py, int32


class ExtraStrides(NamedTuple):
    """Strides of the tensors in ``Extras`` that are not contiguous by construction."""

    bias: PairStride
    mask: PairStride
    lists: PairStride  # (batch, head, owner block, slot); slot is 1
    slopes_batch: int
    slopes_head: int
    sink_batch: int
    sink_head: int


class Mode(NamedTuple):
    """Compile-time features: each combination is one specialisation of the same kernel."""

    lower: bool  # keys have a lower bound, j - i >= shift - window_left
    upper: bool  # keys have an upper bound, j - i <= shift + window_right
    top_left: bool  # the upper bound is also <= 0: the causal corner of SDPA
    varlen: bool
    bias: bool
    mask: bool
    segments: bool
    alibi: bool
    sink: bool
    softcap: bool
    dropout: bool
    scale_first: bool  # scores become natural units before their maximum is taken: always right, one operation more
    precise: bool  # fp32 inputs: exponentials to fp32 rounding
    two_parts: bool  # the backward reads lse in two parts (lse_parts.py)
    align: int  # elements that every stride and address of q, k, v and out is a multiple of; 1 promises nothing
    bias_align: int  # the same for bias and mask, whose keys are then contiguous; 1 promises nothing
    mask_align: int
    precision: str  # of products of fp32 inputs
    lists: bool  # tiles to visit come from block lists (mask or segments) rather than from arithmetic
    band: bool  # otherwise a causal or window band cuts tiles
    unseen: bool  # the band may leave out keys or queries altogether: those may hold anything and are not touched


class Tile(NamedTuple):
    """Compile-time sizes of a tile; ``num_d`` x ``block_d`` covers headdim, ``num_dv`` x ``block_dv`` headdim_v."""

    block_m: int
    block_n: int
    headdim: int
    headdim_v: int
    block_d: int
    block_dv: int
    num_d: int
    num_dv: int
    stages: int
    boxes: bool  # full and cut tiles come through TMA descriptors (primitives.load_box)
    joint: bool = False  # with boxes: all loads of a tile come before its first product, so that one wait is for all
    overlap: bool = False  # with boxes: a tile's product with v runs under the next tile's softmax
    clipped: bool = False  # with boxes and no lists: the copy engine cuts off what a band leaves out (Mode.unseen)
    held: bool = False  # with boxes, key gradients: the program's k stays in registers
    parked: bool = False  # with boxes, forward: the program's q stays in shared memory, its registers are for scores
    lazy: bool = False  # a row's maximum follows only scores that outgrow it a lot (follow.py)
    early: int = 0  # with boxes: exponentials of a quick step that wait for nothing (quick.py); 0: no quick steps
    sums: int = 1  # parts of a row's softmax sum (primitives.partial_sums)
    cube: bool = False  # a dense forward's grid has three dimensions, and its programs begin and end in fewer steps


class Config(NamedTuple):
    """How a kernel is compiled, beside its compile-time arguments; the pipeline's depth is in its Tile."""

    warps: int
    aligned: bool = False  # every pointer is a multiple of 16 bytes
    registers: int | None = None  # for each thread at most
    fuses: bool = True  # a product and a sum may become one instruction with one rounding


class Box(NamedTuple):
    """A TMA descriptor before it has an address: what Triton's launcher reads of its TensorDescriptor."""

    base: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]
    padding: str = "zero"
    round_f32_to_tf32: bool = False  # read from triton 3.7 on


class Grads(NamedTuple):
    """Which gradients a backward kernel produces; ``bias`` is how: "", "tile", "row" or "col" sums of ds."""

    q: bool
    k: bool
    v: bool
    bias: str
    alibi: bool
    statistics: bool = False  # the kernel computes delta and the form of lse that all read, and stores them
    leads: bool = False  # the launch after it may begin once all of its programs have begun
    early: bool = False  # it may begin beside the launch before it, of which it reads nothing, and ends after that one
