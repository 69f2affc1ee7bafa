"""A small run of GPU rooms, for scripts/sanitize.sh: forward and backward, dense and packed, at ragged sizes.

python tests/gpu/sanitized.py [NAME ...]
"""

from __future__ import annotations

import sys

import torch

import tilewise
from tests.rooms import ON_CUDA, absence

BF16 = torch.bfloat16


def _draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=BF16, requires_grad=True)


def run(backend: str) -> None:
    """Forward and backward, once dense and once packed."""
    tensors = [_draw(1, 70, 2, 64), *(_draw(1, 130, 1, 64) for _ in range(2))]
    out = tilewise.attention(*tensors, causal=True, backend=backend)
    torch.autograd.grad(out, tensors, torch.ones_like(out))
    offsets = torch.tensor([0, 70, 70, 199], dtype=torch.int32, device="cuda")
    tensors = [_draw(205, heads, 64) for heads in (2, 1, 1)]
    out = tilewise.attention_varlen(*tensors, cu_seqlens_q=offsets, max_seqlen=129, causal=True, backend=backend)
    torch.autograd.grad(out, tensors, torch.ones_like(out))
    torch.cuda.synchronize()
    assert bool(out.isfinite().all())


if __name__ == "__main__":
    torch.manual_seed(0)
    for name in sys.argv[1:] or ON_CUDA:
        print(f"{name}: {absence(name) or 'running'}", flush=True)
        if not absence(name):
            run(name)
