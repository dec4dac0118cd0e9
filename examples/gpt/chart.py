"""Line charts as SVG, without a plotting library: axes with units, ticks at round numbers, a legend."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, PANEL_HEIGHT = 760, 300
LEFT, RIGHT, TOP, BOTTOM = 76, 20, 40, 52
TICKS = 6
"""About how many ticks an axis gets."""
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
"""Okabe and Ito's, which the colour-blind can tell apart."""
DASHES = ("", "6 4", "2 3", "8 3 2 3")


@dataclass(frozen=True, kw_only=True)
class Series:
    """A named line; x and y of one length. A line may be drawn over another, so each has dashes of its own."""

    name: str
    x: Sequence[float]
    y: Sequence[float]

    def finite(self) -> Series:
        """The line without the points that no axis can show."""
        points = [(x, y) for x, y in zip(self.x, self.y, strict=True) if math.isfinite(y)]
        return Series(name=self.name, x=[x for x, _ in points], y=[y for _, y in points])


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One chart: what its axes show, in which units, and its lines.

    Raises:
        ValueError: there is nothing to draw, or a logarithmic axis is given what has no logarithm.
    """

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    logarithmic: bool = False

    def __post_init__(self) -> None:
        values = [value for line in self.series for value in (*line.x, *line.y)]
        if not values or not all(map(math.isfinite, values)):
            raise ValueError(f"{self.title!r} needs at least one point, and only finite ones")
        if any(len(line.x) != len(line.y) for line in self.series):
            raise ValueError(f"{self.title!r} has a line with more of x than of y, or fewer")
        if self.logarithmic and min(value for line in self.series for value in line.y) <= 0.0:
            raise ValueError(f"{self.title!r} has values that a logarithmic axis cannot show")


@dataclass(frozen=True, kw_only=True)
class Axis:
    """Where values lie along one axis.

    Attributes:
        low, high: its ends, on the scale drawn: powers of ten are their exponents on a logarithmic one.
        start, end: where the ends lie, in pixels.
        ticks: positions on the scale drawn, and what to write there.
    """

    low: float
    high: float
    start: float
    end: float
    ticks: tuple[tuple[float, str], ...]

    def place(self, value: float) -> float:
        """The pixel of a value of the scale drawn."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def round_ticks(low: float, high: float, count: int = TICKS) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten from low to high, about so many."""
    if not low < high:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def linear_axis(values: Sequence[float], start: float, end: float) -> Axis:
    """An axis that holds all values and ends on them, or a little beyond where they are one."""
    low, high = min(values), max(values)
    if low == high:
        low, high = low - 0.5, high + 0.5
    ticks = tuple((tick, f"{tick:g}" if tick else "0") for tick in round_ticks(low, high))
    return Axis(low=low, high=high, start=start, end=end, ticks=ticks)


def logarithmic_axis(values: Sequence[float], start: float, end: float) -> Axis:
    """An axis of whole decades."""
    low = math.floor(math.log10(min(values)))
    high = max(low + 1, math.ceil(math.log10(max(values))))
    ticks = tuple((float(power), f"{10.0**power:g}") for power in range(low, high + 1))
    return Axis(low=low, high=high, start=start, end=end, ticks=ticks)


def _text(x: float, y: float, words: str, attributes: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {attributes}>{escape(words)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, attributes: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" {attributes}/>'


def _panel(panel: Panel, top: float) -> list[str]:
    left, right, bottom = LEFT, WIDTH - RIGHT, top + PANEL_HEIGHT - BOTTOM
    x_values = [x for line in panel.series for x in line.x]
    y_values = [y for line in panel.series for y in line.y]
    make = logarithmic_axis if panel.logarithmic else linear_axis
    x_axis, y_axis = linear_axis(x_values, left, right), make(y_values, bottom, top + TOP)
    middle = (y_axis.start + y_axis.end) / 2
    parts = [_text(left, top + TOP - 14, panel.title, 'font-weight="bold"')]
    for value, label in y_axis.ticks:
        y = y_axis.place(value)
        parts.append(_line(left, y, right, y, 'stroke="#e0e0e0"'))
        parts.append(_text(left - 8, y + 4, label, 'text-anchor="end"'))
    for value, label in x_axis.ticks:
        x = x_axis.place(value)
        parts.append(_line(x, bottom, x, bottom + 5, 'stroke="#333333"'))
        parts.append(_text(x, bottom + 19, label, 'text-anchor="middle"'))
    parts.append(_line(left, bottom, right, bottom, 'stroke="#333333"'))
    parts.append(_line(left, bottom, left, y_axis.end, 'stroke="#333333"'))
    parts.append(_text((left + right) / 2, bottom + 40, panel.x_label, 'text-anchor="middle"'))
    turned = f'text-anchor="middle" transform="rotate(-90 18 {middle:.1f})"'
    parts.append(_text(18, middle, panel.y_label, turned))
    for index, line in enumerate(panel.series):
        dashes = DASHES[index % len(DASHES)]
        style = f'fill="none" stroke="{COLOURS[index % len(COLOURS)]}" stroke-width="1.6"'
        style += f' stroke-dasharray="{dashes}"' if dashes else ""
        heights = map(math.log10, line.y) if panel.logarithmic else line.y
        points = " ".join(
            f"{x_axis.place(x):.1f},{y_axis.place(y):.1f}"
            for x, y in zip(line.x, heights, strict=True)
        )
        parts.append(f'<polyline points="{points}" {style}/>')
        y = top + TOP + 16 + 18 * index
        parts.append(_line(right - 250, y - 4, right - 222, y - 4, style))
        parts.append(_text(right - 214, y, line.name))
    return parts


def draw(panels: Sequence[Panel], caption: str) -> str:
    """An SVG document of panels, one below the other, with a caption under them."""
    height = PANEL_HEIGHT * len(panels) + 28
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12" fill="#222222">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for index, panel in enumerate(panels):
        parts += _panel(panel, index * PANEL_HEIGHT)
    parts.append(_text(LEFT, height - 10, caption, 'fill="#555555"'))
    return "\n".join([*parts, "</svg>", ""])
