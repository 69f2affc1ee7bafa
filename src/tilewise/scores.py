"""What the score options mean: s from q k^T, before the softmax. Backends fuse it; this is the definition."""

from __future__ import annotations

import torch

from tilewise.inputs import Inputs
from tilewise.problem import Problem


def distance(problem: Problem, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """|i + seqlen_k - seqlen_q - j|, (seqlen_q, seqlen_k): what ALiBi slopes multiply."""
    i = torch.arange(problem.seqlen_q, device=device)[:, None] + problem.seqlen_k - problem.seqlen_q
    return (i - torch.arange(problem.seqlen_k, device=device)).abs().to(dtype)


def cap(s: torch.Tensor, softcap: float) -> torch.Tensor:
    """softcap * tanh(s / softcap), or s when softcap is 0."""
    return softcap * torch.tanh(s / softcap) if softcap else s


def add_bias(s: torch.Tensor, problem: Problem, inputs: Inputs) -> torch.Tensor:
    """Scores (batch, nheads, seqlen_q, seqlen_k) plus bias, minus ALiBi's slope times distance."""
    if inputs.bias is not None:
        s = s + inputs.bias.to(s.dtype)
    if inputs.alibi_slopes is not None:
        s = s - inputs.alibi_slopes[:, :, None, None] * distance(problem, s.device, s.dtype)
    return s
