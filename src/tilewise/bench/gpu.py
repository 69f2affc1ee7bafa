"""The CUDA figures: tilewise's backends and every peer that can be imported, interleaved, as ratios of one run."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tilewise.bench import contenders, first_call, gpu_cases, host, layer, timing
from tilewise.bench.cases import Case
from tilewise.bench.contenders import PREFIX

Row = dict[str, Any]
Step = tuple[str, Callable[[], list[Row]]]
TWIN = " at one length"
MATMUL = 8192


@dataclass(frozen=True)
class Settings:
    """What a run measures: tilewise's backends, peers by name, seconds for a case's pass, contenders left out."""

    backends: tuple[str, ...]
    peers: tuple[str, ...]
    seconds: float
    skipped: tuple[tuple[str, str], ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Every contender, tilewise's first."""
        return (*(PREFIX + backend for backend in self.backends), *self.peers)

    def taking_part(self, case: Case) -> list[str]:
        """The contenders that are not left out of ``case``: a skip is a contender and a pattern of case names."""
        out = {name for name, pattern in self.skipped if re.search(pattern, case.name)}
        return [name for name in self.names if name not in out and name.removeprefix(PREFIX) not in out]


@functools.cache
def matmul_rate(seconds: float = 1.0) -> float:
    """FLOP/s of a plain bf16 product of two matrices of 8192 x 8192, measured once in this process as all else is."""
    a, b = (torch.randn(MATMUL, MATMUL, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    sample = timing.interleaved_cuda({"matmul": lambda: a @ b}, seconds)["matmul"]
    return 2 * MATMUL**3 / sample.median


def matmul_row() -> Row:
    """The rate that every row's utilisation is a share of."""
    rate = matmul_rate()
    return {"figure": "matmul", "case": f"bf16 {MATMUL}^3", "pass": "", "contender": "torch", "tflops": rate / 1e12}


def _twins(case: Case, backward: bool, names: Mapping[str, Any]) -> tuple[Case, contenders.Field]:
    """tilewise on sequences of one length, of about the packed case's tokens and FLOPs."""
    twin = gpu_cases.dense_twin(case)
    found = contenders.assemble(contenders.Setting(twin, backward), [name for name in names if name.startswith(PREFIX)])
    return twin, found


def _rows(case: Case, what: str, samples: dict[str, timing.Samples], twin: Case | None) -> list[Row]:
    """One row a contender, with its speed relative to every peer."""
    others = [name for name in samples if not name.startswith(PREFIX)]
    rows = []
    for name, sample in samples.items():
        if name.endswith(TWIN):
            continue
        low, high = sample.spread
        flops = case.flops(what)
        row: Row = {
            "figure": "time",
            "table": "square" if case in gpu_cases.SQUARE else "further",
            "case": case.name,
            "pass": what,
            "contender": name,
            "ms": 1e3 * sample.median,
            "ms_low": 1e3 * low,
            "ms_high": 1e3 * high,
            "tflops": flops / sample.median / 1e12,
            "of_matmul": flops / sample.median / matmul_rate(),
            "ratios": {peer: timing.speed_ratio(sample, samples[peer]) for peer in others if peer != name},
            "rounds": len(sample.seconds),
        }
        if twin is not None and name + TWIN in samples:
            row["of_one_length"] = timing.speed_ratio(sample, samples[name + TWIN]) * flops / twin.flops(what)
        rows.append(row)
    return rows


def compare(case: Case, passes: tuple[str, ...], settings: Settings) -> list[Row]:
    """Forward alone and backward alone, of everyone who runs the case and computes it."""
    backward = "backward" in passes
    found = contenders.assemble(contenders.Setting(case, backward), settings.taking_part(case))
    works: dict[str, dict[str, Any]] = {"forward": {**found.forward}, "backward": {**found.backward}}
    twin = None
    if case.lengths is not None:
        twin, twins = _twins(case, backward, found.forward)
        works["forward"] |= {name + TWIN: work for name, work in twins.forward.items()}
        works["backward"] |= {name + TWIN: work for name, work in twins.backward.items()}
    rows = []
    for what in passes:
        with torch.set_grad_enabled(what == "backward"):
            samples = timing.interleaved_cuda(works[what], settings.seconds)
        rows += _rows(case, what, samples, twin)
    for row in rows:
        row["error_of_budget"] = found.errors[row["contender"]]
    for (name, what), reason in found.refused.items():
        rows.append({"figure": "refused", "case": case.name, "pass": what, "contender": name, "reason": reason})
    rows += [
        {"figure": "wrong", "case": case.name, "pass": "", "contender": "", "reason": text} for text in found.wrong
    ]
    return rows


def steps(settings: Settings) -> Iterator[Step]:
    """Everything to measure, one step at a time, with its name; those worth most first."""

    def comparison(case: Case, passes: tuple[str, ...]) -> Callable[[], list[Row]]:
        return lambda: compare(case, passes, settings)

    def compiling(backend: str) -> Callable[[], list[Row]]:
        return lambda: first_call.rows(backend)

    yield "matmul", lambda: [matmul_row()]
    for case in gpu_cases.SQUARE:
        yield case.name, comparison(case, gpu_cases.BOTH)
    yield "host cost of a warm call", lambda: host.rows(settings.names)
    yield "GPT layer", lambda: layer.rows(settings.backends, settings.seconds)
    for case, passes in gpu_cases.CASES.items():
        if case not in gpu_cases.SQUARE:
            yield case.name, comparison(case, passes)
    for backend in settings.backends:
        yield f"first call of {backend}", compiling(backend)
