"""Line charts as inline SVG: they scale with the page and take its colours, light or dark."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Point = tuple[float, float]

WIDTH, HEIGHT = 400, 250
LEFT, RIGHT, TOP, BOTTOM = 62, 24, 14, 40
STYLES = 4


@dataclass(frozen=True)
class Series:
    """One line: its ``points`` (x, y), and the ``dashed`` ones that go on from it without having been measured."""

    name: str
    points: Sequence[Point]
    dashed: Sequence[Point] = ()


@dataclass(frozen=True)
class Axis:
    """A label, the ticks' text, and whether the scale is logarithmic (base 2)."""

    label: str
    log: bool = False
    text: Callable[[float], str] = field(default=lambda value: f"{value:g}")


def _nice_step(span: float) -> float:
    raw = span / 4 if span > 0 else 1.0
    power = 10.0 ** math.floor(math.log10(raw))
    return next(factor * power for factor in (1.0, 2.0, 2.5, 5.0, 10.0) if factor * power >= raw)


def ticks(axis: Axis, low: float, high: float) -> list[float]:
    """Where an axis from ``low`` to ``high`` is marked, at most about six places."""
    if axis.log:
        first, last = math.floor(math.log2(low)), math.ceil(math.log2(high))
        stride = max(1, math.ceil((last - first) / 5))
        return [2.0**exponent for exponent in range(first, last + 1, stride)]
    step = _nice_step(high - low)
    return [index * step for index in range(math.floor(low / step), math.ceil(high / step) + 1)]


@dataclass(frozen=True)
class _Scale:
    axis: Axis
    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        low, high, value = (math.log2(x) if self.axis.log else x for x in (self.low, self.high, value))
        share = (value - low) / (high - low) if high > low else 0.5
        return self.start + share * (self.end - self.start)


def _scale(axis: Axis, values: list[float], start: float, end: float) -> tuple[_Scale, list[float]]:
    marks = ticks(axis, min(values), max(values))
    return _Scale(axis, min(*marks, *values), max(*marks, *values), start, end), marks


def _path(points: Sequence[Point], x: _Scale, y: _Scale, kind: str) -> str:
    places = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in points)
    return f'<polyline class="{kind}" points="{places}"/>'


def _line(series: Series, index: int, x: _Scale, y: _Scale) -> list[str]:
    style = f"s{index % STYLES}"
    parts = [_path(series.points, x, y, style)]
    if series.dashed:
        parts.append(_path([*series.points[-1:], *series.dashed], x, y, f"{style} dashed"))
    if len(series.points) <= 12:
        parts += [f'<circle class="{style}" cx="{x(a):.1f}" cy="{y(b):.1f}" r="3"/>' for a, b in series.points]
    return parts


def _axes(x: _Scale, y: _Scale, x_marks: list[float], y_marks: list[float]) -> list[str]:
    bottom = HEIGHT - BOTTOM
    parts = []
    for mark in y_marks:
        at = y(mark)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="end" x="{LEFT - 6}" y="{at + 4:.1f}">{html.escape(y.axis.text(mark))}</text>')
    for mark in x_marks:
        parts.append(f'<text class="mid" x="{x(mark):.1f}" y="{bottom + 16}">{html.escape(x.axis.text(mark))}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text class="mid label" x="{middle}" y="{HEIGHT - 6}">{html.escape(x.axis.label)}</text>')
    return parts


def chart(title: str, series: Sequence[Series], x_axis: Axis, y_axis: Axis) -> str:
    """One chart with its legend: a <figure> for a page that has ``STYLE``."""
    points = [point for line in series for point in (*line.points, *line.dashed)]
    if not points:
        return ""
    x, x_marks = _scale(x_axis, [a for a, _ in points], LEFT, WIDTH - RIGHT)
    y, y_marks = _scale(y_axis, [b for _, b in points], HEIGHT - BOTTOM, TOP)
    parts = _axes(x, y, x_marks, y_marks)
    for index, line in enumerate(series):
        parts += _line(line, index, x, y)
    legend = " ".join(
        f'<span class="key"><svg viewBox="0 0 18 8" width="18" height="8"><line class="s{index % STYLES}" '
        f'x1="0" x2="18" y1="4" y2="4"/></svg> {html.escape(line.name)}</span>'
        for index, line in enumerate(series)
    )
    label = html.escape(f"{title}: {y_axis.label} by {x_axis.label}")
    drawing = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'
    caption = f"{html.escape(title)} <small>{html.escape(y_axis.label)}</small>"
    return f"<figure><figcaption>{caption}</figcaption>{drawing}<div>{legend}</div></figure>"


STYLE = """
figure { margin: 1rem 0; }
figcaption { font-weight: 600; }
figcaption small, .label { font-weight: 400; opacity: .7; }
figure > svg { width: 100%; height: auto; display: block; }
svg text { font-size: 11px; fill: currentColor; }
svg .mid { text-anchor: middle; } svg .end { text-anchor: end; }
svg .grid { stroke: currentColor; opacity: .15; }
svg polyline, .key line { fill: none; stroke-width: 2; }
svg polyline.s0 { stroke-width: 5; opacity: .5; }
svg polyline.dashed { stroke-width: 2; stroke-dasharray: 4 4; opacity: .8; }
.s0 { stroke: var(--s0); } .s1 { stroke: var(--s1); } .s2 { stroke: var(--s2); } .s3 { stroke: var(--s3); }
circle.s0 { fill: var(--s0); } circle.s1 { fill: var(--s1); } circle.s2 { fill: var(--s2); }
circle.s3 { fill: var(--s3); }
.key { margin-right: 1rem; white-space: nowrap; }
"""
