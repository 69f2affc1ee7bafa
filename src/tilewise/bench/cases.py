"""What is measured: problems with names."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tilewise.iomodel import flops
from tilewise.masks import Band, kept_pairs
from tilewise.problem import DTYPE_NAMES

_FLOPS = {"forward": flops.forward, "backward": flops.backward}


@dataclass(frozen=True, slots=True)
class Case:
    """One attention problem; ``window`` counts the keys a query sees, itself included, and is causal."""

    batch: int
    seqlen: int
    nheads: int
    headdim: int
    nheads_k: int | None = None
    causal: bool = False
    window: int | None = None
    dtype: torch.dtype = torch.float32

    @property
    def name(self) -> str:
        """For tables and records: "fp32 (1, 4096, 8, 64) causal"."""
        heads = f"{self.nheads}" if self.nheads_k is None else f"{self.nheads}/{self.nheads_k}"
        words = [DTYPE_NAMES[self.dtype], f"({self.batch}, {self.seqlen}, {heads}, {self.headdim})"]
        if self.window is not None:
            words.append(f"window {self.window}")
        elif self.causal:
            words.append("causal")
        return " ".join(words)

    def flops(self, what: str) -> int:
        """FLOPs of the kept pairs: "forward", "backward", or both."""
        limits = Band(None if self.window is None else 1 - self.window, 0 if self.causal or self.window else None)
        pairs = self.batch * self.nheads * kept_pairs(limits, self.seqlen, self.seqlen)
        sizes = (pairs, self.headdim, self.headdim)
        return sum(count(*sizes) for name, count in _FLOPS.items() if name in what)

    @property
    def window_size(self) -> tuple[int | None, int | None]:
        """The window as ``attention`` takes it."""
        return (None, None) if self.window is None else (self.window - 1, 0)

    def tensors(self, device: str = "cpu", seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Random q, k, v, which require grad."""
        generator = torch.Generator(device).manual_seed(seed)
        heads_k = self.nheads_k or self.nheads

        def draw(heads: int) -> torch.Tensor:
            shape = (self.batch, self.seqlen, heads, self.headdim)
            tensor = torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(self.dtype)
            return tensor.requires_grad_()

        return draw(self.nheads), draw(heads_k), draw(heads_k)


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


def _gpu_cases() -> tuple[Case, ...]:
    """bf16, 16k to 1k tokens at a constant total, heads of 64, 128 and 256 with a constant width, grouped heads."""
    cases = []
    for headdim, nheads in ((64, 32), (128, 16), (256, 8)):
        for batch, seqlen in ((1, 16384), (4, 4096), (16, 1024)):
            cases += [
                Case(batch, seqlen, nheads, headdim, causal=causal, dtype=torch.bfloat16) for causal in (False, True)
            ]
    cases += [Case(2, 8192, 32, 128, nheads_k=8, causal=causal, dtype=torch.bfloat16) for causal in (False, True)]
    return tuple(cases)


GPU_CASES = _gpu_cases()
GPU_WINDOW_CASES = tuple(Case(1, 16384, 16, 128, window=width, dtype=torch.bfloat16) for width in (128, 1024, 4096))
GPU_HOST_CASE = Case(1, 128, 8, 64, dtype=torch.bfloat16)
