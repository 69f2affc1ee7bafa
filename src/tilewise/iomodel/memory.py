"""Bytes kept between forward and backward, tiled and materialising."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tilewise.problem import Problem


class Saved(NamedTuple):
    """Bytes saved for backward: q, k, v and out are needed either way; beside them lse, or the matrix P."""

    tensors: int
    lse: int
    probabilities: int


def saved_for_backward(problem: Problem) -> Saved:
    """What recomputation saves: lse instead of P (and of dropout's mask, one byte a pair)."""
    size = torch.empty((), dtype=problem.dtype).element_size()
    rows = problem.total_q if problem.varlen else problem.batch * problem.seqlen_q
    keys = problem.total_k if problem.varlen else problem.batch * problem.seqlen_k
    heads, heads_k = problem.nheads, problem.nheads_k
    tensors = size * (rows * heads + keys * heads_k) * (problem.headdim + problem.headdim_v)
    state = torch.empty((), dtype=problem.state_dtype).element_size()
    pairs = rows * heads * problem.seqlen_k
    return Saved(tensors, state * rows * heads, (size + (1 if problem.dropout_p else 0)) * pairs)
