"""Scales, ticks and numbers; and that charts put values where they belong."""

from __future__ import annotations

import re

import pytest

from launch.report.charts import (
    Axes,
    Interval,
    Key,
    Line,
    Range,
    StackedRow,
    intervals,
    line_chart,
    ranges,
    stacked_columns,
    stacked_rows,
)
from launch.report.svg import Scale, clip, log_ticks, nice_ticks, number

AXES = Axes("step", "s", integer_x=True)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"), (1, "1"), (0.5, "0.5"), (12345.6, "12,346"), (0.0123, "0.0123"), (99.96, "100"),
        (1.2e-7, "1.2e-7"), (-0.3, "-0.3"), (2.5e9, "2.5e9"), (100, "100"), (1e-12, "1e-12"),
    ],
)  # fmt: skip
def test_numbers_for_people(value, text):
    assert number(value) == text


@pytest.mark.parametrize(
    ("low", "high", "want"),
    [
        (0, 9.3, [0, 2, 4, 6, 8, 10]),
        (0, 0.012, [0, 0.0025, 0.005, 0.0075, 0.01, 0.0125]),
        (-0.33, -0.27, [-0.34, -0.32, -0.3, -0.28, -0.26]),
        (0, 0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
    ],
    ids=["plain", "small", "negative", "flat"],
)
def test_ticks_cover_the_values_and_are_round(low, high, want):
    assert nice_ticks(low, high) == pytest.approx(want)


def test_integer_ticks_are_integers():
    assert all(tick == int(tick) for tick in nice_ticks(1, 3, 5, integer=True))
    assert log_ticks(3e-8, 2e-3) == pytest.approx([1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2])


def test_scales():
    assert Scale(0, 10, 100, 200)(2.5) == 125
    assert Scale(1e-4, 1, 400, 0, log=True)(1e-2) == pytest.approx(200)
    assert clip("django__django-12345", 11) == "djang…12345"
    assert clip("submitted 8, turn_cap 2", 12, at_end=True) == "submitted 8…"


def test_nothing_to_draw_is_no_plot():
    assert line_chart("x", [Line("a", "blue", [])], AXES) is None
    assert stacked_columns("x", [], [], AXES) is None
    assert stacked_columns("x", [1.0], [(Key("a", "blue"), [0.0])], AXES) is None
    assert stacked_rows("x", [Key("a", "blue")], [StackedRow("r", [0.0])], "s") is None
    assert intervals("x", [], "%") is None
    assert ranges("x", [], "s", ("n",)) is None


def _rects(svg: str, color: str) -> list[tuple[float, ...]]:
    found = re.findall(
        rf'<rect x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)" class="f-{color}"',
        svg,
    )
    return [tuple(map(float, rect)) for rect in found]


def test_columns_stand_on_each_other_and_on_zero():
    parts = [(Key("wait", "slate"), [6.0, 1.0]), (Key("update", "blue"), [2.0, 1.0])]
    plot = stacked_columns("steps", [1.0, 2.0], parts, AXES)
    assert plot is not None
    waits, updates = _rects(plot.svg, "slate"), _rects(plot.svg, "blue")
    for (_, y, _, height), (_, above_y, _, above) in zip(waits, updates, strict=True):
        assert above_y + above == pytest.approx(y, abs=0.11)
        assert y + height == pytest.approx(198.0, abs=0.11), "the axis"
    assert waits[0][3] / waits[1][3] == pytest.approx(6.0, rel=0.01)
    assert "step 1: 8 s" in plot.svg


def test_shares_fill_the_row():
    keys = [Key("a", "blue"), Key("b", "red"), Key("never", "green")]
    plot = stacked_rows("x", keys, [StackedRow("r", [1.0, 3.0, 0.0])], "n", as_share=True)
    assert plot is not None
    (a,), (b,) = _rects(plot.svg, "blue"), _rects(plot.svg, "red")
    assert b[2] == pytest.approx(3 * a[2], rel=0.01)
    assert a[0] + a[2] == pytest.approx(b[0], abs=0.11)
    assert [key.label for key in plot.keys] == ["a", "b"]
    assert "b 3 n (75.0 %)" in plot.svg


def test_a_line_says_its_values_to_the_pointer_and_gaps_need_no_log():
    line = Line("gap", "blue", [(1.0, 1e-7), (2.0, 1e-3)], [(1.0, 0.0, 1e-6)])
    plot = line_chart("gap", [line], Axes("step", "nats", may_log=True))
    assert plot is not None
    assert "(log)" not in plot.svg, "the band reaches 0"
    logged = line_chart(
        "gap", [Line("gap", "blue", line.points)], Axes("step", "nats", may_log=True)
    )
    assert logged is not None
    assert "nats (log)" in logged.svg
    assert "step 2\ngap 0.001" in logged.svg


def test_intervals_and_ranges_name_their_values():
    plot = intervals("pass", [Interval("sft", "T=1", 38.0, 31.0, 44.5)], "%")
    assert plot is not None
    assert "sft T=1: 38 [31, 44.5]" in plot.svg
    tail = ranges("tail", [Range("task", 1.0, 2.0, 9.0, ("8",))], "s", ("attempts",))
    assert tail is not None
    assert "task: p50 1, p95 2, max 9 s" in tail.svg
