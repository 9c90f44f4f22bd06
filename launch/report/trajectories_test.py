"""A trajectory's time and the long tail, with figures worked out by hand."""

from __future__ import annotations

import pytest

from launch.report.trajectories import PARTS, mean_parts, slowest_tasks, tail, time_parts

ATTEMPT = {
    "cause": "submitted", "task_id": "t", "reward": 1.0, "num_tries": 1,
    "duration_s": 10.0,
    "environment_time_s": 1.0, "grading_environment_time_s": 0.4,
    "model_time_s": 5.0,
    "queued_time_s": 1.0, "generating_time_s": 3.5, "engine_queued_time_s": 0.5,
    "window_paused_time_s": 1.0,
    "tool_time_s": 1.5, "verifier_time_s": 1.2, "overhead_time_s": 0.3,
}  # fmt: skip


def test_parts_add_up_to_the_wall_time():
    parts = time_parts(ATTEMPT)
    assert tuple(parts) == PARTS
    assert parts == pytest.approx(
        {
            "sandbox start": 0.6, "admission queue": 1.0, "engine queue": 0.5, "update window": 1.0,
            "decode": 2.0, "rest of model calls": 0.5, "tools": 1.5, "grading sandbox": 0.4,
            "grading": 1.2, "harness": 0.3, "earlier tries": 0.0, "other": 1.0,
        }
    )  # fmt: skip
    assert sum(parts.values()) == pytest.approx(10.0)


def test_what_earlier_tries_took_is_told_apart():
    parts = time_parts({**ATTEMPT, "num_tries": 2, "duration_s": 17.0})
    assert (parts["earlier tries"], parts["other"]) == pytest.approx((8.0, 0.0))
    assert sum(parts.values()) == pytest.approx(17.0)


@pytest.mark.parametrize(
    ("changes", "wall_s"),
    [
        ({"duration_s": 8.0}, 8.0),
        ({"generating_time_s": 8.0}, 10.0),
        ({"window_paused_time_s": 9.0}, 10.0),
        ({"engine_queued_time_s": 9.0}, 10.0),
        ({"grading_environment_time_s": 3.0}, 10.0),
        ({"model_time_s": None, "tool_time_s": -1.0}, 10.0),
    ],
    ids=["worker_over_wall", "resend", "window_over", "queue_over", "grading_over", "unset"],
)
def test_parts_add_up_where_clocks_disagree(changes, wall_s):
    parts = time_parts({**ATTEMPT, **changes})
    assert sum(parts.values()) == pytest.approx(wall_s)
    assert min(parts.values()) >= 0.0


def test_an_attempt_that_never_ran_is_all_other():
    parts = time_parts({"cause": "interrupted", "duration_s": 3.0})
    assert parts["other"] == 3.0
    assert mean_parts([]) == {}
    assert mean_parts([ATTEMPT, {"duration_s": 0.0}])["decode"] == pytest.approx(1.0)


def _walls(task: str, *walls: float) -> list[dict]:
    return [
        {"task_id": task, "cause": "turn_cap", "reward": None if i else 0.5, "duration_s": wall}
        for i, wall in enumerate(walls)
    ]


def test_tail_of_a_task():
    got = tail("a", _walls("a", 1.0, 2.0, 3.0, 4.0, 101.0))
    # Linear: p95 lies 0.8 of the way from the 4th to the 5th of five.
    assert (got.p50_s, got.p95_s, got.max_s) == pytest.approx((3.0, 81.6, 101.0))
    assert (got.num, got.reward_mean, dict(got.causes)) == (5, 0.5, {"turn_cap": 5})


def test_slowest_tasks_come_first():
    attempts = _walls("quick", 1.0, 1.0) + _walls("slow", 9.0) + _walls("middle", 2.0, 6.0)
    assert [t.name for t in slowest_tasks(attempts, 2)] == ["slow", "middle"]
    assert slowest_tasks([], 3) == []
