"""bench: times tilewise against torch's attention on this machine, after checking every result."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``bench``."""
    parser.add_argument("device", choices=["cpu"], help="where to measure")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each contender (%(default)s)")
    parser.add_argument("--only", help="measure only the steps whose name has this text")
    parser.add_argument("--out", type=Path, help="write JSON lines there, e.g. benchmarks/results/cpu.jsonl")


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; 1 when a result was wrong, which is then not timed."""
    import torch

    from tilewise.bench import cpu, record, report

    if arguments.rounds < 1:
        print(f"--rounds: is {arguments.rounds}, must be at least 1")
        return 2
    rows = []
    for name, step in cpu.steps(arguments.rounds):
        if arguments.only and arguments.only not in name:
            continue
        print(f"measuring {name}", flush=True)
        try:
            rows += step()
        except cpu.GateFailed as error:
            print(f"not timed: {error}")
            return 1
    print(report.table(rows))
    if arguments.out is not None:
        record.write(arguments.out, rows, torch.device("cpu"))
        print(f"written to {arguments.out}")
    return 0
