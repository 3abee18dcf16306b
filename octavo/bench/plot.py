"""Line charts as SVG, side by side in one picture: no library, no fonts, no state."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 520, 360  # of one chart
LEFT, RIGHT, TOP, BOTTOM = 66, 26, 62, 48
COLORS = ("#0b6e99", "#c8553d", "#5b8c5a", "#7d5ba6")
INK, FAINT = "#24292f", "#d8dee4"

Point = tuple[float, float]


@dataclass
class Series:
    """One line: its points in order of x; `dashed` for what was computed and not measured."""

    name: str
    points: Sequence[Point]
    dashed: bool = False


@dataclass
class Chart:
    """A chart over x in powers of two; y begins at 0, or is logarithmic too."""

    title: str
    x_label: str
    y_label: str
    series: list[Series] = field(default_factory=list)
    log_y: bool = False


def draw(charts: Sequence[Chart], caption: str) -> str:
    """The picture as SVG text.

    Raises:
        ValueError: nothing to draw, or a point that cannot be (a logarithm of what isn't positive).
    """
    width = WIDTH * len(charts)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT + 30}" width="{width}" '
        f'height="{HEIGHT + 30}" font-family="system-ui, Helvetica, Arial, sans-serif" font-size="12" '
        f'fill="{INK}">',
        f'<rect width="{width}" height="{HEIGHT + 30}" fill="#ffffff"/>',
    ]
    for number, chart in enumerate(charts):
        parts += [f'<g transform="translate({WIDTH * number},0)">', *_chart(chart), "</g>"]
    parts.append(f'<text x="{LEFT}" y="{HEIGHT + 14}" fill="#57606a" font-size="11">{escape(caption)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _chart(chart: Chart) -> list[str]:
    points = [point for series in chart.series for point in series.points]
    if not points or any(x <= 0 or not math.isfinite(y) or (chart.log_y and y <= 0) for x, y in points):
        raise ValueError(f"{chart.title}: no points, or some that cannot be drawn")
    xs, ys = [p[0] for p in points], [p[1] for p in points]
    low_x, high_x = math.log2(min(xs)), math.log2(max(xs))
    ticks = _log_ticks(min(ys), max(ys)) if chart.log_y else _ticks(max(ys))
    scale = math.log if chart.log_y else float
    low_y, high_y = scale(ticks[0]), scale(ticks[-1])

    def at(x: float, y: float) -> Point:
        across = (math.log2(x) - low_x) / (high_x - low_x or 1.0)
        up = (scale(y) - low_y) / (high_y - low_y or 1.0)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    parts = [f'<text x="{LEFT}" y="24" font-size="15" font-weight="600">{escape(chart.title)}</text>']
    for tick in ticks:
        _, y = at(min(xs), tick)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="{FAINT}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{_number(tick)}</text>')
    for x_value in sorted(set(xs)):
        x, _ = at(x_value, ticks[0])
        label = _number(x_value)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{label}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 10}" text-anchor="middle">{escape(chart.x_label)}</text>')
    parts.append(f'<text x="{LEFT}" y="{TOP - 12}" fill="#57606a">{escape(chart.y_label)}</text>')
    for number, series in enumerate(chart.series):
        parts += _line(series, COLORS[number % len(COLORS)], at)
    if len(chart.series) > 1:
        parts += _legend(chart.series)
    return parts


def _line(series: Series, color: str, at) -> list[str]:  # type: ignore[no-untyped-def]
    places = [at(*point) for point in series.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dash = ' stroke-dasharray="5 4"' if series.dashed else ""
    parts = [f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"{dash}/>']
    if series.dashed:
        return parts
    for (x, y), (x_value, y_value) in zip(places, series.points, strict=True):
        title = f"{escape(series.name)}: {_number(x_value)}, {y_value:.4g}"
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2" fill="{color}"><title>{title}</title></circle>'
        )
    return parts


def _legend(series: Sequence[Series]) -> list[str]:
    parts, x = [], float(WIDTH - RIGHT)
    for number in reversed(range(len(series))):
        each = series[number]
        x -= 7.6 * len(each.name) + 36
        dash = ' stroke-dasharray="5 4"' if each.dashed else ""
        color = COLORS[number % len(COLORS)]
        parts.append(
            f'<line x1="{x:.0f}" x2="{x + 18:.0f}" y1="{TOP - 16}" y2="{TOP - 16}" stroke="{color}" '
            f'stroke-width="2"{dash}/><text x="{x + 23:.0f}" y="{TOP - 12}">{escape(each.name)}</text>'
        )
    return parts


def _ticks(most: float) -> list[float]:
    """Round numbers from 0 to just above `most`, about five steps."""
    if most <= 0:
        return [0.0, 1.0]
    rough = most / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1.0, 2.0, 2.5, 5.0, 10.0) if m * power >= rough)
    return [step * i for i in range(math.ceil(most / step - 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten around the range."""
    power = math.floor(math.log10(low))
    marks = [m * 10.0**p for p in range(power, math.ceil(math.log10(high)) + 2) for m in (1.0, 2.0, 5.0)]
    first = max(i for i, mark in enumerate(marks) if mark <= low * (1 + 1e-9))
    last = min(i for i, mark in enumerate(marks) if mark >= high * (1 - 1e-9))
    return marks[first : max(last, first + 1) + 1]


def _number(value: float) -> str:
    if value >= 1e4 or (value >= 1024 and value % 1024 == 0):
        return f"{value / 1024:g}k" if value % 1024 == 0 else f"{value / 1e3:g}k"
    return f"{value:g}"
