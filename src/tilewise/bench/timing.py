"""Time several contenders in turns, so that a drifting machine slows all of them, and compare turn by turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

Work = Callable[[], object]


class Samples(NamedTuple):
    """Seconds of one call, one number a round."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The figure to quote."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> tuple[float, float]:
        """First and ninth decile; the extremes when rounds are few."""
        if len(self.seconds) < 10:
            return min(self.seconds), max(self.seconds)
        deciles = statistics.quantiles(self.seconds, n=10)
        return deciles[0], deciles[-1]


def interleaved(
    contenders: Mapping[str, Work], rounds: int, least_seconds: float = 0.02, on_round: Callable[[], None] | None = None
) -> dict[str, Samples]:
    """Call the contenders in turns, ``rounds`` times.

    Each turn repeats its contender until it has taken about ``least_seconds``, and counts one call's share. The order
    of the turns is reversed every other round, so that none always follows the same one.
    """
    repeats = {}
    for name, work in contenders.items():
        work()
        start = time.perf_counter()
        work()
        repeats[name] = max(1, round(least_seconds / max(time.perf_counter() - start, 1e-7)))
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    order = list(contenders)
    for _ in range(rounds):
        for name in order:
            work, count = contenders[name], repeats[name]
            start = time.perf_counter()
            for _ in range(count):
                work()
            taken[name].append((time.perf_counter() - start) / count)
        order.reverse()
        if on_round is not None:
            on_round()
    return {name: Samples(tuple(seconds)) for name, seconds in taken.items()}


def speed_ratio(contender: Samples, peer: Samples) -> float:
    """How many times as fast as the peer: the median over rounds of peer's time / contender's time."""
    return statistics.median(b / a for a, b in zip(contender.seconds, peer.seconds, strict=True))
