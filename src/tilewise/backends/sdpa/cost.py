"""Seconds that torch's CPU kernel takes, from rates measured beside those of the ``cpu`` backend."""

from __future__ import annotations

import torch

from tilewise import masks
from tilewise.device import DeviceFacts
from tilewise.problem import Problem

# FLOP/s of one thread, forward and backward; measured with `python -m tilewise bench cpu` on AVX-512 (Xeon, 2 cores).
_RATES = {
    torch.float64: (12e9, 10e9),
    torch.float32: (40e9, 30e9),
    torch.bfloat16: (40e9, 30e9),
    torch.float16: (40e9, 30e9),
}
_SECONDS_PER_CALL = 10e-6
# One thread's read and write of a number: conversions of a mask, copies of out.
_SECONDS_PER_NUMBER = 1e-9


def seconds(problem: Problem, facts: DeviceFacts) -> float:
    """FLOPs of the pairs the kernel computes at a measured rate, plus a mask's conversion and the call itself."""
    pairs = masks.kept_pairs(masks.band(problem), problem.seqlen_q, problem.seqlen_k) * problem.batch * problem.nheads
    backward = problem.derivative == "backward"
    flops = 2 * pairs * problem.headdim * (5 if backward else 2)
    rate = _RATES[problem.dtype][backward] * max(1, facts.threads)
    numbers = 1
    for size in problem.mask_shape or (0,):
        numbers *= size
    calls = problem.batch if problem.varlen else 1
    return flops / rate + numbers * _SECONDS_PER_NUMBER + calls * _SECONDS_PER_CALL
