"""Peak memory of one call in a fresh process, beyond what it returns."""

from __future__ import annotations

import json
import subprocess
import sys

import torch

from tilewise.bench.peak import PeakMemory

_WARM = 64


def measure(backend: str, seqlen: int, nheads: int, headdim: int) -> dict[str, int]:
    """Forward and backward, fp32, causal, in this process: bytes of peak, of out and of the gradients."""
    from tilewise.functional import attention

    def call(length: int) -> dict[str, int]:
        q, k, v = (torch.randn(1, length, nheads, headdim, requires_grad=True) for _ in range(3))
        dout = torch.randn(1, length, nheads, headdim)
        with PeakMemory() as peak:
            out = attention(q, k, v, causal=True, backend=backend)
            results = (out, *torch.autograd.grad(out, (q, k, v), dout))
        if peak.extra is None:
            raise RuntimeError("this system does not tell a process how much memory it has touched")
        returned = sum(tensor.numel() * tensor.element_size() for tensor in results)
        return {"peak": peak.extra, "returned": returned}

    call(_WARM)
    return call(seqlen)


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
