"""A problem as the command line and JSON give it, and the tensors without memory that stand for it."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tilewise.descale import FP8
from tilewise.errors import InvalidInput

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DTYPES["fp8"] = FP8
DTYPES.update({str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()})
GRADS = ("q", "k", "v", "bias", "alibi_slopes", "sink")
CAUSAL = (False, True, "bottom_right", "top_left")


def _integers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def _bound(text: str) -> int | None:
    return None if text.lower() in ("none", "open") else int(text)


@dataclass(frozen=True)
class Field:
    """One field of a problem: its option, and what its value must be in JSON."""

    name: str
    help: str
    valid: Callable[[Any], bool]
    must: str
    option: dict[str, Any]

    def add(self, parser: argparse.ArgumentParser) -> None:
        """Add the option."""
        parser.add_argument("--" + self.name.replace("_", "-"), help=self.help, default=None, **self.option)

    def check(self, value: Any) -> Any:
        """``value`` if it may be; InvalidInput otherwise."""
        if not self.valid(value):
            raise InvalidInput(f"{self.name}: is {value!r}, must be {self.must}")
        return value


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_window(value: Any) -> bool:
    return (
        isinstance(value, (list, tuple)) and len(value) == 2 and all(side is None or _is_count(side) for side in value)
    )


def _is_counts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_count, value))


def _count(name: str, text: str) -> Field:
    return Field(name, text, _is_count, "an integer of 0 or more, below 2**63", {"type": int, "metavar": "N"})


def _number(name: str, text: str) -> Field:
    return Field(name, text, _is_number, "a number", {"type": float, "metavar": "X"})


def _flag(name: str, text: str) -> Field:
    return Field(name, text, lambda value: isinstance(value, bool), "true or false", {"action": "store_true"})


def _counts(name: str, text: str) -> Field:
    return Field(
        name,
        text,
        _is_counts,
        "a list of integers of 0 or more, below 2**63",
        {"type": _integers, "metavar": "N,N,..."},
    )


_ALL = (
    _count("batch", "batch size (1)"),
    _count("seqlen_q", "queries (4096)"),
    _count("seqlen_k", "keys (as many as queries)"),
    _count("nheads", "query heads (8)"),
    _count("nheads_k", "key and value heads (as many as query heads)"),
    _count("headdim", "channels of q and k (64)"),
    _count("headdim_v", "channels of v (as many as headdim)"),
    Field(
        "dtype",
        "fp32",
        lambda value: isinstance(value, str) and value in DTYPES,
        f"one of {', '.join(DTYPES)}",
        {"choices": list(DTYPES)},
    ),
    Field(
        "causal",
        "bottom_right (also where no corner is named) or top_left",
        lambda value: value in CAUSAL,
        "true, false, bottom_right or top_left",
        {"nargs": "?", "const": True, "choices": CAUSAL[2:]},
    ),
    Field(
        "window_size",
        "keys to the left and right of the query's own; none is open",
        _is_window,
        "[left, right], each an integer of 0 or more below 2**63, or null",
        {"nargs": 2, "type": _bound, "metavar": ("LEFT", "RIGHT")},
    ),
    _flag("segments", "packed documents: segment ids for both sides"),
    _counts("mask", "shape of a boolean mask, broadcastable to batch,nheads,seqlen_q,seqlen_k"),
    _counts("bias", "shape of an additive bias, broadcastable likewise"),
    _flag("alibi_slopes", "one slope a head"),
    _flag("sink", "one sink a head"),
    _number("softcap", "cap of the scores (0: none)"),
    _number("dropout_p", "dropout probability (0)"),
    _number("softmax_scale", "factor of the scores (headdim ** -0.5)"),
    _flag("deterministic", "bitwise equal from run to run"),
    Field(
        "grad",
        f"which of {','.join(GRADS)} require gradients",
        lambda value: isinstance(value, list) and all(name in GRADS for name in value),
        f"a list of names among {', '.join(GRADS)}",
        {"type": lambda text: text.split(","), "metavar": "NAME,..."},
    ),
    _counts("cu_seqlens_q", "offsets of packed sequences, 0 first; then q, k, v have no batch"),
    _counts("cu_seqlens_k", "offsets of the keys' sequences (the queries')"),
    Field("backend", "auto or a backend's name", lambda value: isinstance(value, str), "a name", {"metavar": "NAME"}),
)
FIELDS = {field.name: field for field in _ALL}
# Fields that go to explain as they are.
PLAIN = ("causal", "softcap", "dropout_p", "softmax_scale", "deterministic", "backend")


def _refuse_without_effect(options: dict[str, Any]) -> None:
    if options.get("cu_seqlens_q") is not None:
        for name in ("batch", "segments", "mask", "bias"):
            if options.get(name):
                raise InvalidInput(
                    f"{name}: is {options[name]!r}, must be absent where cu_seqlens_q packs the sequences"
                )
    elif options.get("cu_seqlens_k") is not None:
        raise InvalidInput("cu_seqlens_k: is given, must be absent without cu_seqlens_q")
    for name in ("bias", "alibi_slopes", "sink"):
        if name in options.get("grad", ()) and not options.get(name):
            raise InvalidInput(f"grad: has {name}, must name only what is there: give {name} too")


@dataclass(frozen=True)
class Shapes:
    """A problem's sizes and options; ``options`` holds those that were given."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    nheads: int
    nheads_k: int
    headdim: int
    headdim_v: int
    dtype: torch.dtype
    cu_seqlens_q: list[int] | None
    options: dict[str, Any]

    @classmethod
    def read(cls, given: dict[str, Any]) -> Shapes:
        """Check every field; InvalidInput names the one that is unknown or wrong."""
        if unknown := sorted(set(given) - set(FIELDS)):
            raise InvalidInput(f"{', '.join(unknown)}: no such field; the fields are {', '.join(FIELDS)}")
        options = {name: FIELDS[name].check(value) for name, value in given.items()}
        _refuse_without_effect(options)
        offsets = options.get("cu_seqlens_q")
        seqlen_q = options.get("seqlen_q", offsets[-1] if offsets else 4096)
        offsets_k = options.get("cu_seqlens_k")
        nheads, headdim = options.get("nheads", 8), options.get("headdim", 64)
        return cls(
            batch=options.get("batch", 1),
            seqlen_q=seqlen_q,
            seqlen_k=options.get("seqlen_k", offsets_k[-1] if offsets_k else seqlen_q),
            nheads=nheads,
            nheads_k=options.get("nheads_k", nheads),
            headdim=headdim,
            headdim_v=options.get("headdim_v", headdim),
            dtype=DTYPES[options.get("dtype", "fp32")],
            cu_seqlens_q=offsets,
            options=options,
        )

    def _empty(self, name: str, *shape: int) -> torch.Tensor:
        if math.prod(shape) * self.dtype.itemsize >= 2**63:
            raise InvalidInput(f"{name}: has shape {shape}, must take fewer than 2**63 bytes")
        wanted = name in self.options.get("grad", ())
        if self.cu_seqlens_q is None:
            return torch.empty(shape, dtype=self.dtype, device="meta", requires_grad=wanted)
        # Packed offsets are numbers on the CPU, and q, k, v must be where they are: one row of memory stands for all.
        return torch.empty(shape[-1], dtype=self.dtype).expand(shape).requires_grad_(wanted)

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of ``tilewise.explain``, or of ``explain_varlen`` with cu_seqlens_q."""
        lead = (self.batch,) if self.cu_seqlens_q is None else ()
        found: dict[str, Any] = {
            "q": self._empty("q", *lead, self.seqlen_q, self.nheads, self.headdim),
            "k": self._empty("k", *lead, self.seqlen_k, self.nheads_k, self.headdim),
            "v": self._empty("v", *lead, self.seqlen_k, self.nheads_k, self.headdim_v),
            **{name: self.options[name] for name in PLAIN if name in self.options},
        }
        if "window_size" in self.options:
            found["window_size"] = tuple(self.options["window_size"])
        for name in ("alibi_slopes", "sink"):
            if self.options.get(name):
                found[name] = self._empty(name, self.nheads)
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            if name in self.options:
                found[name] = torch.tensor(self.options[name], dtype=torch.int64)
        if "mask" in self.options:
            found["mask"] = torch.empty(self.options["mask"], dtype=torch.bool, device="meta")
        if "bias" in self.options:
            found["bias"] = self._empty("bias", *self.options["bias"])
        if self.options.get("segments"):
            sides = (self.seqlen_q, self.seqlen_k)
            found["segments"] = tuple(torch.empty(self.batch, n, dtype=torch.int32, device="meta") for n in sides)
        return found
