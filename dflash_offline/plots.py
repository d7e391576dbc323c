"""Plots as plain SVG text: they open in a browser and need no plotting library."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

_WIDTH, _HEIGHT, _MARGIN = 720.0, 400.0, 56.0
_LEGEND_LINE = 16.0
_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#7f7f7f")


def acceptance_plot(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Draws the share of blocks that accept a token at each offset, one line per drafter and suite.

    Args:
        results: contents of `eval.json` by drafter name.
    """
    lines = {
        f"{name}, {suite}: {found['acceptance_length']:.2f}": found["accepted_by_offset"]
        for name, result in results.items()
        for suite, found in result["suites"].items()
    }
    return line_plot(
        lines,
        title="Accepted by offset (legend: acceptance length)",
        x_label="offset in the block",
        y_label="share of blocks",
    )


def line_plot(
    lines: Mapping[str, Sequence[float]], *, title: str, x_label: str, y_label: str
) -> str:
    """Draws lines over 1, 2, 3, ... with shares between 0 and 1 on the other axis."""
    num_points = max((len(values) for values in lines.values()), default=1)
    points = {
        label: [(float(place), value) for place, value in enumerate(values, start=1)]
        for label, values in lines.items()
    }
    return point_plot(
        points,
        title=title,
        x_label=x_label,
        y_label=y_label,
        x_ticks=[float(place) for place in range(1, num_points + 1)],
        y_ticks=[tick / 5 for tick in range(6)],
    )


def point_plot(
    lines: Mapping[str, Sequence[tuple[float, float]]],
    *,
    title: str,
    x_label: str,
    y_label: str,
    x_ticks: Sequence[float],
    y_ticks: Sequence[float],
    marks: Mapping[str, float] | None = None,
) -> str:
    """Draws lines through points; one that is not a number interrupts its line.

    Args:
        lines: points from left to right by label.
        title: above the plot.
        x_label: below it.
        y_label: above the axis on the left.
        x_ticks: numbers written below; the first and the last are the plot's edges.
        y_ticks: numbers written on the left, likewise.
        marks: places on the lower axis to draw a thin line at, by what is written there.
    """
    x_low, x_high, y_low, y_high = x_ticks[0], x_ticks[-1], y_ticks[0], y_ticks[-1]
    # A sweep's drafters fill more lines than a plot has.
    height = max(_HEIGHT, 2 * _MARGIN + _LEGEND_LINE * len(lines))
    bottom = height - _MARGIN

    def x(value: float) -> float:
        share = (value - x_low) / (x_high - x_low) if x_high > x_low else 0.0
        return _MARGIN + share * (_WIDTH - 2 * _MARGIN)

    def y(value: float) -> float:
        share = (value - y_low) / (y_high - y_low)
        return bottom - share * (bottom - _MARGIN)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:.0f} {height:.0f}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH:.0f}" height="{height:.0f}" fill="white"/>',
        _text(_WIDTH / 2, 20.0, title, anchor="middle", size=14),
        _text(_WIDTH / 2, height - 12, x_label, anchor="middle"),
        _text(_MARGIN, _MARGIN - 12, y_label),
    ]
    for value in y_ticks:
        parts.append(_line(_MARGIN, y(value), _WIDTH - _MARGIN, y(value)))
        parts.append(_text(_MARGIN - 8, y(value) + 4, _number(value), anchor="end"))
    for value in x_ticks:
        parts.append(_text(x(value), bottom + 18, _number(value), anchor="middle"))
    for number, (label, value) in enumerate((marks or {}).items()):
        parts.append(_line(x(value), _MARGIN, x(value), bottom, dashed=True))
        # Neighbouring marks must not write over each other.
        above = bottom - 6 - 12 * (number % 4)
        parts.append(_text(x(value) + 3, above, label, size=10))
    for number, (label, points) in enumerate(lines.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        for part in _unbroken(points):
            # One point alone is a line to itself: its round ends make a dot.
            ends = part if len(part) > 1 else [*part, *part]
            path = " ".join(f"{x(across):.1f},{y(value):.1f}" for across, value in ends)
            parts.append(
                f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2" '
                'stroke-linecap="round"/>'
            )
        below = _MARGIN + 8.0 + _LEGEND_LINE * number
        parts.append(_text(_WIDTH - _MARGIN, below, label, anchor="end", colour=colour))
    return "\n".join([*parts, "</svg>"]) + "\n"


def round_ticks(low: float, high: float, *, count: int = 6) -> list[float]:
    """Round numbers, at equal distances, from at most `low` to at least `high`."""
    rough = max(high - low, 1e-9) / (count - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [number * step for number in range(first, last + 1)]


def _unbroken(points: Sequence[tuple[float, float]]) -> list[list[tuple[float, float]]]:
    """The stretches between points that are not numbers."""
    stretches: list[list[tuple[float, float]]] = [[]]
    for point in points:
        if math.isnan(point[1]):
            stretches.append([])
        else:
            stretches[-1].append(point)
    return [stretch for stretch in stretches if stretch]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) and abs(value) >= 2 else f"{value:.3g}"


def _line(x1: float, y1: float, x2: float, y2: float, *, dashed: bool = False) -> str:
    dashes = ' stroke-dasharray="3 3"' if dashed else ""
    colour = "#999999" if dashed else "#dddddd"
    return (
        f'<line x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}" stroke="{colour}"{dashes}/>'
    )


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", size: int = 12, colour: str = "#333333"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" '
        f'fill="{colour}">{escape(text)}</text>'
    )
