"""What stored e4m3 numbers stand for: real value = stored x descale.

A descale is one number, one for each head, (nheads_k,) or (batch, nheads_k), or one for each BLOCK rows of a head,
(batch, nheads_k, blocks).
"""

from __future__ import annotations

import torch

FP8 = torch.float8_e4m3fn
BLOCK = 128  # rows of q, keys of k and v


def out_dtype(dtype: torch.dtype) -> torch.dtype:
    """dtype of out: the inputs', bf16 for fp8 inputs."""
    return torch.bfloat16 if dtype == FP8 else dtype


def blocks_of(seqlen: int) -> int:
    """Blocks of a sequence, the last one maybe short."""
    return -(-seqlen // BLOCK)


def by_row(descale: torch.Tensor, seqlen: int) -> torch.Tensor:
    """(batch, heads, blocks) as (batch, heads, seqlen)."""
    return descale.repeat_interleave(BLOCK, -1)[..., :seqlen]


def spread(descale: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """A descale beside a (batch, seqlen, heads, dim) or packed (total, heads, dim) tensor.

    Query heads that share a key head share its number.
    """
    if descale.numel() == 1:
        return descale.reshape((1,) * len(shape))
    heads = 1 if descale.ndim == 3 else -1
    by_head = descale.repeat_interleave(shape[-2] // max(descale.shape[heads], 1), heads)
    if descale.ndim == 3:
        return by_row(by_head, shape[1]).transpose(1, 2)[..., None]
    return by_head[..., None, :, None] if len(shape) == 4 else by_head[..., :, None]


def real(tensor: torch.Tensor, descale: torch.Tensor | None, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The values that a stored tensor stands for."""
    values = tensor.to(dtype)
    return values if descale is None else values * spread(descale, tensor.shape).to(dtype)
