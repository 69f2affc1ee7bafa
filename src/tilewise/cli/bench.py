"""bench: times tilewise against the other attention kernels of this machine, after checking every result."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``bench``."""
    parser.add_argument("device", choices=["cpu", "gpu"], help="where to measure")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each contender (%(default)s)")
    parser.add_argument("--only", help="measure only the steps whose name has this text")
    parser.add_argument("--out", type=Path, help="write JSON lines there, e.g. benchmarks/results/cpu.jsonl")
    parser.add_argument("--backends", nargs="+", default=["auto"], help="gpu: tilewise's backends (%(default)s)")
    parser.add_argument("--peers", nargs="*", help="gpu: the peers, all that can be imported if not given")
    parser.add_argument("--plot", type=Path, help="gpu: draw the rates there, as .png or .svg (needs matplotlib)")


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; 1 when a result was wrong, which is then not timed."""
    import torch

    from tilewise.bench import cpu, gate, gpu, peers, record, report

    if arguments.rounds < 1:
        print(f"--rounds: is {arguments.rounds}, must be at least 1")
        return 2
    if arguments.device == "gpu":
        if not torch.cuda.is_available():
            print("bench gpu: no CUDA device is there")
            return 2
        names = tuple(peers.PEERS if arguments.peers is None else arguments.peers)
        steps = gpu.steps(tuple(arguments.backends), names, arguments.rounds)
    else:
        steps = cpu.steps(arguments.rounds)
    rows: Rows = []
    try:
        _measure(steps, arguments.only, rows)
    except gate.GateFailed as error:
        print(f"not timed: {error}")
        return 1
    print(report.table(rows) if arguments.device == "cpu" else report.matrix(rows))
    if arguments.out is not None:
        record.write(arguments.out, rows, torch.device("cuda" if arguments.device == "gpu" else "cpu"))
        print(f"written to {arguments.out}")
    if arguments.plot is not None:
        from tilewise.bench import plot

        plot.rates(rows, arguments.plot)
        print(f"drawn in {arguments.plot}")
    return 0


def _measure(steps: Iterable[tuple[str, Callable[[], Rows]]], only: str | None, rows: Rows) -> None:
    chosen = [(name, step) for name, step in steps if only is None or only in name]
    for index, (name, step) in enumerate(chosen):
        print(f"[{index + 1}/{len(chosen)}] {name}", flush=True)
        rows += step()
