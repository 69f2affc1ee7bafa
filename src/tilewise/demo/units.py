"""Numbers as people read them."""

from __future__ import annotations


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


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Lines of text: the first column to the left, the others to the right."""
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    lines = []
    for row in [head, *rows]:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  " + "   ".join(cells).rstrip())
    return lines
