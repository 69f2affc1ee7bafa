"""Attention as three passes over slow memory, with every byte that moves counted.

    S = scale * q k^T       reads q, k     writes S
    P = softmax(S)          reads S        writes P
    out = P v               reads P, v     writes out

S and P have seqlen_q * seqlen_k elements a head: they are what tiled attention never stores. Run:
``python -m tilewise.textbook.materialising``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass
class SlowMemory:
    """Counts bytes as a pass reads and writes tensors; ``passes`` maps a pass to [read, written]."""

    passes: dict[str, list[int]] = field(default_factory=dict)

    def read(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Hand ``tensor`` to the pass ``name``."""
        self.passes.setdefault(name, [0, 0])[0] += tensor.numel() * tensor.element_size()
        return tensor

    def write(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Take ``tensor`` from the pass ``name``."""
        self.passes.setdefault(name, [0, 0])[1] += tensor.numel() * tensor.element_size()
        return tensor


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False, memory: SlowMemory | None = None
) -> torch.Tensor:
    """q (batch, seqlen_q, nheads, headdim), k and v (batch, seqlen_k, nheads, ...); out like q, headdim_v wide.

    ``causal`` is bottom-right: key j is seen by query i iff j <= i + seqlen_k - seqlen_q. A row without keys is 0.
    """
    memory = SlowMemory() if memory is None else memory
    scale = q.shape[-1] ** -0.5
    scores = (
        torch.einsum("bihd,bjhd->bhij", memory.read("S = scale q k^T", q), memory.read("S = scale q k^T", k)) * scale
    )
    if causal:
        corner = k.shape[1] - q.shape[1]
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril(corner)
        scores = scores.masked_fill(~seen, -torch.inf)
    scores = memory.read("P = softmax(S)", memory.write("S = scale q k^T", scores))
    row_max = scores.amax(-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).min)
    weights = (scores - row_max).exp()
    weights = memory.write(
        "P = softmax(S)", weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(q.dtype).tiny)
    )
    out = torch.einsum("bhij,bjhd->bihd", memory.read("out = P v", weights), memory.read("out = P v", v))
    return memory.write("out = P v", out)


def score_bytes(batch: int, nheads: int, seqlen_q: int, seqlen_k: int, dtype: torch.dtype) -> int:
    """Bytes of S, and again of P."""
    return batch * nheads * seqlen_q * seqlen_k * dtype.itemsize


def expected_passes(
    batch: int, nheads: int, seqlen_q: int, seqlen_k: int, headdim: int, dtype: torch.dtype
) -> dict[str, list[int]]:
    """What ``SlowMemory`` counts, in closed form, for headdim_v = headdim."""
    scores = score_bytes(batch, nheads, seqlen_q, seqlen_k, dtype)
    row, column = (batch * nheads * seqlen * headdim * dtype.itemsize for seqlen in (seqlen_q, seqlen_k))
    return {
        "S = scale q k^T": [row + column, scores],
        "P = softmax(S)": [scores, scores],
        "out = P v": [scores + column, row],
    }


def main() -> None:
    """Run a small problem and print its counted bytes; then S and P of a long one, which nobody needs to store."""
    batch, seqlen, nheads, headdim, dtype = 1, 256, 4, 32, torch.float32
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, seqlen, nheads, headdim, dtype=dtype) for _ in range(3))
    memory = SlowMemory()
    attention(q, k, v, memory=memory)
    print(f"q, k, v ({batch}, {seqlen}, {nheads}, {headdim}) {str(dtype).removeprefix('torch.')}")
    print(f"{'pass':<16} {'bytes read':>12} {'bytes written':>14}")
    for name, (read, written) in memory.passes.items():
        print(f"{name:<16} {read:>12,} {written:>14,}")
    read, written = (sum(counts) for counts in zip(*memory.passes.values(), strict=True))
    print(f"{'together':<16} {read:>12,} {written:>14,}")
    floor = sum(tensor.numel() * tensor.element_size() for tensor in (q, k, v)), q.numel() * q.element_size()
    print(f"{'q, k, v, out':<16} {floor[0]:>12,} {floor[1]:>14,}")
    print()
    print(f"{'(batch, nheads, seqlen_q, seqlen_k) bfloat16':<45} {'bytes of S':>15} {'bytes of P':>15}")
    for length in (2048, 8192, 32768):
        size = score_bytes(1, 32, length, length, torch.bfloat16)
        print(f"{f'(1, 32, {length}, {length})':<45} {size:>15,} {size:>15,}")


if __name__ == "__main__":
    main()
