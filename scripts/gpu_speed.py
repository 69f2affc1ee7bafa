"""A recorded GPU run as Markdown: the README's short form, and docs/gpu_speed.md with every row.

python -m scripts.gpu_speed        writes docs/gpu_speed.md; scripts/readme.py writes the README's part
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts import hopper_profile
from tilewise.bench import record, summary

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "benchmarks" / "results" / "h200.jsonl"
PAGE = ROOT / "docs" / "gpu_speed.md"
Row = dict[str, Any]


def _table(head: Sequence[str], right: int, lines: Sequence[Sequence[str]]) -> list[str]:
    """Markdown; the last ``right`` columns are numbers."""
    if not lines:
        return []
    rule = ["---"] * (len(head) - right) + ["---:"] * right
    return [f"| {' | '.join(line)} |" for line in (head, rule, *lines)] + [""]


def means(rows: Sequence[Row]) -> list[str]:
    """Geometric means over the square problems, against the best peer of each row and against each peer."""
    lines = [
        [row["pass"], f"`{row['contender'].removeprefix(summary.PREFIX)}`", row["peer"], str(row["rows"]),
         f"{row['geometric_mean']:.2f}", f"{row['lowest']:.2f}", row["lowest_case"]]
        for row in summary.rows(rows)
    ]  # fmt: skip
    return _table(["pass", "backend", "against", "rows", "mean", "lowest", "where"], 0, lines)


def every_row(rows: Sequence[Row]) -> list[str]:
    """TFLOP/s of each backend and of the best peer, one line a case and pass."""
    timed = [row for row in rows if row["figure"] == "time"]
    ours = list(dict.fromkeys(row["contender"] for row in timed if row["contender"].startswith(summary.PREFIX)))
    lines = []
    for what, case in dict.fromkeys((row["pass"], row["case"]) for row in timed):
        here = {row["contender"]: row for row in timed if (row["pass"], row["case"]) == (what, case)}
        peers = {name: row for name, row in here.items() if name not in ours}
        best = max(peers, key=lambda name: peers[name]["tflops"], default="")
        line = [what, case, f"{best} {peers[best]['tflops']:.0f}" if best else "none"]
        for name in ours:
            row = here.get(name)
            ratio = None if row is None else summary.against(row).get(summary.BEST)
            line += ["" if row is None else f"{row['tflops']:.0f}", "" if ratio is None else f"{ratio:.2f}"]
            line.append("" if row is None else f"{row['of_matmul']:.2f}")
        lines.append(line)
    names = [name.removeprefix(summary.PREFIX) for name in ours]
    head = ["pass", "case", "best peer", *(part for name in names for part in (f"`{name}`", "/ best", "of matmul"))]
    return _table(head, 3 * len(ours), lines)


def cycles(rows: Sequence[Row]) -> list[str]:
    """What the Hopper kernels do with their cycles, of a recorded profile."""
    if not rows:
        return []
    units = {"tensor": "tensor", "mufu": "MUFU", "alu": "ALU", "fma": "FMA", "issue": "issue", "shared": "smem",
             "l2": "L2", "dram": "DRAM"}  # fmt: skip
    waits = [*hopper_profile.WAITS, hopper_profile.OTHER]
    lines = [
        [row["pass"], row["case"], *(f"{row[name]:.0f}" if row.get(name) is not None else "" for name in units),
         f"{row['ghz']:.2f}", *(f"{row['consumers'][wait]:.0f}" for wait in waits)]
        for row in sorted(rows, key=lambda row: row["pass"] != "forward")
    ]  # fmt: skip
    facts = rows[0]
    return [
        "## Where the cycles of the Hopper kernels go",
        "",
        "Read from the hardware's counters by `scripts/hopper_profile.py`, one launch of each main kernel. On the left",
        "per cent of what a unit could do in the cycles of that launch: the tensor cores, special functions (MUFU),",
        "the other arithmetic, the issue slots, the data path of shared memory, L2 and DRAM. In the middle the clock,",
        "which the card lowers where its power limit asks for it. On the right what the consumers' warps were at when",
        "they were sampled, in per cent of the samples: issuing or awaiting products, exponentials, row maxima, shared",
        "memory, barriers, other instructions. Warps share the units: one's softmax runs under another's products.",
        "",
        *_table(["pass", "case", *units.values(), "GHz", *waits], len(units) + 1 + len(waits), lines),
        f"{facts['device']}, driver {facts['driver']}, commit {facts['commit']}, {facts['date']}: "
        "`python -m scripts.hopper_profile`",
    ]


def others(rows: Sequence[Row]) -> list[str]:
    """Packed sequences beside one length, host costs, the GPT layer, first calls."""
    lines = [
        f"- {row['case']}, {row['pass']}, `{row['contender'].removeprefix(summary.PREFIX)}`: "
        f"{row['of_one_length']:.2f} of its rate at one length."
        for row in rows
        if "of_one_length" in row
    ]
    for what in dict.fromkeys(row["pass"] for row in rows if row["figure"] == "host"):
        costs = (row for row in rows if row["figure"] == "host" and row["pass"] == what)
        told = ", ".join(f"{row['contender'].removeprefix(summary.PREFIX)} {row['us']:.0f}" for row in costs)
        lines.append(f"- Host microseconds of a warm call, {what}: {told}.")
    for row in rows:
        if row["figure"] == "layer" and row["contender"].startswith(summary.PREFIX):
            ratios = ", ".join(f"{ratio:.2f} x {peer}" for peer, ratio in row["ratios"].items())
            name = row["contender"].removeprefix(summary.PREFIX)
            lines.append(f"- {row['case']}, {row['pass']}, `{name}`: {row['ms']:.2f} ms, {ratios}.")
        if row["figure"] == "first call":
            told = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in row["seconds"].items())
            lines.append(f"- First call of `{row['contender'].removeprefix(summary.PREFIX)}`, {row['pass']}: {told}.")
    return [*lines, ""]


def origin(rows: Sequence[Row]) -> str:
    """Where and when."""
    facts = next(row for row in rows if row["figure"] == "time")
    peers = ", ".join(f"{name} {version}" for name, version in facts["peers"].items())
    versions = f"torch {facts['torch']}, triton {facts['triton']}, {peers}, driver {facts['driver']}"
    return f"{facts['device']}, {versions}, commit {facts['commit']}, {facts['date']}: `{facts['command']}`"


def short(rows: Sequence[Row]) -> str:
    """For the README."""
    lines = [line for line in means(rows) if "| best peer |" in line or line.startswith(("| pass", "| ---"))]
    return "\n".join([*lines, "", *others(rows), origin(rows)])


def page(rows: Sequence[Row], profile: Sequence[Row] = ()) -> str:
    """docs/gpu_speed.md."""
    lines = [
        "# Speed on a GPU",
        "",
        "Written by `scripts/gpu_speed.py` from the recorded run. TFLOP/s of the kept pairs, medians of interleaved",
        "turns with equal pauses; forward and backward each alone; each result was checked first. A peer stands where",
        "it could run: the wheel of fa3 has no backward, fa4-cute no fp8 on this GPU.",
        '"/ best" is the speed relative to the fastest peer of that line in the same run, "of matmul" the share of the',
        "rate of a plain bf16 product of two 8192 x 8192 matrices in it, which fp8 and wide heads can pass. Means are",
        "geometric.",
        "",
        *means(rows),
        *every_row(rows),
        *others(rows),
        origin(rows),
        *(["", *cycles(profile)] if profile else []),
    ]
    return "\n".join(lines) + "\n"


def recorded_profile() -> list[Row]:
    """Its rows, if there are any."""
    return record.read(hopper_profile.RECORD) if hopper_profile.RECORD.exists() else []


def main() -> None:
    """Write docs/gpu_speed.md."""
    PAGE.write_text(page(record.read(RECORD), recorded_profile()), encoding="utf-8")


if __name__ == "__main__":
    main()
