"""The backward pass without stored probabilities: P is recomputed, block by block, from q, k and lse.

    P = exp(s - lse)                     delta = rowsum(dout * out) - dlse       (one number a row)
    dv = P^T dout    dp = dout v^T       ds = P * (dp - delta)
    dq = scale * ds k                    dk = scale * ds^T q

rowsum(dout * out) equals rowsum(P * dp), which is what softmax's derivative subtracts: out is there already, P need
not be. Saved for backward: lse and out instead of P and out. Run: ``python -m tilewise.textbook.recomputation``.
"""

from __future__ import annotations

import torch

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """q (nheads, seqlen_q, headdim), k, v (nheads, seqlen_k, ...) -> out like q, and lse (nheads, seqlen_q)."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp() @ v, lse


def backward(
    qkv: Tensors, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor, block: int = 64
) -> Tensors:
    """(dq, dk, dv) over blocks of keys; no tensor has more than seqlen_q * block elements a head."""
    q, k, v = qkv
    scale = q.shape[-1] ** -0.5
    delta = (dout * out).sum(-1) - dlse
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for start in range(0, k.shape[1], block):
        keys = slice(start, start + block)
        p = (q @ k[:, keys].mT * scale - lse[..., None]).exp()
        ds = p * (dout @ v[:, keys].mT - delta[..., None])
        dv[:, keys] = p.mT @ dout
        dk[:, keys] = scale * ds.mT @ q
        dq += scale * ds @ k[:, keys]
    return dq, dk, dv


def saved_bytes(nheads: int, seqlen: int, headdim: int, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes kept for backward beside q, k and v: (P and out, lse and out); lse is fp32."""
    out = nheads * seqlen * headdim * dtype.itemsize
    return nheads * seqlen * seqlen * dtype.itemsize + out, nheads * seqlen * 4 + out


def errors(nheads: int = 2, seqlen: int = 96, headdim: int = 16) -> dict[str, float]:
    """Largest difference from autograd in fp64, with a loss on out and on lse."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(nheads, seqlen, headdim, dtype=torch.float64, requires_grad=True) for _ in range(3))
    out, lse = forward(q, k, v)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    expected = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))
    with torch.no_grad():
        found = backward((q, k, v), out, lse, dout, dlse)
    differences = [float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)]
    return dict(zip(("dq", "dk", "dv"), differences, strict=True))


def main() -> None:
    """Print the differences from autograd, and the bytes saved for backward at growing lengths."""
    print("largest difference from autograd, fp64, loss on out and lse")
    for name, error in errors().items():
        print(f"  {name} {error:.1e}")
    print("bytes saved for backward, 32 heads of 128, bfloat16")
    print(f"  {'seqlen':>7} {'P and out':>16} {'lse and out':>14} {'ratio':>8}")
    for seqlen in (1024, 2048, 4096, 8192, 16384):
        stored, recomputed = saved_bytes(32, seqlen, 128, torch.bfloat16)
        print(f"  {seqlen:>7} {stored:>16,} {recomputed:>14,} {stored / recomputed:>8.1f}")


if __name__ == "__main__":
    main()
