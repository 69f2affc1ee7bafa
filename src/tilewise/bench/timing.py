"""Time several contenders in turns, so that a drifting machine slows all of them, and compare turn by turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

Work = Callable[[], object]
TURN = 0.03  # seconds of a turn on the GPU


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
    contenders: Mapping[str, Work],
    rounds: int,
    least_seconds: float = 0.02,
    seconds: float = 0.0,
    on_round: Callable[[], None] | None = None,
) -> dict[str, Samples]:
    """Call the contenders in turns, ``rounds`` times, and more until ``seconds`` have passed.

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
    end = time.perf_counter() + seconds
    while order and (len(taken[order[0]]) < rounds or time.perf_counter() < end):
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


def interleaved_cuda(
    contenders: Mapping[str, Work], seconds: float, pause: float = 0.05, least_rounds: int = 3
) -> dict[str, Samples]:
    """As ``interleaved``, on the GPU's own clock, until ``seconds`` have passed; a round's number is a median of calls.

    Before each call a buffer larger than the L2 cache is written: it empties the cache, and while it runs the host
    gets ahead, so that launch time is not counted. Each turn starts after the same pause, to cool down, and is about
    as long as every other one, since a card at its power limit slows down under long ones.
    """
    flush = torch.empty(2**26, dtype=torch.int32, device="cuda")
    calls = {name: max(3, min(20, round(TURN / _warmed(work)))) for name, work in contenders.items()}
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    order = list(contenders)
    end = time.perf_counter() + seconds
    while order and (time.perf_counter() < end or len(taken[order[0]]) < least_rounds):
        for name in order:
            torch.cuda.synchronize()
            time.sleep(pause)
            events = [(_event(), _event()) for _ in range(calls[name])]
            for start, stop in events:
                flush.zero_()
                start.record()
                contenders[name]()
                stop.record()
            torch.cuda.synchronize()
            taken[name].append(statistics.median(start.elapsed_time(stop) for start, stop in events) / 1e3)
        order.reverse()
    return {name: Samples(tuple(seconds)) for name, seconds in taken.items()}


def _warmed(work: Work) -> float:
    """Seconds of a call that is not the first."""
    for _ in range(2):
        work()
    start, stop = _event(), _event()
    start.record()
    work()
    stop.record()
    torch.cuda.synchronize()
    return max(float(start.elapsed_time(stop)) / 1e3, 1e-6)


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
