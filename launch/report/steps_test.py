"""Parts of steps, resumes and curves, with figures worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from launch.report.steps import BETWEEN, UNBOOKED, curve, resumed_after, step_times, thinned


def _row(number: int, ended: float, lineage: float = 1.0, **parts: float) -> dict[str, Any]:
    times = {f"time_{name}_s": seconds for name, seconds in parts.items()}
    return {"step": number, "finished_at": ended, "lineage": lineage, **times}


ROWS = [
    _row(1, 100.0, wait=6.0, update=3.0, other=1.0, step=10.0),
    # Began at 107, so 7 s after step 1 ended; half a second of it was booked nowhere.
    _row(2, 115.0, wait=5.0, evaluate=2.0, other=0.5, step=8.0),
    _row(3, 900.0, lineage=2.0, wait=4.0, update=4.0, other=0.0, step=8.0),
]


def test_parts_add_up_to_the_step_and_the_time_between():
    times = step_times(ROWS)
    assert times.steps == [1, 2, 3]
    assert list(times.parts) == ["wait", "update", "evaluate", "other", UNBOOKED, BETWEEN]
    assert times.parts["wait"] == [6.0, 5.0, 4.0]
    assert times.parts["evaluate"] == [0.0, 2.0, 0.0]
    assert times.parts[UNBOOKED] == [0.0, 0.5, 0.0]
    assert times.parts[BETWEEN] == [0.0, 7.0, 0.0], "a resume is no time of the run"
    inside = [sum(v[i] for n, v in times.parts.items() if n != BETWEEN) for i in range(3)]
    assert inside == [10.0, 8.0, 8.0], "time_step_s"
    assert times.means()["wait"] == 5.0


def test_no_step_has_no_parts():
    assert step_times([]).steps == []
    assert step_times([{"step": 1, "loss": 2.0}]).steps == []
    assert step_times([]).means()["other"] == 0.0


def test_a_new_lineage_is_a_resume():
    assert resumed_after(ROWS, noted=[7]) == [2]
    plain = [{"step": 1}, {"step": 2}]
    assert resumed_after(plain, noted=[2, 1, 2]) == [1, 2], "rows of older runs carry none"
    assert resumed_after([], noted=[]) == []


def test_curves_leave_out_steps_without_the_scalar():
    rows: list[dict[str, Any]] = [
        {"step": 1, "loss": 2.0},
        {"step": 2},
        {"step": 3, "loss": None},
        {"step": 4, "loss": 1},
    ]
    assert curve(rows, "loss") == [(1.0, 2.0), (4.0, 1.0)]
    assert curve(rows, "loss", scale=100.0)[0] == (1.0, 200.0)


def test_thinning_keeps_the_mean():
    points = [(float(i), float(i % 4)) for i in range(1000)]
    few = thinned(points, 100)
    assert len(few) == 100
    assert few[0] == pytest.approx((4.5, 1.3))  # mean of 0 1 2 3 0 1 2 3 0 1
    assert sum(y for _, y in few) / 100 == pytest.approx(sum(y for _, y in points) / 1000)
    assert thinned(points[:3]) == points[:3]
