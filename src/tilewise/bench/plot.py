"""Rates as bars, one panel a pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def rates(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw TFLOP/s of every contender and case to ``path``; the file's ending chooses the format.

    Raises:
        ImportError: matplotlib is not installed (``pip install tilewise[bench]``).
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    timed = [row for row in rows if row["figure"] == "time"]
    passes = list(dict.fromkeys(row["pass"] for row in timed))
    names = list(dict.fromkeys(row["contender"] for row in timed))
    labels = list(dict.fromkeys(row["case"] for row in timed))
    figure, panels = pyplot.subplots(
        1, max(len(passes), 1), figsize=(7 * max(len(passes), 1), 1.5 + 0.14 * len(labels) * len(names)), squeeze=False
    )
    height = 0.8 / max(len(names), 1)
    for panel, what in zip(panels[0], passes, strict=False):
        for index, name in enumerate(names):
            found = {row["case"]: row["tflops"] for row in timed if (row["pass"], row["contender"]) == (what, name)}
            places = [place + index * height for place, label in enumerate(labels) if label in found]
            panel.barh(places, [found[label] for label in labels if label in found], height, label=name)
        panel.set_yticks([place + 0.4 - height / 2 for place in range(len(labels))], labels, fontsize=7)
        panel.invert_yaxis()
        panel.set_title(f"{what}, TFLOP/s")
        panel.legend(fontsize=7)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)
