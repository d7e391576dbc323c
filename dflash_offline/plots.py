"""Plots as plain SVG text: they open in a browser and need no plotting library."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

_WIDTH, _HEIGHT, _MARGIN = 720.0, 400.0, 56.0
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
    step = (_WIDTH - 2 * _MARGIN) / max(num_points - 1, 1)

    def x(place: int) -> float:
        return _MARGIN + place * step

    def y(share: float) -> float:
        return _HEIGHT - _MARGIN - share * (_HEIGHT - 2 * _MARGIN)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:.0f} {_HEIGHT:.0f}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH:.0f}" height="{_HEIGHT:.0f}" fill="white"/>',
        _text(_WIDTH / 2, 20.0, title, anchor="middle", size=14),
        _text(_WIDTH / 2, _HEIGHT - 12, x_label, anchor="middle"),
        _text(_MARGIN, _MARGIN - 12, y_label),
    ]
    for tick in range(6):
        share = tick / 5
        parts.append(
            f'<line x1="{_MARGIN:.0f}" x2="{_WIDTH - _MARGIN:.0f}" y1="{y(share):.1f}" '
            f'y2="{y(share):.1f}" stroke="#dddddd"/>'
        )
        parts.append(_text(_MARGIN - 8, y(share) + 4, f"{share:.1f}", anchor="end"))
    parts += [
        _text(x(place), _HEIGHT - _MARGIN + 18, str(place + 1), anchor="middle")
        for place in range(num_points)
    ]
    for number, (label, values) in enumerate(lines.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        points = " ".join(
            f"{x(place):.1f},{y(value):.1f}" for place, value in enumerate(values) if value == value
        )
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
        height = _MARGIN + 8.0 + 16.0 * number
        parts.append(_text(_WIDTH - _MARGIN, height, label, anchor="end", colour=colour))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", size: int = 12, colour: str = "#333333"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" '
        f'fill="{colour}">{escape(text)}</text>'
    )
