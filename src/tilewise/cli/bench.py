"""bench: times tilewise against the other attention kernels of this machine, after checking every result."""

from __future__ import annotations

import argparse
import datetime
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]
Step = tuple[str, Callable[[], Rows]]
# options of one of the two, with what they are if not given
_OWN: dict[str, dict[str, Any]] = {
    "cpu": {"rounds": 9},
    "gpu": {
        "seconds": 2.0,
        "limit": None,
        "backends": ["hopper", "triton"],
        "peers": None,
        "skip": [],
        "warm": 0,
        "resume": False,
        "plot": None,
    },
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``bench``."""
    parser.add_argument("device", choices=["cpu", "gpu"], help="where to measure")
    parser.add_argument("--only", metavar="PATTERN", help="measure the steps whose name has this text or matches it")
    parser.add_argument("--out", type=Path, help="write JSON lines there, e.g. benchmarks/results/cpu.jsonl")
    parser.add_argument("--commit", help="the commit to record, where the source is no checkout")
    parser.set_defaults(**_OWN["cpu"], **_OWN["gpu"])
    parser.add_argument("--rounds", type=int, help="cpu: turns of each contender (%(default)s)")
    parser.add_argument("--seconds", type=float, help="gpu: for each case and pass (%(default)s)")
    parser.add_argument("--limit", type=float, help="gpu: start no new step after so many seconds")
    parser.add_argument("--backends", nargs="+", help="gpu: tilewise's (%(default)s)")
    parser.add_argument("--peers", nargs="*", help="gpu: the peers, all that can be imported if not given")
    parser.add_argument(
        "--skip", nargs=2, action="append", metavar=("CONTENDER", "PATTERN"),
        help="gpu: leave a contender out of the cases that match",
    )  # fmt: skip
    parser.add_argument("--warm", type=int, metavar="PROCESSES", help="gpu: compile first, in so many")
    parser.add_argument("--resume", action="store_true", help="gpu: keep what --out has, measure the other steps")
    parser.add_argument("--plot", type=Path, help="gpu: draw the rates there, as .png or .svg (needs matplotlib)")


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; 1 when a result was wrong, which is then not timed."""
    other = "gpu" if arguments.device == "cpu" else "cpu"
    misplaced = [name for name, usual in _OWN[other].items() if getattr(arguments, name) != usual]
    if misplaced:
        print(f"--{misplaced[0]}: is an option of `bench {other}`, not of `bench {arguments.device}`")
        return 2
    if arguments.out is not None:
        try:
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            print(f"--out: cannot be written: {error}")
            return 2
    if arguments.rounds < 1:
        print(f"--rounds: is {arguments.rounds}, must be at least 1")
        return 2
    return _cpu(arguments) if arguments.device == "cpu" else _gpu(arguments)


def typed(arguments: argparse.Namespace) -> str:
    """What to type for the same figures: the options that differ from what they are if not given.

    Where the lines go, which commit they are of and whether a run was taken up again changes no figure.
    """
    told = ["python -m tilewise bench", arguments.device]
    for name, usual in {"only": None, **_OWN[arguments.device]}.items():
        value = getattr(arguments, name)
        if name in ("resume", "plot") or value == usual:
            continue
        for given in value if name == "skip" else [value]:
            parts = given if isinstance(given, (list, tuple)) else [given]
            texts = (f"{part:g}" if isinstance(part, float) else str(part) for part in parts)
            told += [f"--{name}", *map(shlex.quote, texts)]
    return " ".join(told)


def chosen(steps: Iterable[Step], only: str | None) -> list[Step]:
    """The steps to take.

    Raises:
        LookupError: no name has the text ``only`` or matches it; the message lists the names.
    """
    known = list(steps)
    found = [(name, step) for name, step in known if only is None or only in name or _matches(only, name)]
    if not found:
        raise LookupError(f"--only {only!r} names no step; there are: " + "; ".join(name for name, _ in known))
    return found


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.search(pattern, name) is not None
    except re.error:
        return False


def _cpu(arguments: argparse.Namespace) -> int:
    import torch

    from tilewise.bench import cpu, gate, record, report

    rows: Rows = []
    try:
        steps = chosen(cpu.steps(arguments.rounds), arguments.only)
        for index, (name, step) in enumerate(steps):
            print(f"[{index + 1}/{len(steps)}] {name}", flush=True)
            rows += step()
    except LookupError as error:
        print(error.args[0])
        return 2
    except gate.GateFailed as error:
        print(f"not timed: {error}")
        return 1
    print(report.table(rows))
    if arguments.out is not None:
        facts = record.machine(torch.device("cpu"), arguments.commit) | {"command": typed(arguments)}
        record.write(arguments.out, rows, facts)
        print(f"written to {arguments.out}")
    return 0


def _gpu(arguments: argparse.Namespace) -> int:
    import torch

    from tilewise.bench import gpu, peers, record, report, summary, warm
    from tilewise.dispatch import registry

    if not torch.cuda.is_available():
        print("bench gpu: no CUDA device is there")
        return 2
    if arguments.warm:
        warm.use_caches()
    names = peers.importable() if arguments.peers is None else tuple(arguments.peers)
    for option, given, known in (("--peers", names, peers.PEERS), ("--backends", arguments.backends, registry.names())):
        if unknown := set(given) - set(known):
            print(f"{option}: is {', '.join(sorted(unknown))}, must be among {', '.join(known)}")
            return 2
    settings = gpu.Settings(tuple(arguments.backends), names, arguments.seconds, tuple(map(tuple, arguments.skip)))
    rows = record.read(arguments.out) if arguments.resume and arguments.out and arguments.out.exists() else []
    try:
        steps = chosen(gpu.steps(settings), arguments.only)
    except LookupError as error:
        print(error.args[0])
        return 2
    start = time.perf_counter()
    if arguments.warm:
        limit = 90.0 if arguments.limit is None else 0.5 * arguments.limit
        done = {row.get("step") for row in rows}
        print(warm.compile_ahead(settings, {name for name, _ in steps} - done, arguments.warm, limit), flush=True)
    facts = record.machine(torch.device("cuda"), arguments.commit) | {"command": typed(arguments)}
    facts |= {"peers": peers.versions(), "run": datetime.datetime.now(datetime.timezone.utc).isoformat("T", "seconds")}
    if arguments.out is not None:
        record.write(arguments.out, rows, {})
    whole = _measure(steps, rows, facts, arguments, start)
    print(report.gpu(rows))
    if arguments.out is not None:
        # means are written anew each time, over every row there is
        kept = [row for row in rows if row["figure"] != "summary"]
        record.write(arguments.out, kept, {})
        record.append(arguments.out, summary.rows(kept), facts)
        print(f"written to {arguments.out}")
    if arguments.plot is not None:
        from tilewise.bench import plot

        plot.rates(rows, arguments.plot)
        print(f"drawn in {arguments.plot}")
    return 0 if whole and not any(row["figure"] == "wrong" for row in rows) else 1


def _measure(steps: list[Step], rows: Rows, facts: dict[str, Any], arguments: argparse.Namespace, start: float) -> bool:
    """Take the steps that ``rows`` does not hold, adding what they give; whether none failed."""
    from tilewise.bench import contenders, gate, peers, record

    whole = True
    done = {row["step"] for row in rows if "step" in row}
    for index, (name, step) in enumerate(steps):
        label = f"[{index + 1}/{len(steps)}] {name}"
        seconds = time.perf_counter() - start
        if name in done or (arguments.limit is not None and seconds > arguments.limit):
            print(f"{label}: {'recorded already' if name in done else 'not started, the time is up'}", flush=True)
            continue
        print(f"{label} ... ", end="", flush=True)
        try:
            new = step()
        except gate.GateFailed as error:
            new = [{"figure": "wrong", "case": name, "pass": "", "contender": "", "reason": str(error)}]
        except contenders.DeviceLost as error:
            print(error, file=sys.stderr)
            return False
        except Exception as error:  # one figure that cannot be had must not cost the others
            print(f"failed after {time.perf_counter() - start - seconds:.1f} s: {peers.told(error)}", flush=True)
            whole = False
            continue
        new = [{"step": name, **row, **facts} for row in new]
        rows += new
        if arguments.out is not None:
            record.append(arguments.out, new, {})
        print(f"{time.perf_counter() - start - seconds:.1f} s", flush=True)
    return whole
