"""What a warm call costs the host, with the GPU kept busy so that it is never waited for."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilewise.bench import contenders, gpu_cases

CALLS = 150  # few enough that the launches of a forward and its backward fit in the driver's queue
REPEATS = 7
PASSES = ("without grad", "with grad", "forward and backward")


def _seconds(call: Callable[[], object], busy: torch.Tensor) -> float:
    """Of one call, the mean over CALLS while a few matrix products run."""
    torch.cuda.synchronize()
    for _ in range(20):
        busy @ busy
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    taken = (time.perf_counter() - start) / CALLS
    torch.cuda.synchronize()
    return taken


def rows(names: Sequence[str]) -> list[dict[str, Any]]:
    """Host microseconds of every contender: without gradients, with a graph to record, with the backward run too."""
    setting = contenders.Setting(gpu_cases.HOST, backward=True)
    found = contenders.assemble(setting, names)
    busy = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    leaves = list(setting.leaves.values())

    def both(call: contenders.Call) -> Callable[[], object]:
        return lambda: torch.autograd.grad(call(), leaves, setting.dout)

    result = []
    for what in PASSES:
        calls = {name: both(found.forward[name]) for name in found.backward} if what == PASSES[2] else found.forward
        taken: dict[str, list[float]] = {name: [] for name in calls}
        with torch.set_grad_enabled(what != PASSES[0]):
            for call in calls.values():
                for _ in range(20):
                    call()
            for _ in range(REPEATS):
                for name, call in calls.items():
                    taken[name].append(_seconds(call, busy))
        for name, seconds in taken.items():
            result.append(
                {
                    "figure": "host",
                    "case": gpu_cases.HOST.name,
                    "pass": what,
                    "contender": name,
                    "us": 1e6 * statistics.median(seconds),
                    "us_low": 1e6 * min(seconds),
                    "us_high": 1e6 * max(seconds),
                    "rounds": len(seconds),
                }
            )
    return result
