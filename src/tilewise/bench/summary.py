"""What a run's rows say together: geometric means of speed ratios over the square problems, and the lowest row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]
PREFIX = "tilewise-"
BEST = "best peer"


def against(row: Row) -> dict[str, float]:
    """A row's ratios to each peer, and to the peer that is fastest there."""
    ratios: dict[str, float] = row["ratios"]
    return {**ratios, BEST: min(ratios.values())} if ratios else {}


def rows(timed: Sequence[Row]) -> list[Row]:
    """One row for each backend, pass and peer, and for the best peer of each row; square problems only."""
    chosen: dict[tuple[str, str, str], list[tuple[float, str]]] = {}
    for row in timed:
        if row["figure"] == "time" and row["table"] == "square" and row["contender"].startswith(PREFIX):
            for peer, ratio in against(row).items():
                chosen.setdefault((row["contender"], row["pass"], peer), []).append((ratio, row["case"]))
    found = []
    for (name, what, peer), ratios in sorted(chosen.items(), key=lambda item: (item[0][2] != BEST, item[0])):
        lowest, where = min(ratios)
        found.append(
            {
                "figure": "summary",
                "case": "square problems",
                "pass": what,
                "contender": name,
                "peer": peer,
                "geometric_mean": math.exp(sum(math.log(ratio) for ratio, _ in ratios) / len(ratios)),
                "lowest": lowest,
                "lowest_case": where,
                "rows": len(ratios),
            }
        )
    return found
