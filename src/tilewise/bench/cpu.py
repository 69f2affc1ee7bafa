"""The CPU figures: tilewise against torch's own attention on this machine, as ratios of one run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from tilewise.bench import cases, gate, memory, timing
from tilewise.bench.cases import Case
from tilewise.functional import attention

Row = dict[str, Any]
Call = Callable[[], torch.Tensor]
_PEER = "torch-sdpa"
BOTH = "forward+backward"
# short calls are compared for this long: single rounds differ by a tenth, medians over 3 s still by a fiftieth
_SECONDS = 8.0


def _calls(case: Case, tensors: tuple[torch.Tensor, ...], backends: tuple[str, ...]) -> dict[str, Call]:
    """torch's attention and tilewise's backends on the same tensors."""
    q, k, v = tensors
    q_second, k_second, v_second = (tensor.transpose(1, 2) for tensor in (q, k, v))
    grouped = case.nheads_k is not None
    mask = None
    if case.window is not None:
        offset = torch.arange(case.seqlen) - torch.arange(case.seqlen)[:, None]
        mask = (offset <= 0) & (offset > -case.window)

    def peer() -> torch.Tensor:
        out: torch.Tensor = scaled_dot_product_attention(
            q_second, k_second, v_second, attn_mask=mask, is_causal=case.causal, enable_gqa=grouped
        )
        return out.transpose(1, 2)

    def ours(backend: str) -> Call:
        return lambda: attention(q, k, v, causal=case.causal, window_size=case.window_size, backend=backend)

    return {_PEER: peer, **{f"tilewise-{backend}": ours(backend) for backend in backends}}


def compare(case: Case, backends: tuple[str, ...], rounds: int) -> list[Row]:
    """Times and ratios to torch's attention, forward and forward + backward, after the gate."""
    tensors = case.tensors()
    dout = torch.randn_like(tensors[0])
    calls = _calls(case, tensors, backends)
    for name, call in calls.items():
        if name != _PEER:
            gate.check(case, name, call, tensors, dout)

    def with_backward(call: Call) -> Callable[[], object]:
        return lambda: torch.autograd.grad(call(), tensors, dout)

    rows = []
    for what, works in (("forward", calls), (BOTH, {name: with_backward(call) for name, call in calls.items()})):
        with torch.set_grad_enabled(what == BOTH):
            samples = timing.interleaved(works, rounds, seconds=_SECONDS)
        for name, sample in samples.items():
            low, high = sample.spread
            rows.append(
                {
                    "figure": "time",
                    "case": case.name,
                    "pass": what,
                    "contender": name,
                    "ms": 1e3 * sample.median,
                    "ms_low": 1e3 * low,
                    "ms_high": 1e3 * high,
                    "ratio_to_torch": timing.speed_ratio(sample, samples[_PEER]),
                    "rounds": len(sample.seconds),
                }
            )
    return rows


def host_cost(rounds: int = 15) -> Row:
    """Microseconds of a warm call that computes next to nothing, above those of torch's attention."""
    tensors = cases.HOST_CASE.tensors()
    calls = _calls(cases.HOST_CASE, tensors, ("auto",))
    with torch.no_grad():
        samples = timing.interleaved(calls, rounds, seconds=_SECONDS)
    ours, peer = samples["tilewise-auto"].median, samples[_PEER].median
    return {
        "figure": "host",
        "case": cases.HOST_CASE.name,
        "pass": "forward",
        "contender": "tilewise-auto",
        "us": 1e6 * ours,
        "us_over_torch": 1e6 * (ours - peer),
        "rounds": len(samples[_PEER].seconds),
    }


def peak_memory(backend: str = "cpu") -> Row:
    """Peak of forward + backward in a fresh process, beyond out and gradients."""
    case = cases.MEMORY_CASE
    found = memory.in_fresh_process(backend, case.seqlen, case.nheads, case.headdim)
    return {
        "figure": "memory",
        "case": case.name,
        "pass": BOTH,
        "contender": f"tilewise-{backend}",
        "extra_mib": (found["peak"] - found["returned"]) / 2**20,
        "returned_mib": found["returned"] / 2**20,
    }


def steps(rounds: int) -> Iterator[tuple[str, Callable[[], list[Row]]]]:
    """Everything to measure, one step at a time, with its name."""

    def comparison(case: Case, backends: tuple[str, ...], times: int) -> Callable[[], list[Row]]:
        return lambda: compare(case, backends, times)

    for case in cases.SDPA_CASES:
        backends = ("auto", "cpu") if case in cases.CPU_CASES else ("auto",)
        yield case.name, comparison(case, backends, rounds)
    yield cases.WINDOW_CASE.name, comparison(cases.WINDOW_CASE, ("auto",), max(3, rounds // 3))
    yield "host cost of a warm call", lambda: [host_cost()]
    yield "peak memory", lambda: [peak_memory()]
