"""A small run of GPU rooms, for scripts/sanitize.sh: forward and backward, dense and packed, at ragged sizes.

python tests/gpu/sanitized.py [NAME ...]
"""

from __future__ import annotations

import sys
import time

import torch

import tilewise
from tests.rooms import ON_CUDA, absence

BF16 = torch.bfloat16


def _draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=BF16, requires_grad=True)


def _differentiate(out: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    torch.autograd.grad(out, tensors, torch.ones_like(out))
    torch.cuda.synchronize()
    assert bool(out.isfinite().all())


def run(backend: str) -> None:
    """Forward and backward: dense, packed, of documents by segments, and what only one of the backends takes."""
    tensors = [_draw(1, 70, 2, 64), *(_draw(1, 130, 1, 64) for _ in range(2))]
    _differentiate(tilewise.attention(*tensors, causal=True, backend=backend), tensors)

    offsets = torch.tensor([0, 70, 70, 199], dtype=torch.int32, device="cuda")
    packed = [_draw(205, heads, 64) for heads in (2, 1, 1)]
    out = tilewise.attention_varlen(*packed, cu_seqlens_q=offsets, max_seqlen=129, causal=True, backend=backend)
    _differentiate(out, packed)

    documents = torch.arange(130, device="cuda")[None] // 45
    slopes = torch.full((2,), 0.1, device="cuda", requires_grad=True)
    out = tilewise.attention(
        *tensors, causal=True, segments=(documents[:, 60:], documents), alibi_slopes=slopes, backend=backend
    )
    _differentiate(out, [*tensors, slopes])

    if backend == "triton":
        bias = torch.randn(1, 2, 70, 130, device="cuda", dtype=BF16, requires_grad=True)
        mask = torch.rand(1, 1, 70, 130, device="cuda") < 0.7
        mask[..., 0] = True
        out = tilewise.attention(*tensors, bias=bias, mask=mask, dropout_p=0.1, dropout_seed=1, backend=backend)
        _differentiate(out, [*tensors, bias])
    else:
        numbers = [tensor.detach().to(torch.float8_e4m3fn) for tensor in tensors]
        assert bool(tilewise.attention(*numbers, causal=True, backend=backend).isfinite().all())


def await_autograd() -> None:
    """Give autograd's thread time to let go of the tensors of the gradients.

    It does so after the gradients are there, and needs Python's lock for it. A thread that asks for that lock while the
    interpreter ends takes the process with it ("terminate called without an active exception", PyTorch's issue 38230),
    which happened on loaded machines, and there to programs of torch alone too.
    """
    time.sleep(0.5)


if __name__ == "__main__":
    torch.manual_seed(0)
    for name in sys.argv[1:] or ON_CUDA:
        print(f"{name}: {absence(name) or 'running'}", flush=True)
        if not absence(name):
            run(name)
    await_autograd()
