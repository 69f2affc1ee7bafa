"""Packed (varlen) problems, run sequence by sequence; tokens beyond the last offset: out 0, lse -inf, gradient 0."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from tilewise.dispatch.backend import Gradients, State
from tilewise.inputs import Inputs, PackedSequence, sequences
from tilewise.problem import Problem


def _dense(name: str, tensor: torch.Tensor, part: PackedSequence, index: int) -> torch.Tensor:
    """One sequence's part of a tensor named as its primal, with a batch dimension of 1."""
    if name in ("alibi_slopes", "sink"):
        return tensor[index : index + 1]
    return tensor[None, part.tokens_q if name == "q" else part.tokens_k]


def tokens(tensor: torch.Tensor, part: PackedSequence) -> torch.Tensor:
    """One sequence's (1, length, nheads, dim) of a query-side tensor."""
    return tensor[None, part.tokens_q]


def columns(tensor: torch.Tensor, part: PackedSequence) -> torch.Tensor:
    """One sequence's (1, nheads, length) of a (nheads, total_q) tensor."""
    return tensor[None, :, part.tokens_q]


def dense_tangents(tangents: Gradients, part: PackedSequence, index: int) -> Gradients:
    """One sequence's tangents."""
    return {name: _dense(name, tangent, part, index) for name, tangent in tangents.items()}


def state(
    problem: Problem, inputs: Inputs, run: Callable[[int, PackedSequence], State], fill: float = -math.inf
) -> State:
    """(out, lse) of all sequences, from a function that gives one's; ``fill`` is lse where there is no sequence."""
    out = inputs.q.new_zeros(problem.total_q, problem.nheads, problem.headdim_v, dtype=problem.out_dtype)
    lse = inputs.q.new_full((problem.nheads, problem.total_q), fill, dtype=problem.state_dtype)
    for index, part in enumerate(sequences(problem, inputs)):
        part_out, part_lse = run(index, part)
        out[part.tokens_q], lse[:, part.tokens_q] = part_out[0], part_lse[0]
    return out, lse


def gradients(problem: Problem, inputs: Inputs, run: Callable[[int, PackedSequence], Gradients]) -> Gradients:
    """The gradients of all sequences, from a function that gives one's."""
    total = {
        name: torch.zeros_like(getattr(inputs, name), memory_format=torch.contiguous_format)
        for name in problem.needs_grad
    }
    for index, part in enumerate(sequences(problem, inputs)):
        for name, grad in run(index, part).items():
            _dense(name, total[name], part, index).copy_(grad)
    return total
