"""Peak memory of one call in a fresh process, beyond what it returns."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import torch

_WARM, _MIB = 64, 2**20


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def _peak(work: Any) -> tuple[int, Any]:
    """The most resident memory seen while ``work`` runs, sampled every millisecond, above that before it."""
    before, most, stop = _resident(), _resident(), threading.Event()

    def watch() -> None:
        nonlocal most
        while not stop.wait(0.001):
            most = max(most, _resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        result = work()
    finally:
        stop.set()
        watcher.join()
    return max(most, _resident()) - before, result


def measure(backend: str, seqlen: int, nheads: int, headdim: int) -> dict[str, int]:
    """Forward and backward, fp32, causal, in this process: bytes of peak, of out and of the gradients."""
    from tilewise.functional import attention

    def call(length: int) -> Any:
        q, k, v = (torch.randn(1, length, nheads, headdim, requires_grad=True) for _ in range(3))
        dout = torch.randn(1, length, nheads, headdim)
        return _peak(
            lambda: (
                out := attention(q, k, v, causal=True, backend=backend),
                *torch.autograd.grad(out, (q, k, v), dout),
            )
        )

    call(_WARM)
    peak, results = call(seqlen)
    returned = sum(tensor.numel() * tensor.element_size() for tensor in results)
    return {"peak": peak, "returned": returned}


def in_fresh_process(backend: str, seqlen: int, nheads: int, headdim: int) -> dict[str, int]:
    """``measure`` in a process of its own, so that no earlier allocation hides the peak."""
    arguments = [backend, str(seqlen), str(nheads), str(headdim)]
    done = subprocess.run(
        [sys.executable, "-m", "tilewise.bench.memory", *arguments], capture_output=True, text=True, check=True
    )
    result: dict[str, int] = json.loads(done.stdout)
    return result


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], *map(int, sys.argv[2:5]))))
