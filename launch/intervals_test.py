"""Intervals against closed forms and hand-computed values."""

from __future__ import annotations

import pytest

from launch import intervals


def test_all_equal_uses_wilson():
    interval = intervals.pass_at_1({str(i): [1.0, 1.0] for i in range(24)})
    assert interval is not None
    # Wilson at p = 1: n / (n + z^2) = 24 / 27.8415
    assert interval.mean == 1.0
    assert interval.low == pytest.approx(0.86202, abs=1e-4)
    assert interval.high == pytest.approx(1.0)


def test_mean_is_over_tasks_not_attempts():
    interval = intervals.pass_at_1({"a": [1.0], "b": [0.0, 0.0, 0.0], "c": []})
    assert interval is not None
    assert interval.mean == 0.5
    assert interval.num_tasks == 2


def test_bootstrap_is_near_the_normal_interval_and_repeats():
    rewards = {str(i): [float(i % 4 == 0)] for i in range(400)}
    interval = intervals.pass_at_1(rewards)
    assert interval is not None
    half = 1.96 * (0.25 * 0.75 / 400) ** 0.5
    assert interval.low == pytest.approx(0.25 - half, abs=0.006)
    assert interval.high == pytest.approx(0.25 + half, abs=0.006)
    assert interval == intervals.pass_at_1(rewards)


def test_nothing_scored_is_none():
    assert intervals.pass_at_1({"a": []}) is None
    assert intervals.paired_difference({"a": [1.0]}, {"b": [1.0]}) is None


def test_pairing_removes_the_variance_between_tasks():
    before = {str(i): [float(i % 2)] for i in range(50)}
    after = {task: [rewards[0] * 0.5 + 0.25] for task, rewards in before.items()}
    shifted = {task: [rewards[0] + 0.1] for task, rewards in before.items()}
    centred = intervals.paired_difference(after, before)
    assert centred is not None
    assert centred.mean == pytest.approx(0.0)
    gain = intervals.paired_difference(shifted, before)
    assert gain is not None
    assert (gain.low, gain.mean, gain.high) == pytest.approx((0.1, 0.1, 0.1))
