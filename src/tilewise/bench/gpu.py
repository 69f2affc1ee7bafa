"""The CUDA figures: tilewise's backends and every peer that can be imported, interleaved, as ratios of one run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tilewise.bench import cases, gate, peers, timing
from tilewise.bench.cases import Case
from tilewise.functional import attention

Row = dict[str, Any]
Call = Callable[[], torch.Tensor]


def _ours(case: Case, tensors: Any, backend: str) -> Call:
    q, k, v = tensors
    return lambda: attention(q, k, v, causal=case.causal, window_size=case.window_size, backend=backend)


def _rows(case: Case, what: str, samples: dict[str, timing.Samples], ours: tuple[str, ...], rounds: int) -> list[Row]:
    others = [name for name in samples if name not in ours]
    rows = []
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
                "tflops": case.flops(what) / sample.median / 1e12,
                "ratios": {peer: timing.speed_ratio(sample, samples[peer]) for peer in others if peer != name},
                "rounds": rounds,
            }
        )
    return rows


def compare(case: Case, backends: tuple[str, ...], names: tuple[str, ...], rounds: int) -> list[Row]:
    """Forward alone and backward alone, after the gate of each of tilewise's backends."""
    tensors = case.tensors("cuda")
    dout = torch.randn_like(tensors[0])
    ours = {f"tilewise-{backend}": _ours(case, tensors, backend) for backend in backends}
    for name, call in ours.items():
        gate.check(case, name, call, tensors, dout)
    able, refused = peers.calls(case, tensors, names)
    contenders = {**ours, **able}
    with torch.no_grad():
        samples = timing.interleaved_cuda(contenders, rounds)
    rows = _rows(case, "forward", samples, tuple(ours), rounds)

    def backward_of(call: Call) -> Callable[[], object]:
        out = call()
        return lambda: torch.autograd.grad(out, tensors, dout, retain_graph=True)

    with_backward = {
        name: backward_of(call) for name, call in contenders.items() if peers.has_backward(call, tensors, dout)
    }
    rows += _rows(case, "backward", timing.interleaved_cuda(with_backward, rounds), tuple(ours), rounds)
    for name, reason in refused.items():
        rows.append({"figure": "refused", "case": case.name, "pass": "", "contender": name, "reason": reason})
    return rows


def host_cost(backends: tuple[str, ...], names: tuple[str, ...], calls: int = 300) -> list[Row]:
    """Host microseconds of a warm call, the GPU kept busy so that it is never waited for, with and without grad."""
    case = cases.GPU_HOST_CASE
    tensors = case.tensors("cuda")
    able, _ = peers.calls(case, tensors, names)
    contenders = {**{f"tilewise-{backend}": _ours(case, tensors, backend) for backend in backends}, **able}
    busy = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    rows = []
    for grad in (False, True):
        for name, call in contenders.items():
            with torch.set_grad_enabled(grad):
                taken = [_host_seconds(call, busy, calls) for _ in range(5)]
            rows.append(
                {
                    "figure": "host",
                    "case": case.name,
                    "pass": "with grad" if grad else "without grad",
                    "contender": name,
                    "us": 1e6 * sorted(taken)[len(taken) // 2],
                    "rounds": len(taken),
                }
            )
    return rows


def _host_seconds(call: Call, busy: torch.Tensor, calls: int) -> float:
    for _ in range(20):
        call()
    torch.cuda.synchronize()
    for _ in range(20):
        busy @ busy
    start = time.perf_counter()
    for _ in range(calls):
        call()
    seconds = (time.perf_counter() - start) / calls
    torch.cuda.synchronize()
    return seconds


def steps(
    backends: tuple[str, ...], names: tuple[str, ...], rounds: int
) -> Iterator[tuple[str, Callable[[], list[Row]]]]:
    """Everything to measure, one step at a time, with its name."""

    def comparison(case: Case) -> Callable[[], list[Row]]:
        return lambda: compare(case, backends, names, rounds)

    for case in (*cases.GPU_CASES, *cases.GPU_WINDOW_CASES):
        yield case.name, comparison(case)
    yield "host cost of a warm call", lambda: host_cost(backends, names)
