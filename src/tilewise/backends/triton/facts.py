"""The host's half of the arguments: named tuples of a problem and its tensors, in the units that the kernels expect."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch

from tilewise import rng
from tilewise.backends.triton.arguments import (
    Box,
    Extras,
    ExtraStrides,
    Mode,
    PairStride,
    Scalars,
    Sizes,
    Stride,
    divisor_of,
)
from tilewise.inputs import Inputs
from tilewise.problem import SMALLEST_SCALE, Problem

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton's own switch, read when kernels are first imported
VECTOR_BYTES = 16
MAX_TILE_ROWS = 256
OPEN = 2**30  # a window bound that excludes nothing, small enough to be added to a length
RAGGED = 2**30  # rows of a packed tensor's descriptor, as primitives.load_box counts them
ANYWHERE = 0x7FFF0000  # the largest size of a dimension that is never out of bounds
SHIFTS = 3  # by so many a line of statistics is moved, of which a piece has to start at a multiple of 16 bytes
STATISTICS = 64  # the backward keeps row statistics in multiples of it, the most queries of a tile of key_gradients
WINDOW_TOGETHER = 8  # heads that alternate in a dense window (docs/triton.md)
ROWS_TOGETHER = 2**14  # of heads that alternate: tiles for each multiprocessor, within the L2 cache (docs/triton.md)
NO_PAIRS = PairStride(0, 0, 0, 0)


def stride_of(tensor: torch.Tensor, align: int) -> Stride:
    """Strides of q, k, v, out or one of their gradients, dense or packed, in units of ``align`` elements."""
    strides = tensor.stride() if tensor.ndim == 4 else (0, *tensor.stride())
    batch, row, head, channel = strides
    return Stride(batch // align, row // align, head // align, channel)


def contiguous_stride(shape: tuple[int, ...], align: int) -> Stride:
    """The same for a new contiguous tensor."""
    *lead, row, head, channel = shape
    return Stride(row * head * channel // align if lead else 0, head * channel // align, channel // align, 1)


def pair_stride(tensor: torch.Tensor | None, align: int) -> PairStride:
    """Strides of a 4-D tensor that broadcasts over pairs: 0 in a dimension of size 1."""
    if tensor is None:
        return NO_PAIRS
    batch, head, row, col = (0 if n == 1 else s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return PairStride(batch // align, head // align, row // align, col)


def is_aligned(tensor: torch.Tensor) -> bool:
    """Whether a thread may move 16 bytes of channels at once: contiguous, and every row starts at a multiple of 16.

    A tile's rows must also lie within 2 ** 31 units of 16 bytes.
    """
    unit = VECTOR_BYTES // tensor.element_size()
    *outer, inner = tensor.stride()
    near = tensor.stride(-3) // unit < 2**31 // MAX_TILE_ROWS
    return inner == 1 and near and tensor.data_ptr() % VECTOR_BYTES == 0 and all(stride % unit == 0 for stride in outer)


def box_of(tensor: torch.Tensor, rows: int, channels: int, clipped: bool = True) -> Box:
    """A TMA descriptor of a dense or packed tensor, for tiles of (rows, channels); it still needs an address.

    A dimension of size 1 may have any stride, 0 too, which the copy engine does not take. Unless ``clipped`` is false,
    rows of a packed tensor end with any sequence: an address is built from three coordinates whose strides cancel
    modulo 2 ** 64, so that the bounds check of one of them falls where the kernel wants it (triton.tools.ragged_tma).
    """
    unit = VECTOR_BYTES // tensor.element_size()
    shape = tuple(tensor.shape) if tensor.ndim == 4 else (1, *tensor.shape)
    strides = tensor.stride() if tensor.ndim == 4 else (unit, *tensor.stride())
    strides = tuple(unit if size == 1 and stride == 0 else stride for size, stride in zip(shape, strides, strict=True))
    if tensor.ndim == 4 or not clipped:
        return Box(tensor.dtype, shape, (*strides[:3], 1), (1, rows, 1, channels))
    _, row, head, _ = strides
    sizes = (ANYWHERE, ANYWHERE, shape[2], RAGGED, shape[3])
    return Box(tensor.dtype, sizes, (2**34 - row, row, head, row, 1), (1, 1, 1, rows, channels))


def until(tensor: torch.Tensor, end: int) -> torch.Tensor:
    """The rows of a dense tensor before ``end``; at least one, as no descriptor is of nothing."""
    return tensor[:, : max(end, 1)] if tensor.ndim == 4 else tensor


def statistics_rows(problem: Problem, mode: Mode) -> int:
    """Numbers in the backward's lse, as primitives.statistic_index counts."""
    shifts = SHIFTS if mode.unseen and not mode.lists else 0
    if problem.varlen:
        blocks = (problem.total_q + shifts * problem.batch) // STATISTICS + problem.batch + 1
        return problem.nheads * blocks * STATISTICS
    return problem.nheads * problem.batch * -(-(problem.seqlen_q + shifts) // STATISTICS) * STATISTICS


def line_of(numbers: int, block: int) -> Box:
    """A TMA descriptor of so many fp32 numbers in a row, for pieces of ``block``."""
    return Box(torch.float32, (numbers,), (1,), (block,))


def fits_boxes(tensors: tuple[torch.Tensor, ...]) -> bool:
    """Whether TMA takes the tensors as they lie: expanded dimensions, of stride 0, are left to plain loads."""
    countable = all(tensor.ndim == 4 or tensor.shape[0] < RAGGED for tensor in tensors)
    return countable and all(
        size == 1 or stride > 0 for t in tensors for size, stride in zip(t.shape, t.stride(), strict=True)
    )


def common_align(tensors: tuple[torch.Tensor, ...]) -> int:
    """Elements that all strides and addresses are multiples of: those of 16 bytes, or 1."""
    return VECTOR_BYTES // tensors[0].element_size() if all(map(is_aligned, tensors)) else 1


def pair_align(tensor: torch.Tensor | None) -> int:
    """The same for a tensor over pairs, whose last dimension may also be broadcast."""
    if tensor is None:
        return 1
    unit = VECTOR_BYTES // tensor.element_size()
    return unit if tensor.shape[-1] % unit == 0 and is_aligned(tensor) else 1


def precision(problem: Problem) -> str:
    """How fp32 products are formed: IEEE, unless torch's own setting allows TF32."""
    if problem.dtype == torch.float32 and problem.device_type == "cuda" and torch.backends.cuda.matmul.allow_tf32:
        return "tf32"
    return "ieee"


class Marks(NamedTuple):
    """Promises about addresses, found once for each combination of tensors."""

    align: int
    bias: int
    mask: int
    paired: bool  # every packed sequence has as many keys as queries: their offsets are one tensor


def marks_of(problem: Problem, inputs: Inputs, tensors: tuple[torch.Tensor, ...]) -> Marks:
    """The promises that hold for a call: ``tensors`` and the contiguous results, which start at a multiple of 16."""
    align = common_align(tensors)
    if problem.headdim % align or problem.headdim_v % align:
        align = 1
    return Marks(align, pair_align(inputs.bias), pair_align(inputs.mask), is_paired(inputs))


def is_paired(inputs: Inputs) -> bool:
    """Whether queries and keys are packed by the same offsets."""
    offsets_q, offsets_k = inputs.cu_seqlens_q, inputs.cu_seqlens_k
    if offsets_q is None or offsets_k is None or offsets_q.data_ptr() != offsets_k.data_ptr():
        return False
    return offsets_q.stride() == offsets_k.stride() and offsets_q.dtype == offsets_k.dtype


def four(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A broadcastable shape with four dimensions."""
    return (1,) * (4 - len(shape)) + tuple(shape)


def bias_kind(problem: Problem) -> str:
    """Where a bias gradient comes from: sums of ds over a broadcast side, its tiles, or tiles summed over sharers."""
    if "bias" not in problem.needs_grad or problem.bias_shape is None:
        return ""
    batch, heads, rows, cols = four(problem.bias_shape)
    if cols == 1:
        return "row"
    if rows == 1:
        return "col"
    return "tile" if (batch, heads) == (problem.batch, problem.nheads) else "shared"


def has_extras(problem: Problem) -> bool:
    """Whether any optional tensor takes part."""
    return (
        problem.varlen
        or problem.segments
        or problem.alibi
        or problem.sink
        or problem.dropout_p > 0
        or problem.bias_shape is not None
        or problem.mask_shape is not None
    )


def mode_of(problem: Problem, marks: Marks) -> Mode:
    """The compile-time features of a problem."""
    scored = problem.bias_shape is not None or problem.alibi or problem.softcap > 0
    lists = problem.mask_shape is not None or problem.segments
    return Mode(
        lower=problem.window_left is not None,
        upper=problem.window_right is not None or problem.causal is not None,
        top_left=problem.causal == "top_left",
        varlen=problem.varlen,
        bias=problem.bias_shape is not None,
        mask=problem.mask_shape is not None,
        segments=problem.segments,
        alibi=problem.alibi,
        sink=problem.sink,
        softcap=problem.softcap > 0,
        dropout=rng.threshold(problem.dropout_p) > 0,
        scale_first=scored or problem.softmax_scale < SMALLEST_SCALE or problem.dtype == torch.float32,
        precise=problem.dtype == torch.float32,
        two_parts=problem.dtype == torch.float32 or problem.bias_shape is not None,
        align=marks.align,
        bias_align=marks.bias,
        mask_align=marks.mask,
        precision=precision(problem),
        lists=lists,
        band=problem.banded and not lists,
        unseen=problem.banded and leaves_out(problem, marks.paired),
    )


def leaves_out(problem: Problem, paired: bool) -> bool:
    """Whether the band hides a key from every query, or every key from a query; of packed sequences whether it may."""
    if problem.varlen and not paired:
        return True
    shift = 0 if problem.varlen else problem.seqlen_k - problem.seqlen_q
    lower = -OPEN if problem.window_left is None else shift - problem.window_left
    upper = OPEN if problem.window_right is None else shift + problem.window_right
    if problem.causal is not None:
        upper = min(upper, 0 if problem.causal == "top_left" else shift)
    return lower > 0 or upper < 0 or upper < shift or lower > shift


def sizes_of(problem: Problem, inputs: Inputs) -> Sizes:
    """Lengths and the window; bottom-right causal is a window whose right side is 0."""
    left = OPEN if problem.window_left is None else min(problem.window_left, OPEN)
    right = OPEN if problem.window_right is None else min(problem.window_right, OPEN)
    if problem.causal == "bottom_right":
        right = min(right, 0)
    return Sizes(
        batch=problem.batch,
        nheads=problem.nheads,
        group=problem.group,
        seqlen_q=problem.seqlen_q,
        seqlen_k=problem.seqlen_k,
        total_q=problem.total_q,
        total_k=problem.total_k,
        window_left=left,
        window_right=right,
        batch_offset=inputs.batch_offset,
        together=heads_together(problem),
        by_nheads=divisor_of(problem.nheads),
        by_group=divisor_of(problem.group),
    )


def forward_sizes(problem: Problem, inputs: Inputs, mode: Mode) -> Sizes:
    """The same for a forward, where a dense band of two sides has an order of its own (``HALVES`` in places.place).

    Most blocks of a head then see equally many keys. A window wider than the sequence counts too.
    """
    sizes = sizes_of(problem, inputs)
    return sizes._replace(together=WINDOW_TOGETHER) if mode.lower and mode.upper and not mode.varlen else sizes


def heads_together(problem: Problem) -> int:
    """Heads whose blocks alternate: enough for a few waves where the work of a head's blocks differs, else one."""
    one_sided = (problem.window_left is None) != (problem.window_right is None and problem.causal is None)
    if not (problem.varlen or one_sided):
        return 1
    heads = problem.nheads * (1 if problem.varlen else problem.batch)
    rounds = -(-heads // max(1, ROWS_TOGETHER // max(problem.seqlen_q, problem.seqlen_k, 1)))
    return max(1, -(-heads // max(rounds, 1)))  # rounds of equal size


def scalars_of(problem: Problem) -> Scalars:
    """Floating-point facts; the dropout limit as the int32 with the bits of the largest dropped word."""
    dropped = max(rng.threshold(problem.dropout_p) - 1, 0)
    return Scalars(
        softmax_scale=float(problem.softmax_scale),
        softcap=float(problem.softcap),
        keep_scale=rng.keep_scale(problem.dropout_p),
        max_dropped=dropped - 2**32 if dropped >= 2**31 else dropped,
    )


def extras_of(inputs: Inputs, lists: torch.Tensor | None = None) -> Extras:
    """The optional tensors as the kernels read them; segments and offsets are copied if not contiguous."""
    mask = inputs.mask
    return Extras(
        bias=inputs.bias,
        mask=None if mask is None else mask.view(torch.uint8),
        alibi_slopes=inputs.alibi_slopes,
        sink=inputs.sink,
        seed=inputs.dropout_seed,
        segments_q=None if inputs.segments_q is None else inputs.segments_q.contiguous(),
        segments_k=None if inputs.segments_k is None else inputs.segments_k.contiguous(),
        cu_seqlens_q=None if inputs.cu_seqlens_q is None else inputs.cu_seqlens_q.contiguous(),
        cu_seqlens_k=None if inputs.cu_seqlens_k is None else inputs.cu_seqlens_k.contiguous(),
        lists=lists,
    )


def extra_strides_of(inputs: Inputs, marks: Marks, lists: PairStride) -> ExtraStrides:
    """Strides of the optional tensors."""
    slopes, sink = inputs.alibi_slopes, inputs.sink
    slopes_batch, slopes_head = (0, 0) if slopes is None else slopes.stride()
    sink_batch, sink_head = (0, 0) if sink is None else sink.stride()
    return ExtraStrides(
        bias=pair_stride(inputs.bias, marks.bias),
        mask=pair_stride(inputs.mask, marks.mask),
        lists=lists,
        slopes_batch=slopes_batch,
        slopes_head=slopes_head,
        sink_batch=sink_batch,
        sink_head=sink_head,
    )
