"""How many (query, key) pairs a problem keeps, and how many tiles it fills, cuts or skips."""

from __future__ import annotations

import torch

from tilewise import masks
from tilewise.inputs import Inputs, sequences
from tilewise.masks import TileCounts
from tilewise.problem import Problem

_ROWS = 256


def _readable(problem: Problem, inputs: Inputs) -> bool:
    """Whether what the count depends on can be read without waiting for a device."""
    deciding = [inputs.mask, inputs.segments_q, inputs.segments_k, inputs.cu_seqlens_q, inputs.cu_seqlens_k]
    return all(tensor is None or tensor.device.type == "cpu" for tensor in deciding)


def every(problem: Problem, inputs: Inputs) -> int:
    """All pairs of queries and keys of the same sequence, over batch and heads; packed, an upper bound on a device."""
    if problem.varlen and _readable(problem, inputs):
        return sum(every(part.problem, part.inputs) for part in sequences(problem, inputs))
    return problem.batch * problem.nheads * problem.seqlen_q * problem.seqlen_k


def kept(problem: Problem, inputs: Inputs) -> int | None:
    """Pairs that take part, summed over batch and heads; None where it depends on numbers that cannot be read."""
    if not _readable(problem, inputs):
        return None
    if problem.varlen:
        return sum(kept(part.problem, part.inputs) or 0 for part in sequences(problem, inputs))
    limits = masks.band(problem)
    if inputs.mask is None and inputs.segments_q is None:
        return problem.batch * problem.nheads * masks.kept_pairs(limits, problem.seqlen_q, problem.seqlen_k)
    total = 0
    for start in range(0, problem.seqlen_q, _ROWS):
        stop = min(start + _ROWS, problem.seqlen_q)
        keep = masks.band_tile(limits, start, stop, 0, problem.seqlen_k, torch.device("cpu"))[None, None]
        if inputs.segments_q is not None and inputs.segments_k is not None:
            keep = keep & (inputs.segments_q[:, None, start:stop, None] == inputs.segments_k[:, None, None, :])
        if inputs.mask is not None:
            rows = inputs.mask if inputs.mask.shape[2] == 1 else inputs.mask[:, :, start:stop]
            keep = keep & rows
        repeats = (problem.batch // keep.shape[0]) * (problem.nheads // keep.shape[1]) if keep.numel() else 0
        total += int(keep.sum()) * repeats
    return total


def tiles(problem: Problem, inputs: Inputs, block_m: int, block_n: int) -> TileCounts | None:
    """Full, partial and skipped tiles that causal and window decide, over batch and heads.

    Segments and a boolean mask can only turn full tiles into partial or skipped ones; that is not counted here.
    """
    if problem.varlen and not _readable(problem, inputs):
        return None
    parts = [part.problem for part in sequences(problem, inputs)] if problem.varlen else [problem]
    full = partial = skipped = 0
    for part in parts:
        counts = masks.count_tiles(masks.band(part), part.seqlen_q, part.seqlen_k, block_m, block_n)
        heads = part.batch * part.nheads
        full, partial, skipped = (
            full + heads * counts.full,
            partial + heads * counts.partial,
            skipped + heads * counts.skipped,
        )
    return TileCounts(full, partial, skipped)
