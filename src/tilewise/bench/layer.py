"""A whole GPT layer's attention, forward and backward: projection to q, k and v, causal attention, projection out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tilewise.bench import gate, timing
from tilewise.bench.contenders import PREFIX
from tilewise.functional import attention

TOKENS, HEADS, HEADDIM = 8192, 16, 128
NAME = f"GPT layer, {TOKENS} tokens, {HEADS} heads of {HEADDIM}, causal"
PEER = "cudnn-sdpa"
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Layer(torch.nn.Module):
    """The projections around an attention that takes (batch, seqlen, nheads, headdim)."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        torch.manual_seed(0)
        width = HEADS * HEADDIM
        self.qkv = torch.nn.Linear(width, 3 * width, bias=False, device="cuda", dtype=torch.bfloat16)
        self.out = torch.nn.Linear(width, width, bias=False, device="cuda", dtype=torch.bfloat16)
        self.attend = attend

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, seqlen, nheads * headdim) to the same."""
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, HEADDIM)).unbind(-3)
        result: torch.Tensor = self.out(self.attend(q, k, v).flatten(-2))
        return result


def _cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out: torch.Tensor = scaled_dot_product_attention(q, k, v, is_causal=True)
    return out.transpose(1, 2)


def _tilewise(backend: str) -> Attend:
    return lambda q, k, v: attention(q, k, v, causal=True, backend=backend)


def _work(layer: Layer, compiled: bool, x: torch.Tensor, dout: torch.Tensor) -> Callable[[], list[torch.Tensor]]:
    """Forward and backward by input and weights."""
    function: Any = torch.compile(layer, fullgraph=True) if compiled else layer
    leaves = [x, *layer.parameters()]

    def work() -> list[torch.Tensor]:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = function(x)
        return [out, *torch.autograd.grad(out, leaves, dout)]

    return work


@torch.no_grad()
def _apart(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    """The largest relative distance among out and the gradients."""
    pairs = zip(one, other, strict=True)
    return max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs)


def rows(backends: tuple[str, ...], seconds: float) -> list[dict[str, Any]]:
    """tilewise's backends and cuDNN, each eager and compiled, interleaved; ratios to cuDNN in the same mode."""
    x = torch.randn(1, TOKENS, HEADS * HEADDIM, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dout = torch.randn_like(x)
    attends = {**{PREFIX + backend: _tilewise(backend) for backend in backends}, PEER: _cudnn}
    works = {
        (name, mode): _work(Layer(attend), mode == "compiled", x, dout)
        for name, attend in attends.items()
        for mode in ("eager", "compiled")
    }
    apart = {key: _apart(work(), works[PEER, "eager"]()) for key, work in works.items()}
    for (name, mode), distance in apart.items():
        if not distance <= gate.ANOTHER_FUNCTION:
            raise gate.GateFailed(f"{name}, {mode}, on the {NAME}: {distance:.2g} apart from {PEER}")
    samples = timing.interleaved_cuda({f"{name}, {mode}": work for (name, mode), work in works.items()}, 2 * seconds)
    found = []
    for name, mode in works:
        sample = samples[f"{name}, {mode}"]
        low, high = sample.spread
        found.append(
            {
                "figure": "layer",
                "case": NAME,
                "pass": f"forward+backward, {mode}",
                "contender": name,
                "ms": 1e3 * sample.median,
                "ms_low": 1e3 * low,
                "ms_high": 1e3 * high,
                "ratios": {PEER: timing.speed_ratio(sample, samples[f"{PEER}, {mode}"])},
                "apart": apart[name, mode],
                "rounds": len(sample.seconds),
            }
        )
    return found
