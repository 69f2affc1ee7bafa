"""What stored e4m3 numbers stand for: real value = stored x descale, a descale one number or (batch, nheads_k)."""

from __future__ import annotations

import torch

FP8 = torch.float8_e4m3fn


def out_dtype(dtype: torch.dtype) -> torch.dtype:
    """dtype of out: the inputs', bf16 for fp8 inputs."""
    return torch.bfloat16 if dtype == FP8 else dtype


def spread(descale: torch.Tensor, heads: int, ndim: int = 4) -> torch.Tensor:
    """A descale (one number, (nheads_k,) or (batch, nheads_k)) beside a (batch, seqlen, heads, dim) or packed tensor.

    Query heads that share a key head share its number.
    """
    if descale.numel() == 1:
        return descale.reshape((1,) * ndim)
    by_head = descale.repeat_interleave(heads // max(descale.shape[-1], 1), -1)
    return by_head[..., None, :, None] if ndim == 4 else by_head[..., :, None]


def real(tensor: torch.Tensor, descale: torch.Tensor | None, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The values that a stored tensor stands for."""
    values = tensor.to(dtype)
    return values if descale is None else values * spread(descale, tensor.shape[-2], tensor.ndim).to(dtype)
