"""How long the first call of a new kernel takes: compiled, and from the disk cache in a later process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

CASE = "bf16 (1, 4096, 16, 128) causal"


def measure(backend: str) -> dict[str, float]:
    """Seconds of the first forward, the first backward and the second of both, in this process.

    Torch's own first gradient, for which it imports 500 modules, comes before them.
    """
    import torch

    from tilewise.functional import attention

    q, k, v = (torch.randn(1, 4096, 16, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    doubled = q + q
    torch.autograd.grad(doubled, q, torch.ones_like(doubled))
    torch.cuda.synchronize()
    found = {}

    def timed(name: str, work: Any) -> Any:
        start = time.perf_counter()
        result = work()
        torch.cuda.synchronize()
        found[name] = time.perf_counter() - start
        return result

    for suffix in ("", " again"):
        out = timed("forward" + suffix, lambda: attention(q, k, v, causal=True, backend=backend))
        dout = torch.randn_like(out)
        timed("backward" + suffix, lambda out=out, dout=dout: torch.autograd.grad(out, (q, k, v), dout))
    return found


def _in_fresh_process(backend: str, cache: str) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-m", "tilewise.bench.first_call", backend],
        env=os.environ | {"TRITON_CACHE_DIR": cache},
        capture_output=True,
        text=True,
        check=True,
    )
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def rows(backend: str) -> list[dict[str, Any]]:
    """An empty disk cache, then the cache that this filled in another process."""
    found = []
    with tempfile.TemporaryDirectory() as cache:
        for what in ("empty disk cache", "warm disk cache"):
            seconds = _in_fresh_process(backend, cache)
            row = {"figure": "first call", "case": CASE, "pass": what, "contender": f"tilewise-{backend}"}
            found.append({**row, "seconds": seconds})
    return found


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1])))
