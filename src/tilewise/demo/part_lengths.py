"""Part 4: forward and backward at growing lengths, until materialising attention's memory no longer fits."""

from __future__ import annotations

from typing import Any

import torch

import tilewise
from tilewise.bench import peak
from tilewise.demo import svg, units, worker
from tilewise.demo.attentions import ATTENTIONS, WINDOW
from tilewise.demo.page import Section
from tilewise.demo.progress import Progress
from tilewise.demo.settings import Settings

Measured = dict[str, dict[int, dict[str, Any]]]
# Norms of fp32 results that two orders of summation may part.
SAME = 1e-4
SAME_FUNCTION = ("tilewise", "tilewise cpu")


def limit(settings: Settings) -> int:
    """Bytes that materialising attention may take: half of what is available, at most the settings' limit."""
    found = peak.available()
    return settings.memory_limit if found is None else min(settings.memory_limit, found // 2)


def _score_bytes(seqlen: int, settings: Settings) -> int:
    return settings.nheads * seqlen * seqlen * torch.float32.itemsize


def predicted(seqlen: int, done: dict[int, dict[str, Any]], settings: Settings) -> int:
    """Bytes at ``seqlen``: the last measured ones times the growth of S, or S and P before anything is measured."""
    sizes = {length: row["bytes"] for length, row in done.items() if row["bytes"]}
    if not sizes:
        return 2 * _score_bytes(seqlen, settings)
    last = max(sizes)
    return int(sizes[last] * _score_bytes(seqlen, settings) / _score_bytes(last, settings))


def _measure(settings: Settings, most: int) -> Measured:
    measured: Measured = {name: {} for name in ATTENTIONS}
    with Progress("lengths", len(ATTENTIONS) * len(settings.lengths)) as progress:
        for seqlen in settings.lengths:
            for name, done in measured.items():
                if name != "materialising" or predicted(seqlen, done, settings) <= most:
                    last = done[max(done)]["seconds"] if done else 0.0
                    shape = {"seqlen": seqlen, "nheads": settings.nheads, "headdim": settings.headdim}
                    arguments = {"attention": name, **shape, "repeats": settings.length_repeats(last)}
                    done[seqlen] = worker.call("lengths", arguments)
                progress.step(f"{name} {seqlen}")
    return measured


def _cell(name: str, seqlen: int, measured: Measured, settings: Settings) -> list[str]:
    row = measured[name].get(seqlen)
    if row is None:
        return ["not run", f"({units.size(predicted(seqlen, measured[name], settings))})"]
    return [units.duration(row["seconds"]), units.size(row["bytes"])]


def _charts(measured: Measured, settings: Settings) -> list[str]:
    points = {
        key: {name: [(float(n), row[key]) for n, row in rows.items() if row[key]] for name, rows in measured.items()}
        for key in ("bytes", "seconds")
    }
    stopped = [n for n in settings.lengths if n not in measured["materialising"]]
    more = [(float(n), float(predicted(n, measured["materialising"], settings))) for n in stopped]
    lines = [svg.Series(name, points["bytes"][name], more if name == "materialising" else ()) for name in measured]
    length = svg.Axis("sequence length", log=True)
    return [
        svg.chart("Memory", lines, length, svg.Axis("peak extra bytes", log=True, text=units.size)),
        svg.chart(
            "Time",
            [svg.Series(name, points["seconds"][name]) for name in measured],
            length,
            svg.Axis("forward + backward", log=True, text=units.duration),
        ),
    ]


def difference(measured: Measured) -> float | None:
    """Largest relative difference of the norms of out, dq, dk and dv from materialising attention's, if it was run."""
    pairs = [
        (a, b)
        for seqlen, row in measured["materialising"].items()
        for name in SAME_FUNCTION
        for a, b in zip(row["sums"], measured[name][seqlen]["sums"], strict=True)
    ]
    return max((abs(a - b) / a for a, b in pairs), default=None)


def _chosen(settings: Settings, window: int | None) -> str | None:
    shape = (1, settings.lengths[-1], settings.nheads, settings.headdim)
    q = torch.empty(shape, device="meta", requires_grad=True)
    left = None if window is None else window - 1
    return tilewise.explain(q, q, q, causal=True, window_size=(left, None if window is None else 0)).backend


def _words(settings: Settings, most: int) -> list[str]:
    return [
        f"Causal attention, forward and backward, one sequence, {settings.nheads} heads of {settings.headdim}, fp32. "
        "Memory is the peak above q, k, v and the incoming gradient, each run in a process of its own; it includes out "
        f'and the three gradients. At the longest tilewise chose the backend "{_chosen(settings, None)}" itself, with '
        f'a window of {WINDOW} keys "{_chosen(settings, WINDOW)}"; "tilewise cpu" was asked for by name.',
        "The memory rule: materialising attention is run while the memory it will need, its last peak scaled by the "
        "growth of the score matrix, fits in half of the memory that is available, at most "
        f"{units.size(settings.memory_limit)}; here that is {units.size(most)}. A number in brackets, and a dashed "
        "line, is that prediction.",
    ]


def _verdict(settings: Settings, measured: Measured, apart: float | None, exact: bool) -> str:
    longest = settings.lengths[-1]
    there = measured["tilewise"][longest]
    text = (
        f"At length {longest:,} tilewise needs {units.size(there['bytes'])} and {units.duration(there['seconds'])}, "
        f"where one score matrix alone has {units.size(_score_bytes(longest, settings))}. "
    )
    if apart is None:
        return text + "Materialising attention did not fit at any length, so nothing was compared."
    last = max(measured["materialising"])
    text += f"Up to {last:,}, where both run, the norms of out, dq, dk and dv differ by at most {apart:.1e}: "
    return text + ("the same results." if exact else "NOT the same.")


def run(settings: Settings) -> tuple[Section, bool]:
    """The section, and whether tilewise's results are those of materialising attention."""
    most = limit(settings)
    measured = _measure(settings, most)
    apart = difference(measured)
    exact = apart is None or apart < SAME
    rows = [[f"{n:,}", name, *_cell(name, n, measured, settings)] for n in settings.lengths for name in ATTENTIONS]
    section = Section(
        title="Longer and longer",
        words=_words(settings, most),
        head=["length", "attention", "time", "peak memory"],
        text_columns=2,
        rows=rows,
        charts=_charts(measured, settings),
        verdict=_verdict(settings, measured, apart, exact),
    )
    return section, exact
