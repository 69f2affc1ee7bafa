"""Forward and backward of one attention function at one length."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from tilewise.bench.peak import PeakMemory
from tilewise.demo.attentions import ATTENTIONS


def _leaves(seqlen: int, nheads: int, headdim: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seqlen)
    return [torch.randn(1, seqlen, nheads, headdim, generator=generator, requires_grad=True) for _ in range(3)]


def measure(attention: str, seqlen: int, nheads: int, headdim: int, repeats: int) -> dict[str, Any]:
    """Seconds (median) and peak extra bytes of one forward plus backward in fp32, and a checksum of the results."""
    function = ATTENTIONS[attention]

    def run(leaves: list[torch.Tensor], dout: torch.Tensor) -> torch.Tensor:
        out = function(leaves[0], leaves[1], leaves[2])
        torch.autograd.backward(out, dout)
        return out.detach()

    warm = _leaves(64, nheads, headdim)
    run(warm, torch.ones_like(warm[0]))
    leaves = _leaves(seqlen, nheads, headdim)
    dout = torch.randn(leaves[0].shape, generator=torch.Generator().manual_seed(1))
    seconds = []
    peaks = []
    for _ in range(repeats):
        for leaf in leaves:
            leaf.grad = None
        with PeakMemory() as peak:
            started = time.perf_counter()
            out = run(leaves, dout)
            seconds.append(time.perf_counter() - started)
        peaks.append(peak.extra)
    results = [out, *(leaf.grad for leaf in leaves if leaf.grad is not None)]
    return {
        "seconds": statistics.median(seconds),
        # The first run is the one that finds no memory left over from an earlier one.
        "bytes": peaks[0],
        "sums": [float(tensor.double().square().sum().sqrt()) for tensor in results],
    }
