"""FLOPs of the matrix products; a multiply-add counts 2."""

from __future__ import annotations


def forward(pairs: int, headdim: int, headdim_v: int) -> int:
    """q k^T and p v: 2 * pairs * (headdim + headdim_v)."""
    return 2 * pairs * (headdim + headdim_v)


def backward(pairs: int, headdim: int, headdim_v: int) -> int:
    """Recomputed q k^T, then ds k and ds^T q over headdim; dout v^T and p^T dout over headdim_v."""
    return 2 * pairs * (3 * headdim + 2 * headdim_v)
