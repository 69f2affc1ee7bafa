"""What the Hopper kernels spend their cycles on, from the hardware's counters, for the bench's square problems.

    python -m scripts.hopper_profile [--seconds 60] [--out benchmarks/results/h200_profile.jsonl]

Needs Nsight Compute (ncu on the PATH, or its path in NCU) and leave to read counters. One process runs every case,
forward and backward, and ncu profiles the main kernel of each pass once, after a first run that compiled everything.
Clocks are left alone. scripts/gpu_speed.py makes a table of the recorded lines.
"""

from __future__ import annotations

import argparse
import csv
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "benchmarks" / "results" / "h200_profile.jsonl"
KERNELS = {"forward_kernel": "forward", "backward_kernel": "backward", "backward_wide_kernel": "backward"}
SAMPLES = "group:smsp__pcsamp_warp_stall_reasons"
Row = dict[str, Any]

ACTIVE = ".avg.pct_of_peak_sustained_active"
ELAPSED = ".avg.pct_of_peak_sustained_elapsed"
# per cent of the peak; those that a release of ncu does not know are left out
SHARES = {
    "tensor": "sm__pipe_tensor_cycles_active" + ACTIVE,
    "issue": "smsp__issue_active" + ACTIVE,
    "mufu": "sm__inst_executed_pipe_xu" + ACTIVE,
    "alu": "sm__inst_executed_pipe_alu" + ACTIVE,
    "fma": "sm__inst_executed_pipe_fma" + ACTIVE,
    "shared": "l1tex__data_pipe_lsu_wavefronts" + ELAPSED,
    "l2": "lts__throughput" + ELAPSED,
    "l2_hit": "lts__t_sector_hit_rate.pct",
    "dram": "dram__throughput" + ELAPSED,
}
DURATION, CYCLES, BUSY = "gpu__time_duration.sum", "sm__cycles_elapsed.max", "sm__cycles_active.avg"

# what a consumer's warp is at when it is sampled -> how the instruction that it issues next begins
WAITS = {
    "products": ("HGMMA", "WARPGROUP"),
    "exponentials": ("MUFU",),
    "maxima": ("FMNMX",),
    "shared memory": ("LDS", "STS", "FENCE", "MEMBAR", "UTMA"),
    "barriers": ("BAR", "SYNCS"),
}
OTHER = "other instructions"


def ncu() -> str:
    """The profiler."""
    found = os.environ.get("NCU") or shutil.which("ncu")
    if not found:
        raise SystemExit("hopper_profile: no ncu on the PATH; it comes with the CUDA toolkit, or name it in NCU")
    return found


def known(program: str) -> list[str]:
    """The counters that this ncu has for the GPU."""
    listed = subprocess.run([program, "--query-metrics", "--chips", "gh100"], capture_output=True, text=True).stdout
    names = {line.split()[0] for line in listed.splitlines() if line.strip()}
    return [metric for metric in (*SHARES.values(), DURATION, CYCLES, BUSY) if metric.split(".")[0] in names]


def run_cases(log: Path, seconds: float) -> None:
    """What ncu watches: each case once unwatched, then once watched; its name goes to ``log``."""
    import torch

    from tilewise.bench import gpu_cases
    from tilewise.functional import attention

    start, cudart = time.perf_counter(), torch.cuda.cudart()
    for case in gpu_cases.SQUARE:
        if time.perf_counter() - start > seconds:
            break
        tensors, options = case.tensors("cuda"), case.options("cuda")
        dout = torch.randn_like(tensors[0])
        for watched in (False, True):
            torch.cuda.synchronize()
            if watched:
                cudart.cudaProfilerStart()
            out = attention(*tensors, **options, backend="hopper")
            torch.autograd.grad(out, tensors, dout)
        torch.cuda.synchronize()
        cudart.cudaProfilerStop()
        with log.open("a") as file:
            file.write(case.name + "\n")


def collect(program: str, folder: Path, seconds: float) -> Path:
    """Profile; returns ncu's report."""
    report = folder / "report.ncu-rep"
    command = [
        *(program, "--clock-control", "none", "--cache-control", "none", "--profile-from-start", "off"),
        *("-k", f"regex:^({'|'.join(KERNELS)})$", "--metrics", ",".join([*known(program), SAMPLES])),
        *("-o", str(report), "-f", sys.executable, "-m", "scripts.hopper_profile"),
        *("--watched", str(folder / "cases"), "--seconds", str(seconds)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=seconds + 120)
    if done.returncode or not report.exists():
        raise SystemExit(f"hopper_profile: ncu failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return report


def printed(program: str, report: Path, page: str) -> list[str]:
    """A page of the report as lines of CSV."""
    command = [program, "--import", str(report), "--csv", "--print-units", "base", "--page", page]
    return subprocess.run(command, capture_output=True, text=True).stdout.splitlines()


def number(text: str) -> float | None:
    """A value as ncu prints it."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def counters(lines: Iterable[str]) -> Iterator[Row]:
    """The raw page's kernels; after the names of the columns comes a line with their units."""
    for line in csv.DictReader(line for line in lines if line.startswith('"')):
        found = {name: number(line[metric]) for name, metric in SHARES.items() if metric in line}
        time_ns, cycles, busy = (number(line.get(metric) or "") for metric in (DURATION, CYCLES, BUSY))
        if time_ns and cycles and busy is not None:
            facts = {"us": time_ns / 1e3, "ghz": cycles / time_ns, "busy": 100 * busy / cycles}
            yield {"kernel": line["Kernel Name"].split("(")[0], **found, **facts}


def listings(lines: Iterable[str]) -> list[list[tuple[str, int]]]:
    """The source page's kernels: (instruction, samples) of each."""
    found: list[list[tuple[str, int]]] = []
    for line in csv.reader(line for line in lines if line.startswith('"')):
        if line[0] == "Kernel Name":
            found.append([])
        elif line[0].startswith("0x"):
            found[-1].append((line[1], int(number(line[2]) or 0)))
    return found


def operation(instruction: str) -> str:
    """Its name, without the predicate."""
    words = instruction.split()
    return next((word for word in words if not word.startswith("@")), "")


def wait_of(operations: Sequence[str]) -> str:
    """What the last of some operations in a row is at; behind a barrier a warp has gone on to one that needs it."""
    *before, last = operations
    for wait, names in WAITS.items():
        if last.startswith(names):
            return wait
    polled = last == "BRA" and any(one.startswith("SYNCS") for one in before)
    return "barriers" if polled or any(one.startswith("BAR.SYNC") for one in before) else OTHER


def consumers(listing: Sequence[tuple[str, int]]) -> dict[str, float]:
    """Per cent of the consumers' samples by wait. Each partition sets its registers; theirs alone have products."""
    operations = [operation(text) for text, _ in listing]
    cuts = [0, *(at for at, name in enumerate(operations) if name.startswith("USETMAXREG")), len(listing)]
    found: Counter[str] = Counter()
    for begin, end in pairwise(cuts):
        if any(name.startswith("HGMMA") for name in operations[begin:end]):
            for at in range(begin, end):
                found[wait_of(operations[max(begin, at - 3) : at + 1])] += listing[at][1]
    return {wait: 100 * found[wait] / max(1, found.total()) for wait in (*WAITS, OTHER)}


def rows(program: str, folder: Path, seconds: float) -> list[Row]:
    """A row for each case and pass."""
    report = collect(program, folder, seconds)
    found = list(counters(printed(program, report, "raw")))
    waits = [consumers(listing) for listing in listings(printed(program, report, "source"))]
    order = [(case, what) for case in (folder / "cases").read_text().splitlines() for what in ("forward", "backward")]
    if [KERNELS[row["kernel"]] for row in found] != [what for _, what in order]:
        raise SystemExit(f"hopper_profile: not one kernel a pass: {[row['kernel'] for row in found]}")
    return [
        {"figure": "counters", "case": case, "pass": what, **row, "consumers": wait}
        for (case, what), row, wait in zip(order, found, waits, strict=True)
    ]


def main() -> None:
    """Profile and record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=RECORD)
    parser.add_argument("--seconds", type=float, default=60.0, help="no new case after so many")
    parser.add_argument("--commit", help="of the source, where it is no checkout")
    parser.add_argument("--watched", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.watched:
        run_cases(options.watched, options.seconds)
        return
    import torch

    from tilewise.bench import record

    with tempfile.TemporaryDirectory() as folder:
        found = rows(ncu(), Path(folder), options.seconds)
    record.write(options.out, found, record.machine(torch.device("cuda"), options.commit))
    print(f"{len(found)} rows in {options.out}")


if __name__ == "__main__":
    main()
