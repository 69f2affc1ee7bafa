"""What is measured: problems with names."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from tilewise.descale import FP8
from tilewise.iomodel import flops
from tilewise.masks import Band, kept_pairs
from tilewise.problem import DTYPE_NAMES

_FLOPS = {"forward": flops.forward, "backward": flops.backward}


@dataclass(frozen=True, slots=True)
class Case:
    """One attention problem; ``window`` counts the keys a query sees, itself included, and is causal.

    ``lengths`` packs sequences, whose sum is ``seqlen``, one after the other; ``batch`` is then 1. ``seqlen_k`` is the
    number of keys where it is not ``seqlen``. ``bias`` is dense, (nheads, seqlen, seqlen), and has a gradient.
    """

    batch: int
    seqlen: int
    nheads: int
    headdim: int
    nheads_k: int | None = None
    causal: bool = False
    window: int | None = None
    dtype: torch.dtype = torch.float32
    headdim_v: int | None = None
    seqlen_k: int | None = None
    lengths: tuple[int, ...] | None = None
    bias: bool = False

    @property
    def name(self) -> str:
        """For tables and records: "fp32 (1, 4096, 8, 64) causal"."""
        heads = f"{self.nheads}" if self.nheads_k is None else f"{self.nheads}/{self.nheads_k}"
        seqlen = f"{self.seqlen}" if self.seqlen_k is None else f"{self.seqlen}/{self.seqlen_k}"
        headdim = f"{self.headdim}" if self.headdim_v is None else f"{self.headdim}/{self.headdim_v}"
        lead = f"{self.batch}, {seqlen}" if self.lengths is None else seqlen
        words = [DTYPE_NAMES[self.dtype], f"({lead}, {heads}, {headdim})"]
        if self.lengths is not None:
            words.append(f"packed {len(self.lengths)}")
        if self.window is not None:
            words.append(f"window {self.window}")
        elif self.causal:
            words.append("causal")
        if self.bias:
            words.append("bias")
        return " ".join(words)

    @property
    def keys(self) -> int:
        """seqlen_k."""
        return self.seqlen if self.seqlen_k is None else self.seqlen_k

    @property
    def values(self) -> int:
        """headdim_v."""
        return self.headdim if self.headdim_v is None else self.headdim_v

    @property
    def band(self) -> Band:
        """The limits on j - i, for i and j counted from the first row and key."""
        offset = self.keys - self.seqlen
        lower = None if self.window is None else offset + 1 - self.window
        return Band(lower, offset if self.causal or self.window else None)

    def flops(self, what: str) -> int:
        """FLOPs of the kept pairs: "forward", "backward", or both."""
        if self.lengths is None:
            pairs = self.batch * kept_pairs(self.band, self.seqlen, self.keys)
        else:
            pairs = sum(kept_pairs(self.band, length, length) for length in self.lengths)
        sizes = (pairs * self.nheads, self.headdim, self.values)
        return sum(count(*sizes) for name, count in _FLOPS.items() if name in what)

    @property
    def window_size(self) -> tuple[int | None, int | None]:
        """The window as ``attention`` takes it."""
        return (None, None) if self.window is None else (self.window - 1, 0)

    def tensors(self, device: str = "cpu", seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Random q, k, v, which require grad where their dtype has one."""
        generator = torch.Generator(device).manual_seed(seed)
        heads_k = self.nheads_k or self.nheads

        def draw(seqlen: int, heads: int, headdim: int) -> torch.Tensor:
            lead = (self.batch, seqlen) if self.lengths is None else (seqlen,)
            shape = (*lead, heads, headdim)
            tensor = torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(self.dtype)
            return tensor if self.dtype == FP8 else tensor.requires_grad_()

        return (
            draw(self.seqlen, self.nheads, self.headdim),
            draw(self.keys, heads_k, self.headdim),
            draw(self.keys, heads_k, self.values),
        )

    def options(self, device: str = "cpu", seed: int = 1) -> dict[str, Any]:
        """The other arguments of ``attention``, or of ``attention_varlen`` where sequences are packed."""
        options: dict[str, Any] = {"causal": self.causal, "window_size": self.window_size}
        if self.lengths is not None:
            offsets = torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32, device=device)
            options |= {"cu_seqlens_q": offsets, "max_seqlen": max(self.lengths)}
        if self.bias:
            generator = torch.Generator(device).manual_seed(seed)
            shape = (self.nheads, self.seqlen, self.keys)
            options["bias"] = torch.randn(shape, generator=generator, device=device, dtype=self.dtype).requires_grad_()
        return options


# every kind of problem torch's CPU flash kernel runs: long and short, wide and narrow, grouped, half precision
SDPA_CASES = (
    Case(1, 4096, 8, 64),
    Case(1, 4096, 8, 64, causal=True),
    Case(1, 4096, 8, 128),
    Case(1, 4096, 8, 128, causal=True),
    Case(4, 512, 12, 64),
    Case(4, 512, 12, 64, causal=True),
    Case(16, 64, 12, 64),
    Case(1, 2048, 32, 64, nheads_k=8, causal=True),
    Case(1, 2048, 8, 64, causal=True, dtype=torch.bfloat16),
    Case(1, 2048, 8, 64, dtype=torch.float16),
)
CPU_CASES = SDPA_CASES[:4]
WINDOW_CASE = Case(1, 8192, 8, 64, window=512)
MEMORY_CASE = Case(1, 16384, 8, 64, causal=True)
HOST_CASE = Case(1, 16, 2, 16)
