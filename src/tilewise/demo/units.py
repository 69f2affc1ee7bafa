"""Numbers as people read them."""

from __future__ import annotations

from collections.abc import Sequence


def size(count: float | None) -> str:
    """Bytes: "96.0 MiB"; "not measured" for None."""
    if count is None:
        return "not measured"
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"


def duration(seconds: float) -> str:
    """Seconds: "12.3 ms", "1.45 s"."""
    if seconds < 1:
        return f"{1e3 * seconds:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 100 else f"{seconds:.0f} s"


def times(ratio: float) -> str:
    """A factor: "3.2 x"."""
    return f"{ratio:.3g} x"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int = 1) -> list[str]:
    """Lines of text: the first ``text_columns`` columns to the left, the others to the right."""
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    lines = []
    for row in [head, *rows]:
        sized = enumerate(zip(row, widths, strict=True))
        cells = [cell.ljust(width) if column < text_columns else cell.rjust(width) for column, (cell, width) in sized]
        lines.append("  " + "   ".join(cells).rstrip())
    return lines
