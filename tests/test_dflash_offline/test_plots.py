"""Plots: well-formed SVG, every line whole or broken where a number is missing, round ticks."""

import math
from xml.etree import ElementTree

import pytest

from dflash_offline.plots import line_plot, point_plot, round_ticks

SVG = "{http://www.w3.org/2000/svg}"


def plot_of(lines, **arguments):
    text = point_plot(
        lines,
        title="a & b",
        x_label="x",
        y_label="y",
        x_ticks=[0.0, 10.0],
        y_ticks=[0.0, 1.0],
        **arguments,
    )
    return ElementTree.fromstring(text)


def test_a_line_breaks_where_a_number_is_missing():
    plot = plot_of(
        {"whole": [(0.0, 0.0), (10.0, 1.0)], "broken": [(0.0, 1.0), (5.0, math.nan), (10.0, 1.0)]}
    )
    assert len(plot.findall(f"{SVG}polyline")) == 3


def test_edges_of_the_plot_are_its_first_and_last_ticks():
    (line,) = plot_of({"line": [(0.0, 0.0), (10.0, 1.0)]}).findall(f"{SVG}polyline")
    assert line.get("points") == "56.0,344.0 664.0,56.0"


def test_a_point_alone_is_a_dot():
    (line,) = plot_of({"line": [(0.0, 0.0)]}).findall(f"{SVG}polyline")
    assert line.get("points") == "56.0,344.0 56.0,344.0"
    assert line.get("stroke-linecap") == "round"


@pytest.mark.parametrize("num_lines", [1, 18, 19, 100])
def test_a_legend_of_any_length_lies_inside(num_lines):
    plot = plot_of({f"drafter {n}": [(0.0, 0.0), (10.0, 1.0)] for n in range(num_lines)})
    height = float(plot.get("viewBox").split()[-1])
    labels = [each for each in plot.findall(f"{SVG}text") if "drafter" in (each.text or "")]
    assert len(labels) == num_lines
    assert all(56.0 <= float(each.get("y")) <= height - 56.0 for each in labels)
    assert height >= 400.0


def test_marks_and_labels_are_written():
    plot = plot_of({"d < e": [(0.0, 0.0)]}, marks={"killed": 5.0})
    texts = [each.text for each in plot.findall(f"{SVG}text")]
    assert {"a & b", "d < e", "killed"} <= set(texts)


def test_shares_are_drawn_over_1_2_3():
    plot = ElementTree.fromstring(line_plot({"a": [1.0, 0.0]}, title="", x_label="", y_label=""))
    (line,) = plot.findall(f"{SVG}polyline")
    assert line.get("points") == "56.0,56.0 664.0,344.0"


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.0, 100.0, [0, 20, 40, 60, 80, 100]),
        (3.0, 13_100.0, [0, 5000, 10_000, 15_000]),
        (0.0, 0.9, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (5.0, 5.0, [5]),
    ],
)
def test_ticks_are_round_and_cover_everything(low, high, ticks):
    assert round_ticks(low, high) == pytest.approx(ticks)
