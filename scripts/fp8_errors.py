"""The table of fp8's errors: descales by tensor, head and block, with and without a rotation, as Markdown.

python -m scripts.fp8_errors [BACKEND ...]

An error is the mean over queries of |out - exact| / |exact|, where exact is fp64 of the unquantised tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

from tilewise import attention, quantize_fp8
from tilewise.testing.oracle import attention_oracle

SEQLEN, NHEADS, HEADDIM = 1024, 4, 128
OPTIONS: dict[str, dict[str, object]] = {
    "by tensor": {"scales": "tensor"},
    "by head": {"scales": "head"},
    "by block": {"scales": "block"},
    "by head, rotated": {"scales": "head", "rotation_seed": 0},
    "by block, rotated": {"scales": "block", "rotation_seed": 0},
}


def inputs() -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Name and q, k, v (1, SEQLEN, NHEADS, HEADDIM) in fp32 of every case."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, SEQLEN, NHEADS, HEADDIM)
    q, k, v = (torch.randn(shape, generator=generator) for _ in range(3))
    yield "normal numbers", [q, k, v]
    scattered = []
    for tensor in (q, k, v):
        some = torch.rand(shape, generator=generator) < 0.001
        scattered.append(tensor + 10 * torch.randn(shape, generator=generator) * some)
    yield "one in 1000 ten times as large", scattered
    channel = torch.arange(HEADDIM)
    yield "one channel 30 times as large", [q * (1 + 29 * (channel == 3)), k * (1 + 29 * (channel == 7)), v]
    growing = torch.logspace(-8, 0, SEQLEN)[:, None, None]
    yield "v growing from 1e-8 to 1", [q, k, v * growing]
    yield "k and v growing from 1e-8 to 1", [q, k * growing, v * growing]


def error(backend: str, tensors: list[torch.Tensor], exact: torch.Tensor, options: dict[str, object]) -> float:
    """Of one way to quantise."""
    device = "cpu" if backend in ("cpu", "reference") else "cuda"
    x = quantize_fp8(*(t.to(device) for t in tensors), **options)  # type: ignore[arg-type]
    out = attention(x.q, x.k, x.v, causal=True, backend=backend, **x.keywords()).cpu().double()
    return float(((out - exact).norm(dim=-1) / exact.norm(dim=-1)).mean())


def main() -> None:
    """Print a table for every backend named."""
    for backend in sys.argv[1:] or ["cpu"]:
        print("|", " | ".join((f"inputs ({backend})", *OPTIONS)), "|")
        print("|", " | ".join(("---", *("---:" for _ in OPTIONS))), "|")
        for name, tensors in inputs():
            exact, _ = attention_oracle(*(t.double() for t in tensors), dtype=torch.float64, causal=True)
            errors = [error(backend, tensors, exact, options) for options in OPTIONS.values()]
            print("|", " | ".join((name, *(f"{e:.3f}" for e in errors))), "|", flush=True)


if __name__ == "__main__":
    main()
