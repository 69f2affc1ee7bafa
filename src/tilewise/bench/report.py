"""Rows as a table for people."""

from __future__ import annotations

from typing import Any


def _cells(row: dict[str, Any]) -> list[str]:
    if row["figure"] == "host":
        value, compared = f"{row['us']:.1f} us", f"{row['us_over_torch']:+.1f} us"
    elif row["figure"] == "memory":
        value, compared = f"{row['extra_mib']:.1f} MiB", f"beside {row['returned_mib']:.0f} MiB returned"
    else:
        value = f"{row['ms']:.3g} ms ({row['ms_low']:.3g}..{row['ms_high']:.3g})"
        compared = f"{row['ratio_to_torch']:.2f} x"
    return [row["case"], row["pass"], row["contender"], value, compared]


def table(rows: list[dict[str, Any]]) -> str:
    """Plain text: case, pass, contender, median (first..last decile), speed against torch's attention."""
    head = ["case", "pass", "contender", "measured", "against torch"]
    cells = [head, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(head))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
                     for line in cells)  # fmt: skip
