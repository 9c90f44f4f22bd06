"""The run's clock, intervals and rates, with moments set by hand."""

from __future__ import annotations

from typing import Any

import pytest

from launch.report.timeline import (
    Cut,
    Interval,
    RunClock,
    binned,
    intervals,
    outages,
    rates,
    series,
    stages,
)


def _samples(*moments: float, **fields) -> list[dict]:
    return [{"time_s": 1000.0 + at, **fields} for at in moments]


def test_a_night_is_cut_out_of_the_axis():
    clock = RunClock(_samples(0, 1, 2, 3, 5000, 5001, 5002))
    assert clock.cuts == [Cut(3.0, 4997.0)]
    assert [clock(1000.0 + at) for at in (0, 2.5, 3, 5000, 5002)] == [0.0, 2.5, 3.0, 3.0, 5.0]
    assert clock(1000.0 + 2500) == 3.0, "a moment inside the gap falls on its cut"
    assert clock.end_s == 5.0


def test_a_slow_sample_is_no_cut():
    assert RunClock(_samples(0, 1, 2, 15, 16)).cuts == []
    assert RunClock([]).end_s == 0.0
    assert RunClock(_samples(4)).end_s == 0.0


def test_series_of_samples():
    status = [{"time_s": 10.0, "n": 1}, {"time_s": 12.0}, {"time_s": 13.0, "n": 3}]
    got = series(status, RunClock(status), lambda s: {"n": s["n"]} if "n" in s else {})
    assert got == {"n": [(0.0, 1.0), (3.0, 3.0)]}


def test_intervals_last_until_the_first_sample_without():
    status = [
        {"time_s": float(at), "label": label}
        for at, label in ((0, ""), (1, "x"), (2, "x"), (3, "y"), (4, ""), (5, "y"))
    ]
    got = intervals(status, RunClock(status), lambda s: {"thing": s["label"]} if s["label"] else {})
    assert got == {
        "thing": [Interval(1.0, 3.0, "x"), Interval(3.0, 4.0, "y"), Interval(5.0, 5.0, "y")]
    }


def test_a_cut_ends_an_interval():
    status = _samples(0, 1, 2, 900, 901, stage="rl")
    assert stages(status, RunClock(status)) == [Interval(0.0, 2.0, "rl"), Interval(2.0, 3.0, "rl")]


def test_outages_are_open_breakers_and_pauses():
    status: list[dict[str, Any]] = [
        {"time_s": 0.0, "backends": [{"name": "sandbox", "state": "closed"}]},
        {"time_s": 1.0, "backends": [{"name": "sandbox", "state": "open"}]},
        {"time_s": 2.0, "backends": [{"name": "sandbox", "state": "half_open"}]},
        {"time_s": 3.0, "admission_held": True, "admission_reason": "entropy left its band"},
        {"time_s": 4.0},
    ]
    assert outages(status, RunClock(status)) == [
        Interval(1.0, 3.0, "breaker sandbox: open"),
        Interval(3.0, 4.0, "run paused: entropy left its band"),
    ]


def test_rates_of_a_counter():
    # 10/s for 2 s, nothing for 2 s, then a restart and 4 in the last second.
    points = [(0.0, 0.0), (1.0, 10.0), (2.0, 20.0), (4.0, 20.0), (5.0, 4.0)]
    assert rates(points, 5) == [
        (0.625, 10.0),
        (1.875, pytest.approx(6.0)),
        (3.125, 0.0),
        (4.375, 3.2),
    ]
    total = sum(rate * 1.25 for _, rate in rates(points, 5))
    assert total == pytest.approx(24.0), "nothing is lost between bins"
    assert rates([(0.0, 1.0)]) == []
    assert rates([(2.0, 1.0), (2.0, 5.0)]) == []


def test_binned_moments():
    assert binned([0.0, 0.9, 1.0, 9.99, 10.0, -1.0], 10.0, 10) == [3, 1, 0, 0, 0, 0, 0, 0, 0, 2]
    assert binned([], 0.0, 2) == [0, 0]
