"""The mask side of the Transformers integration: rules instead of a dense (seqlen_q, seqlen_k) mask.

Transformers describes a mask as a tree of small functions (causal, sliding window, padding, packed sequences) and asks
the attention implementation's mask function to turn that tree into whatever its attention function wants.  Here the
tree is read into a ``MaskPlan``: a band of key offsets, a padding row and sequence ids, O(seqlen) numbers in all.  A
tree with any part that is not recognised becomes the dense boolean mask that Transformers itself would build.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

Resolved: TypeAlias = tuple[slice, dict[str, Any]]  # the keys that are needed, and attention's arguments for them


class Segments(NamedTuple):
    """Sequence ids: query i and key j take part together iff ``q[b, i] == k[b, j]``; (batch or 1, seqlen), integer."""

    q: Tensor
    k: Tensor

    def combined(self, other: Segments | None) -> Segments:
        """Ids that are equal iff they are equal in both."""
        if other is None:
            return self
        base = torch.maximum(other.q.max(), other.k.max()) + 2  # ids start at -1
        return Segments(self.q * base + other.q, self.k * base + other.k)


@dataclass(frozen=True, eq=False)
class MaskPlan:
    """Which pairs take part, as rules that are ANDed together.

    Query i sees key j iff ``lower <= j - i <= upper`` (None is open), ``padding[b, j]`` (bool (batch, seqlen_k), True
    takes part) and the segments agree.  ``shift`` is the absolute position of query 0 minus that of key 0: with a cache
    it is the number of tokens already there.
    """

    batch: int
    seqlen_q: int
    seqlen_k: int
    shift: int
    device: torch.device
    lower: int | None = None
    upper: int | None = None
    padding: Tensor | None = None
    segments: Segments | None = None

    @property
    def causal(self) -> bool:
        """No query sees a key of a later position."""
        return self.upper is not None and self.upper <= self.shift

    def within(self, lower: int | None, upper: int | None) -> MaskPlan:
        """This plan with its band narrowed."""
        lowers = [x for x in (self.lower, lower) if x is not None]
        uppers = [x for x in (self.upper, upper) if x is not None]
        return replace(self, lower=max(lowers, default=None), upper=min(uppers, default=None))

    def split(self, segments: Segments | None) -> MaskPlan:
        """This plan with sequences kept apart as well."""
        return self if segments is None else replace(self, segments=segments.combined(self.segments))

    def dense(self) -> Tensor:
        """The boolean mask (batch, 1, seqlen_q, seqlen_k), True takes part."""
        i = torch.arange(self.seqlen_q, device=self.device)[:, None]
        j = torch.arange(self.seqlen_k, device=self.device)[None, :]
        keep = torch.ones(1, 1, self.seqlen_q, self.seqlen_k, dtype=torch.bool, device=self.device)
        if self.lower is not None:
            keep = keep & (j - i >= self.lower)
        if self.upper is not None:
            keep = keep & (j - i <= self.upper)
        if self.padding is not None:
            keep = keep & self.padding[:, None, None, :]
        if self.segments is not None:
            keep = keep & (self.segments.q[:, None, :, None] == self.segments.k[:, None, None, :])
        return keep.expand(self.batch, 1, self.seqlen_q, self.seqlen_k)

    def to(self, device: torch.device) -> MaskPlan:
        """This plan with its tensors on ``device``."""
        padding = None if self.padding is None else self.padding.to(device)
        segments = None if self.segments is None else Segments(*(x.to(device) for x in self.segments))
        return replace(self, device=device, padding=padding, segments=segments)


class StructuredMask(Tensor):
    """A boolean mask (batch, 1, seqlen_q, seqlen_k) that holds a ``MaskPlan`` and no storage.

    To tilewise's attention it is the plan.  To everybody else it is an ordinary boolean tensor: any operation on it
    (a slice, a ``torch.where``, a ``cat``) first writes the dense mask out, so model code that edits its mask is right.
    """

    plan: MaskPlan
    resolved: list[tuple[tuple[Any, ...], Resolved]]

    @staticmethod
    def __new__(cls, plan: MaskPlan) -> StructuredMask:
        """A tensor of the plan's shape and device."""
        shape = (plan.batch, 1, plan.seqlen_q, plan.seqlen_k)
        mask: StructuredMask = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=plan.device)
        mask.plan = plan
        mask.resolved = []  # what the attention function made of the plan: the layers of one forward share it
        return mask

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Keep the plan through detach, alias and a change of device; write the mask out for anything else."""
        kwargs = kwargs or {}
        aten = torch.ops.aten
        if func in (aten.detach.default, aten.alias.default):
            return cls(args[0].plan)
        if func is aten._to_copy.default and kwargs.get("dtype") in (None, torch.bool):
            return cls(args[0].plan.to(kwargs.get("device") or args[0].device))
        args, kwargs = tree_map(lambda x: x.plan.dense() if isinstance(x, cls) else x, (args, kwargs))
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """The shape and the plan, without writing the mask out."""
        return f"StructuredMask({tuple(self.shape)}, {self.plan})"


def resolve(plan: MaskPlan) -> Resolved:
    """The keys that the band leaves, and ``functional.attention``'s arguments for those keys.

    The band's corner is moved to the bottom right by leaving out keys that no query sees, so a partly filled static
    cache costs only its filled part.
    """
    seqlen_q, stop = plan.seqlen_q, plan.seqlen_k
    if plan.upper is not None:
        stop = max(0, min(stop, seqlen_q + plan.upper))
    first = 0 if plan.lower is None else max(0, min(plan.lower, stop))
    where = slice(first, stop) if (first, stop) != (0, plan.seqlen_k) else slice(None)
    seqlen_k = stop - first
    lower = None if plan.lower is None else plan.lower - first
    upper = None if plan.upper is None else plan.upper - first
    if upper is not None and upper >= seqlen_k - 1:
        upper = None
    if lower is not None and lower <= 1 - seqlen_q:
        lower = None
    corner = seqlen_k - seqlen_q
    left = None if lower is None else corner - lower
    right = None if upper is None else upper - corner
    if (left is not None and left < 0) or (right is not None and right < 0):
        return slice(None), {"mask": plan.dense()}
    causal = right == 0
    pairs: dict[str, Any] = {"causal": causal, "window_size": (left, None if causal else right)}
    if plan.padding is not None:
        row = plan.padding[:, where]
        if not bool(row.all()):
            pairs["mask"] = row[:, None, None, :]
    if plan.segments is not None:
        segments_q = plan.segments.q.expand(plan.batch, -1)
        segments_k = plan.segments.k[:, where].expand(plan.batch, -1)
        pairs["segments"] = (segments_q, segments_k)
    return where, pairs


class _Rule(NamedTuple):
    name: str
    cells: dict[str, Any]


_BANDS = ("all", "causal", "window", "window_both")


def build_mask(
    *,
    batch_size: int,
    kv_length: int,
    q_length: int | None = None,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor:
    """Transformers' mask interface for ``attn_implementation="tilewise"``.

    Returns a ``StructuredMask`` where the mask is made of causal, window, chunk, padding and packed-sequence rules, and
    the dense boolean mask (batch, 1, q_length, kv_length), True takes part, for anything else, while a graph is being
    traced, and for the single query of a step over a static cache (which crosses into a compiled graph, and is O(kv)).
    Never None: whether a mask is causal is said by the mask, not left to a flag of the module.

    ``kwargs`` (dtype, config, local_size and the like) steer other implementations' shortcuts and change no pair.
    """
    masking = sys.modules["transformers.masking_utils"]
    if mask_function is None:
        mask_function = masking.causal_mask_function
    position = kwargs.get("cache_position")  # the older 5.x form of (q_length, q_offset)
    if q_length is None:
        if position is None:
            raise TypeError("build_mask needs q_length or cache_position")
        q_length = int(position.shape[0])
    one_static_step = q_length == 1 and not allow_is_causal_skip
    if not one_static_step and not use_vmap and not _tracing(attention_mask, position, q_offset):
        first = position[0] if position is not None else q_offset
        plan = _read_plan(
            mask_function,
            attention_mask,
            MaskPlan(batch_size, q_length, kv_length, int(first) - int(kv_offset), torch.device(device)),
            int(kv_offset),
        )
        if plan is not None:
            return StructuredMask(plan)
    sizes = {"cache_position": position} if position is not None else {"q_length": q_length, "q_offset": q_offset}
    kwargs.pop("cache_position", None)
    kwargs.pop("allow_is_bidirectional_skip", None)
    dense: Tensor = masking.sdpa_mask(
        batch_size=batch_size,
        kv_length=kv_length,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        use_vmap=use_vmap,
        device=device,
        **sizes,
        **kwargs,
    )
    return dense


def _tracing(*values: Any) -> bool:
    """Whether a graph is being recorded, or some of the tensors have no values to read."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return True
    fake = torch._subclasses.fake_tensor.FakeTensor
    return any(isinstance(x, Tensor) and (x.device.type == "meta" or isinstance(x, fake)) for x in values)


def _read_plan(function: Callable[..., Any], padding: Tensor | None, plan: MaskPlan, kv_offset: int) -> MaskPlan | None:
    """``plan`` with the rules of a mask function and of the 2-D padding mask, or None where one is unknown."""
    rules = _flatten(function)
    if rules is None:
        return None
    if padding is not None:
        rules = [*rules, _Rule("padding", {"padding_mask": padding})]
    for rule in rules:
        step = _add_rule(plan, rule, kv_offset)
        if step is None:
            return None
        plan = step
    return plan


def _add_rule(plan: MaskPlan, rule: _Rule, kv_offset: int) -> MaskPlan | None:
    shift, cell = plan.shift, rule.cells
    if rule.name == "all":
        return plan
    if rule.name == "causal":
        return plan.within(None, shift)
    if rule.name == "window":
        return plan.within(shift - cell["sliding_window"] + 1, None)
    if rule.name == "window_both":
        return plan.within(shift - cell["sliding_window"], shift + cell["sliding_window"])
    if rule.name == "padding":
        return replace(plan, padding=_padding_row(cell["padding_mask"], plan, kv_offset))
    if rule.name == "chunk" and plan.segments is None:
        size, left = cell["chunk_size"], cell["left_padding"].reshape(-1, 1)
        i = torch.arange(plan.seqlen_q, device=plan.device) + (kv_offset + shift)
        j = torch.arange(plan.seqlen_k, device=plan.device) + kv_offset
        return plan.split(Segments((i - left) // size, (j - left) // size))
    square = shift == 0 and kv_offset == 0 and plan.seqlen_q == plan.seqlen_k
    if rule.name == "packed" and square:
        return _add_packed(plan, cell)
    return None


def _add_packed(plan: MaskPlan, cell: dict[str, Any]) -> MaskPlan | None:
    """Sequences kept apart by id, with band rules on positions if there are any.

    Positions that go up by one inside each sequence differ as their indices do, so a band of positions is that band of
    indices.  It is looked up, not assumed, that the ids are those of exactly these runs.
    """
    ids = cell["packed_sequence_mask"]
    if ids.shape[-1] != plan.seqlen_q:
        return None
    if "mask_function" in cell:
        position = cell["position_ids"]
        runs = torch.nn.functional.pad((torch.diff(position, dim=-1) != 1).cumsum(-1), (1, 0))
        inner = _flatten(cell["mask_function"])
        if inner is None or any(r.name not in _BANDS for r in inner) or not torch.equal(runs, ids):
            return None
        for rule in inner:
            step = _add_rule(plan, rule, 0)
            if step is None:
                return None
            plan = step
    return plan.split(Segments(ids, ids))


def _padding_row(padding: Tensor, plan: MaskPlan, kv_offset: int) -> Tensor:
    """The part of the 2-D mask that lies beside the keys; keys past its end (unused cache slots) take no part."""
    row = padding[:, kv_offset : kv_offset + plan.seqlen_k].to(device=plan.device, dtype=torch.bool)
    return torch.nn.functional.pad(row, (0, plan.seqlen_k - row.shape[-1]))


def _flatten(function: Callable[..., Any]) -> list[_Rule] | None:
    """The rules whose conjunction a mask function is, or None."""
    rules: list[_Rule] = []
    for leaf in _leaves(function):
        known = _known_rules().get(getattr(leaf, "__code__", None))
        cells = _cells(leaf)
        if known is None or not known[1].issubset(cells):
            return None
        rules.append(_Rule(known[0], cells))
    remapped = [rule for rule in rules if rule.name == "remap"]
    packed = [rule for rule in rules if rule.name == "packed"]
    if len(remapped) > len(packed) or len(packed) > 1:
        return None
    if remapped:  # one rule of two halves: see _add_packed
        rules = [rule for rule in rules if rule.name not in ("remap", "packed")]
        rules.append(_Rule("packed", {**remapped[0].cells, **packed[0].cells}))
    return rules


def _leaves(function: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    if getattr(function, "__code__", None) is _and_code():
        for part in _cells(function)["mask_functions"]:
            yield from _leaves(part)
    else:
        yield function


def _cells(function: Callable[..., Any]) -> dict[str, Any]:
    code = getattr(function, "__code__", None)
    if code is None:
        return {}
    closure = getattr(function, "__closure__", None) or ()
    return {name: cell.cell_contents for name, cell in zip(code.co_freevars, closure, strict=True)}


@functools.lru_cache(maxsize=1)
def _and_code() -> Any:
    masking = sys.modules["transformers.masking_utils"]
    code = masking.and_masks(masking.causal_mask_function).__code__
    return code if code.co_freevars == ("mask_functions",) else object()


@functools.lru_cache(maxsize=1)
def _known_rules() -> dict[Any, tuple[str, frozenset[str]]]:
    """Code object -> (rule, the closure variables it needs), for every function of Transformers that means what we say.

    Each is tried on a small grid first: one that another version of Transformers defines otherwise, or lacks, is left
    out, and masks made of it are dense.
    """
    masking = sys.modules["transformers.masking_utils"]
    position = torch.tensor([[0, 1, 2, 0, 1, 2]])
    ids = torch.tensor([[0, 0, 0, 1, 1, 1]])
    left = torch.tensor([1])
    i, j = torch.arange(6)[:, None], torch.arange(6)[None, :]
    causal = j <= i
    trials: list[tuple[str, str, tuple[Any, ...], tuple[str, ...], Tensor]] = [
        ("causal", "causal_mask_function", (), (), causal),
        ("all", "bidirectional_mask_function", (), (), torch.ones(6, 6, dtype=torch.bool)),
        ("window", "sliding_window_overlay", (3,), ("sliding_window",), j - i >= -2),
        ("window_both", "sliding_window_bidirectional_overlay", (2,), ("sliding_window",), (i - j).abs() <= 2),
        ("padding", "padding_mask_function", (ids > 0,), ("padding_mask",), (ids > 0).expand(6, 6)),
        ("packed", "packed_sequence_mask_function", (ids,), ("packed_sequence_mask",), ids.mT == ids),
        ("chunk", "chunked_overlay", (2, left), ("chunk_size", "left_padding"), (i - 1) // 2 == (j - 1) // 2),
        (
            "remap",
            "remap_positions_for_packed_sequence",
            (masking.causal_mask_function, position),
            ("mask_function", "position_ids"),
            position <= position.mT,
        ),
    ]
    known: dict[Any, tuple[str, frozenset[str]]] = {}
    zero = torch.zeros(1, 1, dtype=torch.long)
    for name, attribute, arguments, cells, expected in trials:
        factory = getattr(masking, attribute, None)
        if factory is None:
            continue
        function = factory(*arguments) if arguments else factory
        try:
            means = torch.broadcast_to(function(zero, zero, i, j), (6, 6))
        except (TypeError, ValueError, IndexError, RuntimeError):
            continue
        if torch.equal(means, expected):
            known[function.__code__] = (name, frozenset(cells))
    return known
