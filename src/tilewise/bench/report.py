"""Rows as tables for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tilewise.bench import summary

Row = dict[str, Any]
LACKS = ("has no ", "its causal corner", "compiled per shape")  # refusals that say nothing new


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Columns of equal width."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    padded = ([cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines)
    return "\n".join("  ".join(cells).rstrip() for cells in padded)


def _milliseconds(row: Row) -> str:
    return f"{row['ms']:.3g} ms ({row['ms_low']:.3g}..{row['ms_high']:.3g})"


def _cells(row: Row) -> list[str]:
    if row["figure"] == "host":
        value = f"{row['us']:.1f} us"
        compared = f"{row['us_over_torch']:+.1f} us" if "us_over_torch" in row else ""
    elif row["figure"] == "memory":
        value, compared = f"{row['extra_mib']:.1f} MiB", f"beside {row['returned_mib']:.0f} MiB returned"
    elif row["figure"] == "layer":
        value, compared = _milliseconds(row), ", ".join(f"{x:.3f} x {peer}" for peer, x in row["ratios"].items())
    elif row["figure"] == "first call":
        value, compared = ", ".join(f"{name} {x:.2f} s" for name, x in row["seconds"].items()), ""
    else:
        value, compared = _milliseconds(row), f"{row['ratio_to_torch']:.2f} x"
    return [row["case"], row["pass"], row["contender"], value, compared]


def table(rows: Iterable[Row], compared: str = "against torch") -> str:
    """One line a row: case, pass, contender, median (first..last decile), speed against torch's attention."""
    return aligned([["case", "pass", "contender", "measured", compared], *(_cells(row) for row in rows)])


def matrix(rows: Sequence[Row]) -> str:
    """One line a case and pass, one column a contender, TFLOP/s; tilewise against the best peer of the line, and its
    share of the rate of a plain matrix product."""
    timed = [row for row in rows if row["figure"] == "time"]
    names = list(dict.fromkeys(row["contender"] for row in timed))
    ours = [name for name in names if name.startswith(summary.PREFIX)]
    found = {(row["pass"], row["case"], row["contender"]): row for row in timed}
    keys = sorted({(row["pass"] != "forward", row["pass"], row["case"]): None for row in timed})
    head = ["pass", "case, TFLOP/s", *names]
    for name in ours:
        head += [f"{name.removeprefix(summary.PREFIX)} / best", "of matmul"]
    lines = [head]
    for _, what, case in keys:
        here = [found.get((what, case, name)) for name in names]
        line = [what, case, *("-" if row is None else f"{row['tflops']:.0f}" for row in here)]
        for name in ours:
            row = found.get((what, case, name))
            best = None if row is None else summary.against(row).get(summary.BEST)
            line += ["-" if best is None else f"{best:.3f}", "-" if row is None else f"{row['of_matmul']:.2f}"]
        lines.append(line)
    return aligned(lines) if timed else ""


def _summary(rows: Sequence[Row]) -> str:
    lines = [["pass", "contender", "against", "geometric mean", "lowest", "where", "rows"]]
    for row in rows:
        mean, lowest = f"{row['geometric_mean']:.3f}", f"{row['lowest']:.3f}"
        lines.append([row["pass"], row["contender"], row["peer"], mean, lowest, row["lowest_case"], str(row["rows"])])
    return aligned(lines)


def gpu(rows: Sequence[Row]) -> str:
    """Everything that a GPU run found."""
    parts = [matrix(rows)]
    packed = [row for row in rows if "of_one_length" in row]
    parts.append(
        "\n".join(
            f"{row['pass']}, {row['case']}, {row['contender']}: {row['of_one_length']:.3f} of the rate at one length"
            for row in packed
        )
    )
    summaries = summary.rows(rows)
    parts.append(_summary(summaries) if summaries else "")
    others = [row for row in rows if row["figure"] in ("host", "layer", "first call")]
    parts.append(table(others, "compared") if others else "")
    refused = dict.fromkeys(
        f"{row['contender']} {row['pass']}, {row['case']}: {row['reason']}"
        for row in rows
        if row["figure"] == "refused"
        and not row["reason"].startswith(("has no ", "its causal corner", "compiled per shape"))
    )
    parts.append("\n".join(["refused:", *refused]) if refused else "")
    parts += [f"WRONG: {row['reason']}" for row in rows if row["figure"] == "wrong"]
    return "\n\n".join(part for part in parts if part)
