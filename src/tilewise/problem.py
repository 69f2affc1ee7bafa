"""The facts of one attention call, without its tensors: what dispatch, masks and cost models reason about."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch

from tilewise.descale import FP8, out_dtype

GRAD_NAMES = ("q", "k", "v", "bias", "alibi_slopes", "sink")
SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # that fp32 may apply to -inf: a smaller one can be 0 there, and NaN
DERIVATIVES = ("forward", "backward", "jvp", "second")
DTYPE_NAMES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", FP8: "fp8"}


@dataclass(frozen=True, slots=True)
class Problem:
    """Sizes, dtypes, mask and score fields of a call; hashable, so that choices can be cached.

    In the packed form (``varlen``) ``batch`` is the number of sequences, ``seqlen_q`` and ``seqlen_k`` are upper
    bounds of their lengths, and ``total_q``, ``total_k`` count tokens, those beyond the last offset included.
    ``needs_grad`` names the tensors a gradient will be asked for; ``derivative`` says which function of the
    calculus is to run: "forward", "backward", "jvp" (forward mode) or "second" (the gradient of jvp). ``descales``
    names the fp8 tensors that come with a descale, ``block_descales`` those with one for each block of rows.
    """

    batch: int
    seqlen_q: int
    seqlen_k: int
    nheads: int
    nheads_k: int
    headdim: int
    headdim_v: int
    dtype: torch.dtype = torch.float32
    device_type: str = "cpu"
    causal: str | None = None
    window_left: int | None = None
    window_right: int | None = None
    segments: bool = False
    mask_shape: tuple[int, ...] | None = None
    bias_shape: tuple[int, ...] | None = None
    bias_dtype: torch.dtype | None = None
    alibi: bool = False
    sink: bool = False
    softmax_scale: float = 1.0
    softcap: float = 0.0
    dropout_p: float = 0.0
    varlen: bool = False
    total_q: int = 0
    total_k: int = 0
    needs_grad: tuple[str, ...] = ()
    deterministic: bool = False
    derivative: str = "forward"
    inner_contiguous: bool = True
    descales: tuple[str, ...] = ()
    block_descales: tuple[str, ...] = ()
    _hash: int = field(default=0, init=False, repr=False, compare=False)

    def __hash__(self) -> int:
        if not self._hash:  # a choice is looked up by its problem on every call, so the number is kept
            values = tuple(getattr(self, f.name) for f in dataclasses.fields(self) if f.compare)
            object.__setattr__(self, "_hash", hash(values) or 1)
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        # without the number: strings hash otherwise in the process that reads it
        return type(self), tuple(getattr(self, f.name) for f in dataclasses.fields(self) if f.init)

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.nheads // self.nheads_k if self.nheads_k else 1

    @property
    def is_empty(self) -> bool:
        """Whether there is no pair to compute: some size is 0."""
        rows = self.total_q if self.varlen else self.batch * self.seqlen_q
        keys = self.total_k if self.varlen else self.seqlen_k
        return rows == 0 or keys == 0 or self.nheads == 0 or self.batch == 0

    @property
    def banded(self) -> bool:
        """Whether causal or a window cuts the score matrix to a diagonal band."""
        return self.causal is not None or self.window_left is not None or self.window_right is not None

    @property
    def state_dtype(self) -> torch.dtype:
        """dtype of scores, softmax state, lse and accumulators: fp64 for fp64 inputs, else fp32."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def out_dtype(self) -> torch.dtype:
        """dtype of out: the inputs', bf16 for fp8 inputs."""
        return out_dtype(self.dtype)

    def replace(self, **changes: object) -> Problem:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    def describe(self) -> str:
        """One line: shapes, dtype, every feature that is on, gradient, device."""
        if self.varlen:
            sizes = [
                f"q ({self.total_q}, {self.nheads}, {self.headdim}) {DTYPE_NAMES.get(self.dtype, self.dtype)}",
                f"k ({self.total_k}, {self.nheads_k}, {self.headdim})",
                f"v ({self.total_k}, {self.nheads_k}, {self.headdim_v})",
                f"{self.batch} sequences",
            ]
        else:
            sizes = [
                f"q ({self.batch}, {self.seqlen_q}, {self.nheads}, {self.headdim}) "
                f"{DTYPE_NAMES.get(self.dtype, self.dtype)}",
                f"k ({self.batch}, {self.seqlen_k}, {self.nheads_k}, {self.headdim})",
                f"v ({self.batch}, {self.seqlen_k}, {self.nheads_k}, {self.headdim_v})",
            ]
        return " | ".join([*sizes, *self.features(), self.device_type])

    def features(self) -> list[str]:
        """The options that are on, in words."""
        words = []
        if self.causal:
            words.append("causal" if self.causal == "bottom_right" else "causal top_left")
        if self.window_left is not None or self.window_right is not None:
            words.append(f"window ({self.window_left}, {self.window_right})")
        if self.segments:
            words.append("segments")
        if self.mask_shape is not None:
            words.append(f"mask {self.mask_shape}")
        if self.bias_shape is not None:
            words.append(f"bias {self.bias_shape}")
        if self.alibi:
            words.append("alibi")
        if self.sink:
            words.append("sink")
        if self.descales:
            words.append("descale " + ", ".join(self.descales))
        if self.block_descales:
            words.append("by block " + ", ".join(self.block_descales))
        if self.softcap:
            words.append(f"softcap {self.softcap:g}")
        if self.dropout_p:
            words.append(f"dropout {self.dropout_p:g}")
        if self.needs_grad:
            words.append("grad " + ", ".join(self.needs_grad))
        if self.derivative in ("jvp", "second"):
            words.append(self.derivative)
        if self.deterministic:
            words.append("deterministic")
        return words
