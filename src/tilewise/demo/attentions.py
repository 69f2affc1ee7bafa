"""The attention functions that the demo compares, all (batch, seqlen, nheads, headdim) and causal."""

from __future__ import annotations

from collections.abc import Callable

import torch

import tilewise

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def materialising(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Plain PyTorch: scores, mask, softmax and product, each a tensor of its own in memory where autograd needs it."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    scores: torch.Tensor = (q * q.shape[-1] ** -0.5) @ k.mT
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return (scores.masked_fill_(later, -torch.inf).softmax(-1) @ v).transpose(1, 2)


def tiled(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """``tilewise.attention`` with the backend it chooses itself."""
    return tilewise.attention(q, k, v, causal=True)


def own_tiles(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """``tilewise.attention`` on its own tiled loops in torch operations, whatever else would be faster."""
    return tilewise.attention(q, k, v, causal=True, backend="cpu")


WINDOW = 512


def windowed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """``tilewise.attention`` where each query sees itself and the keys before it, ``WINDOW`` in all."""
    return tilewise.attention(q, k, v, causal=True, window_size=(WINDOW - 1, 0))


ATTENTIONS: dict[str, Attention] = {
    "materialising": materialising,
    "tilewise": tiled,
    "tilewise cpu": own_tiles,
    f"window {WINDOW}": windowed,
}
