"""What is measured: problems with names."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tilewise.problem import DTYPE_NAMES


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
