"""The algebra of partial results: attention over a part of the keys is the state (out, lse); states merge.

Merging is associative and commutative, with identity (0, -inf). Split keys, chunks, ring steps and shared prefixes
all use this one function.
"""

from __future__ import annotations

from typing import Any

import torch

from tilewise.errors import InvalidInput, InvalidType


def _check_part(name: str, tensor: Any, out_a: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise InvalidType(f"{name}: must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.layout is not torch.strided or not tensor.is_floating_point():
        has = str(tensor.dtype if tensor.layout is torch.strided else tensor.layout).removeprefix("torch.")
        raise InvalidType(f"{name}: is {has}, must be a strided tensor of floating-point numbers")
    if tensor.device != out_a.device:
        raise InvalidInput(f"{name}: is on {tensor.device}, must be on {out_a.device} like out_a")


def merge_states(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of two disjoint sets of keys, from the states over each.

    With weights ``w = exp(lse - lse_merged)``: ``out = w_a * out_a + w_b * out_b``, ``lse_merged = logaddexp(lse_a,
    lse_b)``. Safe for any lse: an empty state (0, -inf) is the identity, two empty states give (0, -inf) with zero
    gradients, and nothing overflows. Differentiable in all four arguments.

    Args:
        out_a, out_b: (batch, seqlen_q, nheads, headdim_v), or packed (total_q, nheads, headdim_v).
        lse_a, lse_b: natural log, (batch, nheads, seqlen_q), or packed (nheads, total_q).

    Returns:
        ``out`` in the dtype of ``out_a``, ``lse`` in the dtype of ``lse_a``.

    Raises:
        InvalidType: an argument is no strided tensor of floating-point numbers.
        InvalidInput: the shapes do not belong together, or the tensors are not on one device.
    """
    for name, tensor in (("out_a", out_a), ("lse_a", lse_a), ("out_b", out_b), ("lse_b", lse_b)):
        _check_part(name, tensor, out_a)
    if out_a.shape != out_b.shape or lse_a.shape != lse_b.shape:
        raise InvalidInput(
            f"merge_states: both states must have the same shapes, got out_a {tuple(out_a.shape)}, out_b "
            f"{tuple(out_b.shape)}, lse_a {tuple(lse_a.shape)}, lse_b {tuple(lse_b.shape)}"
        )
    if out_a.ndim < 3 or lse_a.shape != (*out_a.shape[:-3], out_a.shape[-2], out_a.shape[-3]):
        raise InvalidInput(
            f"lse_a: shape {tuple(lse_a.shape)} does not belong to out_a {tuple(out_a.shape)}: it must be "
            "(batch, nheads, seqlen_q) for out (batch, seqlen_q, nheads, headdim_v), or (nheads, total_q)"
        )
    top = torch.maximum(lse_a, lse_b).detach()
    empty = top == -torch.inf
    top = torch.where(empty, torch.zeros_like(top), top)
    weight_a, weight_b = torch.exp(lse_a - top), torch.exp(lse_b - top)
    total = torch.where(empty, torch.ones_like(top), weight_a + weight_b)
    lse = torch.where(empty, torch.full_like(top, -torch.inf), top + torch.log(total))

    def rows(weight: torch.Tensor) -> torch.Tensor:
        return (weight / total).transpose(-1, -2).unsqueeze(-1)

    out = rows(weight_a) * out_a + rows(weight_b) * out_b
    return out.to(out_a.dtype), lse
