"""Rows as tables for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

Row = dict[str, Any]


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Columns of equal width."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    padded = ([cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines)
    return "\n".join("  ".join(cells).rstrip() for cells in padded)


def _cells(row: Row) -> list[str]:
    if row["figure"] == "host":
        value = f"{row['us']:.1f} us"
        compared = f"{row['us_over_torch']:+.1f} us" if "us_over_torch" in row else ""
    elif row["figure"] == "memory":
        value, compared = f"{row['extra_mib']:.1f} MiB", f"beside {row['returned_mib']:.0f} MiB returned"
    else:
        value = f"{row['ms']:.3g} ms ({row['ms_low']:.3g}..{row['ms_high']:.3g})"
        compared = f"{row['ratio_to_torch']:.2f} x"
    return [row["case"], row["pass"], row["contender"], value, compared]


def table(rows: Iterable[Row]) -> str:
    """One line a row: case, pass, contender, median (first..last decile), speed against torch's attention."""
    return aligned([["case", "pass", "contender", "measured", "against torch"], *(_cells(row) for row in rows)])


def matrix(rows: Sequence[Row]) -> str:
    """One line a case and pass, one column a contender, TFLOP/s; then the other figures."""
    timed = [row for row in rows if row["figure"] == "time"]
    names = list(dict.fromkeys(row["contender"] for row in timed))
    found = {(row["pass"], row["case"], row["contender"]): f"{row['tflops']:.0f}" for row in timed}
    keys = sorted({(row["pass"] != "forward", row["pass"], row["case"]): None for row in timed})
    lines = [["pass", "case, TFLOP/s", *names]]
    lines += [[what, case, *(found.get((what, case, name), "-") for name in names)] for _, what, case in keys]
    text = aligned(lines) if timed else ""
    hosts = [row for row in rows if row["figure"] == "host"]
    return "\n\n".join(part for part in (text, table(hosts) if hosts else "") if part)
