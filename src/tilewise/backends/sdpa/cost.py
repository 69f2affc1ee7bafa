"""Seconds that torch's CPU kernel takes: a measured table, to be held against the ``cpu`` backend's estimate."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tilewise import masks
from tilewise.device import DeviceFacts
from tilewise.problem import Problem


class Rate(NamedTuple):
    """Nanoseconds of one thread for a pair of query and key: ``pair`` for the softmax, ``channel`` for each channel."""

    pair: float
    channel: float


# Forward and backward, fitted to headdim 16, 64 and 128 at 1024 and 2048 tokens; one core of a Xeon with AVX-512 (bf16
# products on AMX). The order among dtypes is the kernel's: fp16 has no products of its own on such a core.
_RATES = {
    torch.float64: (Rate(3.0, 0.05), Rate(1.0, 0.22)),
    torch.float32: (Rate(0.7, 0.027), Rate(1.5, 0.07)),
    torch.bfloat16: (Rate(0.5, 0.0125), Rate(2.5, 0.05)),
    torch.float16: (Rate(0.6, 0.03), Rate(2.0, 0.13)),
}
_SECONDS_PER_CALL = 1e-5
# A tile on the diagonal is computed whole; half of this many keys is wasted for each row.
_DIAGONAL = 512
# Turning a boolean mask into numbers, and reading them once.
_SECONDS_PER_MASK_NUMBER = 1e-9


def seconds(problem: Problem, facts: DeviceFacts) -> float:
    """Time of the pairs that are computed, of a mask's conversion and of the calls; packed, an upper bound."""
    limits = masks.band(problem)
    pairs = masks.kept_pairs(limits, problem.seqlen_q, problem.seqlen_k)
    if problem.banded:
        pairs = min(pairs + problem.seqlen_q * _DIAGONAL // 2, problem.seqlen_q * problem.seqlen_k)
    rate = _RATES[problem.dtype][problem.derivative == "backward"]
    work = pairs * problem.batch * problem.nheads * (rate.pair + rate.channel * problem.headdim) * 1e-9
    numbers = 1 if problem.mask_shape else 0
    for size in problem.mask_shape or ():
        numbers *= size
    calls = problem.batch if problem.varlen else 1
    return work / max(1, facts.threads) + numbers * _SECONDS_PER_MASK_NUMBER + calls * _SECONDS_PER_CALL
