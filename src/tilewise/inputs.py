"""The tensors of one call, checked by one table and brought to one form: (Problem, Inputs)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from tilewise.descale import FP8
from tilewise.errors import InvalidInput, InvalidType
from tilewise.problem import GRAD_NAMES, Problem

FLOAT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
STORED_DTYPES = (*FLOAT_DTYPES, FP8)
DESCALES = ("q_descale", "k_descale", "v_descale")
INT_DTYPES = (torch.int32, torch.int64)


class Arguments(NamedTuple):
    """The arguments of the forward operator, in its order: tensors, then plain values."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    bias: torch.Tensor | None
    mask: torch.Tensor | None
    alibi_slopes: torch.Tensor | None
    sink: torch.Tensor | None
    segments_q: torch.Tensor | None
    segments_k: torch.Tensor | None
    cu_seqlens_q: torch.Tensor | None
    cu_seqlens_k: torch.Tensor | None
    dropout_seed: torch.Tensor | None
    causal: str
    window_left: int | None
    window_right: int | None
    softmax_scale: float | None
    softcap: float
    dropout_p: float
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    deterministic: bool
    needs_grad: tuple[str, ...]
    backend: str


TENSOR_COUNT = Arguments._fields.index("dropout_seed") + 1
ABSENT = (None,) * (TENSOR_COUNT - 3)  # the other tensors, in a call of q, k and v alone


class Inputs(NamedTuple):
    """The tensors of a call in the form every backend takes; None where absent.

    q (batch, seqlen_q, nheads, headdim), k (batch, seqlen_k, nheads_k, headdim), v (batch, seqlen_k, nheads_k,
    headdim_v), or (total, nheads, dim) with cu_seqlens (batch + 1,). bias and mask are 4-D and broadcast to
    (batch, nheads, seqlen_q, seqlen_k); views, but for an fp64 bias beside another state dtype, whose finite numbers
    are brought into that dtype's range. alibi_slopes and sink are (batch, nheads) in the state dtype. segments are
    (batch, seqlen). The descales of fp8 are (batch, nheads_k) or (batch, nheads_k, blocks) in fp32. dropout_seed is a
    0-dim int64. ``batch_offset`` is added to the batch index in dropout's counter.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    bias: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    sink: torch.Tensor | None = None
    segments_q: torch.Tensor | None = None
    segments_k: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    dropout_seed: torch.Tensor | None = None
    q_descale: torch.Tensor | None = None
    k_descale: torch.Tensor | None = None
    v_descale: torch.Tensor | None = None
    batch_offset: int = 0

    def replace(self, **changes: Any) -> Inputs:
        """A copy with some tensors changed."""
        return self._replace(**changes)


class Row(NamedTuple):
    """What a tensor argument must be: symbolic shapes, dtypes; ``broadcast`` lets a dimension be 1 or missing."""

    name: str
    shapes: tuple[tuple[str, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    broadcast: bool = False


_DENSE = (
    Row("q", (("batch", "seqlen_q", "nheads", "headdim"),), STORED_DTYPES),
    Row("k", (("batch", "seqlen_k", "nheads_k", "headdim"),), STORED_DTYPES),
    Row("v", (("batch", "seqlen_k", "nheads_k", "headdim_v"),), STORED_DTYPES),
)
_VARLEN = (
    Row("q", (("total_q", "nheads", "headdim"),), STORED_DTYPES),
    Row("k", (("total_k", "nheads_k", "headdim"),), STORED_DTYPES),
    Row("v", (("total_k", "nheads_k", "headdim_v"),), STORED_DTYPES),
    Row("cu_seqlens_q", (("batch + 1",),), INT_DTYPES),
    Row("cu_seqlens_k", (("batch + 1",),), INT_DTYPES),
)
_SCORES = ("batch", "nheads", "seqlen_q", "seqlen_k")
_OPTIONAL = (
    Row("bias", (_SCORES,), FLOAT_DTYPES, broadcast=True),
    Row("mask", (_SCORES,), (torch.bool,), broadcast=True),
    Row("alibi_slopes", (("nheads",), ("batch", "nheads")), FLOAT_DTYPES),
    Row("sink", (("nheads",), ("batch", "nheads")), FLOAT_DTYPES),
    Row("segments_q", (("batch", "seqlen_q"),), INT_DTYPES),
    Row("segments_k", (("batch", "seqlen_k"),), INT_DTYPES),
)
_HINTS = {
    "mask": "a float tensor is a bias: pass bias=; 0/1 integers: pass mask=tensor.bool(), True = the pair takes part",
    "bias": "a boolean tensor is a mask: pass mask=, True = the pair takes part",
}


def _words(shape: Sequence[str]) -> str:
    return "(" + ", ".join(shape) + ("," if len(shape) == 1 else "") + ")"


def _three_shapes(arguments: Arguments) -> str:
    return ", ".join(f"{name} {tuple(getattr(arguments, name).shape)}" for name in ("q", "k", "v"))


def check_tensor(name: str, tensor: Any, otherwise: str = "") -> None:
    """``tensor`` is a strided tensor: sparse and nested ones have no strides, and not every shape can be read."""
    if not isinstance(tensor, torch.Tensor):
        raise InvalidType(f"{name}: must be a torch.Tensor{otherwise}, got {type(tensor).__name__}")
    if tensor.layout is not torch.strided or tensor.is_nested:
        has = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise InvalidType(f"{name}: layout is {has}, must be strided; see attention_varlen for packed sequences")


def check_tensors(arguments: Arguments) -> None:
    """Each tensor argument is a strided tensor, the optional ones may be None."""
    required = ("q", "k", "v", *(() if arguments.cu_seqlens_q is None else ("cu_seqlens_q", "cu_seqlens_k")))
    for name in Arguments._fields[:TENSOR_COUNT]:
        tensor = getattr(arguments, name)
        if name in required:
            check_tensor(name, tensor)
        elif tensor is not None:
            check_tensor(name, tensor, " or None")


def _check_dtype(row: Row, tensor: torch.Tensor) -> None:
    if tensor.dtype not in row.dtypes:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in row.dtypes)
        needs = names if len(row.dtypes) == 1 else f"one of {names}"
        hint = f" ({_HINTS[row.name]})" if row.name in _HINTS else ""
        raise InvalidType(f"{row.name}: dtype is {str(tensor.dtype).removeprefix('torch.')}, must be {needs}{hint}")


def _bind(row: Row, tensor: torch.Tensor, sizes: dict[str, int], arguments: Arguments) -> None:
    """Match the tensor's shape with one of the row's, taking sizes that are not known yet."""
    _check_dtype(row, tensor)
    has = tuple(tensor.shape)
    for shape in row.shapes:
        if row.broadcast:
            tail = shape[len(shape) - len(has) :] if len(has) <= len(shape) else ()
            if len(has) <= len(shape) and all(
                size == 1 or size == sizes[name] for size, name in zip(has, tail, strict=True)
            ):
                return
        elif len(has) == len(shape) and all(
            sizes.setdefault(name, size) == size for size, name in zip(has, shape, strict=True)
        ):
            return
    known = {name: sizes[name] for shape in row.shapes for name in shape if name in sizes}
    numbers = ", ".join(f"{name} {size}" for name, size in known.items())
    verb = "broadcast to" if row.broadcast else "be"
    of_keys = row.broadcast and has == (sizes["batch"], sizes["seqlen_k"])
    raise InvalidInput(
        f"{row.name}: shape is {has}, must {verb} {' or '.join(_words(shape) for shape in row.shapes)}"
        + (f" with {numbers}" if numbers else "")
        + (f" (for one of each sequence's keys pass {row.name}[:, None, None, :])" if of_keys else "")
        + f"; got {_three_shapes(arguments)}"
    )


def _check_heads(rows: tuple[Row, ...], sizes: dict[str, int], arguments: Arguments) -> None:
    for name in ("headdim", "headdim_v"):
        if sizes[name] < 1:
            raise InvalidInput(f"{name}: is {sizes[name]}, must be at least 1; got {_three_shapes(arguments)}")
    nheads, nheads_k = sizes["nheads"], sizes["nheads_k"]
    if (nheads_k == 0 and nheads != 0) or (nheads_k != 0 and nheads % nheads_k):
        raise InvalidInput(
            f"nheads: is {nheads}, must be a multiple of nheads_k, which is {nheads_k}; got {_three_shapes(arguments)},"
            f" whose order is {_words(rows[0].shapes[0])}"
        )


def _check_together(arguments: Arguments) -> None:
    """q, k and v share one dtype; every tensor lives on one device."""
    dtypes = {name: getattr(arguments, name).dtype for name in ("q", "k", "v")}
    if len(set(dtypes.values())) > 1:
        listed = ", ".join(f"{name} {str(dtype).removeprefix('torch.')}" for name, dtype in dtypes.items())
        raise InvalidType(
            f"q, k, v: must have one dtype, got {listed}; convert them, e.g. v.to(q.dtype), or run under autocast"
        )
    for name in Arguments._fields[1:TENSOR_COUNT]:
        tensor = getattr(arguments, name)
        if tensor is not None and tensor.device != arguments.q.device:
            raise InvalidInput(f"{name}: is on {tensor.device}, must be on q's device, {arguments.q.device}")


def _check_offsets(name: str, offsets: torch.Tensor, total: int, side: str, longest: int | None) -> int:
    """Offsets whose numbers lie on the CPU are checked; returns the longest sequence."""
    values = offsets.tolist()
    if not values or values[0] != 0:
        raise InvalidInput(f"{name}: must start with 0, starts with {values[0] if values else 'nothing'}")
    lengths = [stop - start for start, stop in itertools.pairwise(values)]
    if any(length < 0 for length in lengths):
        raise InvalidInput(f"{name}: must not decrease, is {values}")
    if values[-1] > total:
        raise InvalidInput(f"{name}: last offset is {values[-1]}, must be at most total_{side}, which is {total}")
    most = max(lengths, default=0)
    if longest is not None and longest < most:
        raise InvalidInput(f"max_seqlen_{side}: is {longest}, must be at least the longest sequence, {most}")
    return most


def _sizes(arguments: Arguments) -> dict[str, int]:
    """All sizes by name, after every shape, dtype and device has been checked."""
    check_tensors(arguments)
    varlen = arguments.cu_seqlens_q is not None
    sizes: dict[str, int] = {}
    rows = _VARLEN if varlen else _DENSE
    for row in rows:
        _bind(row, getattr(arguments, row.name), sizes, arguments)
    if varlen:
        sizes["batch"] = sizes["batch + 1"] - 1
        if sizes["batch"] < 0:
            raise InvalidInput("cu_seqlens_q: must hold at least the offset 0, is empty")
        sizes["seqlen_q"], sizes["seqlen_k"] = sizes["total_q"], sizes["total_k"]
    _check_heads(rows, sizes, arguments)
    for row in _OPTIONAL:
        tensor = getattr(arguments, row.name)
        if tensor is not None:
            _bind(row, tensor, sizes, arguments)
    seed = arguments.dropout_seed
    if seed is not None and (seed.dtype != torch.int64 or seed.numel() != 1):
        raise InvalidType(f"dropout_seed: must be one int64 number, is {seed.dtype} with shape {tuple(seed.shape)}")
    _check_together(arguments)
    return sizes


def validate(arguments: Arguments) -> dict[str, int]:
    """Check shapes, dtypes and devices, also of meta and fake tensors; returns the sizes by name."""
    return _sizes(arguments)


def _problem(arguments: Arguments) -> Problem:
    sizes = _sizes(arguments)
    shape_of = {name: _four(getattr(arguments, name)) for name in ("bias", "mask")}
    bias, mask = shape_of["bias"], shape_of["mask"]
    return Problem(
        batch=sizes["batch"],
        seqlen_q=sizes["seqlen_q"],
        seqlen_k=sizes["seqlen_k"],
        nheads=sizes["nheads"],
        nheads_k=sizes["nheads_k"],
        headdim=sizes["headdim"],
        headdim_v=sizes["headdim_v"],
        dtype=arguments.q.dtype,
        device_type=arguments.q.device.type,
        causal=None if arguments.causal == "none" else arguments.causal,
        window_left=arguments.window_left,
        window_right=arguments.window_right,
        segments=arguments.segments_q is not None,
        mask_shape=None if mask is None else tuple(mask.shape),
        bias_shape=None if bias is None else tuple(bias.shape),
        bias_dtype=None if bias is None else bias.dtype,
        alibi=arguments.alibi_slopes is not None,
        sink=arguments.sink is not None,
        softmax_scale=sizes["headdim"] ** -0.5 if arguments.softmax_scale is None else arguments.softmax_scale,
        softcap=arguments.softcap,
        dropout_p=arguments.dropout_p,
        varlen=arguments.cu_seqlens_q is not None,
        total_q=sizes.get("total_q", 0),
        total_k=sizes.get("total_k", 0),
        needs_grad=tuple(name for name in GRAD_NAMES if name in arguments.needs_grad),
        deterministic=arguments.deterministic,
        inner_contiguous=all(t.stride(-1) == 1 or t.shape[-1] == 1 for t in (arguments.q, arguments.k, arguments.v)),
    )


def _four(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """A broadcastable tensor as 4-D."""
    if tensor is None or tensor.ndim == 4:
        return tensor
    return tensor[(None,) * (4 - tensor.ndim)]


def _per_head(tensor: torch.Tensor | None, problem: Problem) -> torch.Tensor | None:
    if tensor is None:
        return None
    return _in_range(tensor, problem.state_dtype).to(problem.state_dtype).expand(problem.batch, problem.nheads)


def narrowed(tensor: torch.Tensor) -> torch.Tensor:
    """Dimensions that were only expanded, back to size 1, so that no copy multiplies them."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and stride == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def is_wider(dtype: torch.dtype | None, state_dtype: torch.dtype) -> bool:
    """Whether finite numbers of ``dtype`` can lie beyond the range of ``state_dtype``."""
    return dtype == torch.float64 and state_dtype != torch.float64


def _in_range(tensor: torch.Tensor, state_dtype: torch.dtype) -> torch.Tensor:
    """The largest number of ``state_dtype`` for each finite one beyond it: what is finite excludes nothing."""
    if not is_wider(tensor.dtype, state_dtype):
        return tensor
    numbers, most = narrowed(tensor), torch.finfo(state_dtype).max
    return torch.where(numbers.isinf(), numbers, numbers.clamp(-most, most)).expand(tensor.shape)


_CACHE: dict[object, Problem] = {}
_CACHE_LIMIT = 4096


def _is_any_given(tensors: tuple[object, ...]) -> bool:
    return len([None for tensor in tensors if tensor is not None]) > 0


def facts_key(arguments: Arguments) -> tuple[object, ...] | None:
    """Everything the checks and the Problem depend on, but for the numbers of offsets; None if it cannot be had.

    Equal keys, equal facts: a repeated call pays for this and for one look-up, not for the checks.
    """
    q, k, v = arguments[:3]
    others: tuple[Any, ...] = arguments[3:TENSOR_COUNT]
    try:
        if _is_any_given(others):
            others = tuple([None if t is None else (t.shape, t.dtype, t.device, t.layout) for t in others])
        return (
            q.shape,
            k.shape,
            v.shape,
            q.dtype,
            k.dtype,
            v.dtype,
            q.device,
            k.device,
            v.device,
            q.stride()[-1],
            k.stride()[-1],
            v.stride()[-1],
            q.layout,
            k.layout,
            v.layout,
            others,
            arguments[TENSOR_COUNT:],
        )
    except (AttributeError, IndexError, TypeError, RuntimeError):
        return None  # no tensors, or none with strides: let the table speak


def problem_of(arguments: Arguments) -> Problem:
    """Check the arguments and name their facts.

    Checked facts are remembered by shapes, dtypes and options, so a repeated call pays a dictionary look-up. Offsets
    of the packed form are read and checked where they lie on the CPU; on a device they are not, which would wait
    for it.

    Raises:
        InvalidInput, InvalidType: naming the argument, what it was and what it must be.
    """
    key = facts_key(arguments)
    try:
        problem = _CACHE.get(key)
    except TypeError:  # symbolic sizes have no hash
        key, problem = None, None
    if problem is None:
        problem = _problem(arguments)
        if key is not None:
            if len(_CACHE) >= _CACHE_LIMIT:
                _CACHE.clear()
            _CACHE[key] = problem
    return _with_lengths(problem, arguments) if problem.varlen else problem


def describe(arguments: Arguments) -> tuple[Problem, Inputs]:
    """Check the arguments and bring them to the form every backend takes; raises as ``problem_of``."""
    problem = problem_of(arguments)
    return problem, inputs_of(arguments, problem)


def inputs_of(arguments: Arguments, problem: Problem) -> Inputs:
    """The tensors of checked arguments in the form every backend takes."""
    if not _is_any_given(arguments[3:TENSOR_COUNT]):
        return Inputs(arguments.q, arguments.k, arguments.v)
    seed, bias = arguments.dropout_seed, arguments.bias
    return Inputs(
        q=arguments.q,
        k=arguments.k,
        v=arguments.v,
        bias=None if bias is None else _four(_in_range(bias, problem.state_dtype)),
        mask=_four(arguments.mask),
        alibi_slopes=_per_head(arguments.alibi_slopes, problem),
        sink=_per_head(arguments.sink, problem),
        segments_q=arguments.segments_q,
        segments_k=arguments.segments_k,
        cu_seqlens_q=arguments.cu_seqlens_q,
        cu_seqlens_k=arguments.cu_seqlens_k,
        dropout_seed=None if seed is None else seed.reshape(()),
    )


def _with_lengths(problem: Problem, arguments: Arguments) -> Problem:
    """Tighten the bounds on the lengths by what can be read without waiting for a device."""
    bounds = {}
    for side, total in (("q", problem.total_q), ("k", problem.total_k)):
        offsets = getattr(arguments, f"cu_seqlens_{side}")
        longest = getattr(arguments, f"max_seqlen_{side}")
        if offsets.device.type == "cpu":
            bounds[f"seqlen_{side}"] = _check_offsets(f"cu_seqlens_{side}", offsets, total, side, longest)
        else:
            bounds[f"seqlen_{side}"] = total if longest is None else min(longest, total)
    return problem.replace(**bounds)


class PackedSequence(NamedTuple):
    """One sequence of a packed batch as a dense problem of batch 1, and its token ranges."""

    problem: Problem
    inputs: Inputs
    tokens_q: slice
    tokens_k: slice


def sequences(problem: Problem, inputs: Inputs) -> Iterator[PackedSequence]:
    """The sequences of a packed batch, one at a time; reads the offsets, so on a device it waits for them."""
    if inputs.cu_seqlens_q is None or inputs.cu_seqlens_k is None:
        raise InvalidInput("sequences: the inputs are not packed")
    starts_q, starts_k = inputs.cu_seqlens_q.tolist(), inputs.cu_seqlens_k.tolist()
    for index in range(problem.batch):
        tokens_q = slice(starts_q[index], starts_q[index + 1])
        tokens_k = slice(starts_k[index], starts_k[index + 1])
        dense = problem.replace(
            varlen=False,
            batch=1,
            seqlen_q=tokens_q.stop - tokens_q.start,
            seqlen_k=tokens_k.stop - tokens_k.start,
            total_q=0,
            total_k=0,
        )
        part = inputs.replace(
            q=inputs.q[None, tokens_q],
            k=inputs.k[None, tokens_k],
            v=inputs.v[None, tokens_k],
            alibi_slopes=None if inputs.alibi_slopes is None else inputs.alibi_slopes[index : index + 1],
            sink=None if inputs.sink is None else inputs.sink[index : index + 1],
            **{
                name: None if (given := getattr(inputs, name)) is None else given[index : index + 1]
                for name in DESCALES
            },
            cu_seqlens_q=None,
            cu_seqlens_k=None,
            batch_offset=inputs.batch_offset + index,
        )
        yield PackedSequence(dense, part, tokens_q, tokens_k)
