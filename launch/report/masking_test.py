"""Fates of attempts, and their shares by outcome and by length."""

from __future__ import annotations

from typing import Any

import pytest

from launch.report.masking import (
    Bias,
    FateRow,
    bias,
    by_length,
    by_outcome,
    fate,
    tokens_by_fate,
    trained_share,
)


def _attempt(reward: float | None = 1.0, **changes: Any) -> dict[str, Any]:
    row: dict[str, Any] = {
        "cause": "submitted", "reward": reward, "num_tokens": 100, "num_trainable_tokens": 30,
        "group_state": "trained", "group_reason": "", "consumed_at_version": 4,
        "num_tokens_trained": 30, "num_tokens_masked_stale": 0, "untrained_reason": "",
    }  # fmt: skip
    return row | changes


UNTOLD: dict[str, Any] = {
    "consumed_at_version": 0, "num_tokens_trained": None, "num_tokens_masked_stale": None,
    "untrained_reason": None,
}  # fmt: skip
ZERO: dict[str, Any] = {**UNTOLD, "group_state": "dropped", "group_reason": "zero_variance"}


@pytest.mark.parametrize(
    ("attempt", "want"),
    [
        (_attempt(), "trained"),
        (_attempt(**UNTOLD, group_state="ready"), "not consumed yet"),
        (_attempt(**ZERO), "zero variance"),
        (_attempt(**{**ZERO, "group_reason": "too_few_valid_members"}), "too few valid"),
        (_attempt(untrained_reason="stale", num_tokens_trained=0), "masked as stale"),
        (_attempt(untrained_reason="overlong", num_tokens_trained=0), "filtered as overlong"),
        (_attempt(untrained_reason="banned_id_sampled"), "rejected or empty"),
        (_attempt(num_trainable_tokens=0, **UNTOLD), "rejected or empty"),
        (_attempt(**{**ZERO, "group_reason": "corrupt_record"}), "rejected or empty"),
        (_attempt(None, cause="sandbox_failed", **UNTOLD), "infrastructure"),
        (_attempt(None, cause="early_stopped", **UNTOLD), "ours"),
        (_attempt(None, cause="unclassified", **UNTOLD), "unclassified"),
        (_attempt(None, cause="sandbox_failed", **ZERO), "infrastructure"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_fate(attempt, want):
    assert fate(attempt) == want


def test_the_trained_share_is_of_attempts_whose_fate_is_known():
    waiting = _attempt(**UNTOLD, group_state="ready")
    assert trained_share([_attempt(), _attempt(**ZERO), _attempt(**ZERO), waiting]) == 1 / 3
    assert trained_share([waiting]) is None


def test_tokens_of_a_trained_trajectory_may_be_stale():
    partly = _attempt(num_tokens_trained=22, num_tokens_masked_stale=8)
    assert tokens_by_fate(partly) == {"trained": 22, "masked as stale": 8}
    assert tokens_by_fate(_attempt(**ZERO)) == {"zero variance": 30}


def test_shares_by_outcome():
    attempts = [
        _attempt(1.0), _attempt(1.0, **ZERO), _attempt(0.5), _attempt(0.0),
        _attempt(0.0, num_tokens_trained=20, num_tokens_masked_stale=10),
        _attempt(None, cause="engine_failed", num_trainable_tokens=5, **UNTOLD),
    ]  # fmt: skip
    assert by_outcome(attempts) == [
        FateRow("solved", {"trained": 1, "zero variance": 1}, {"trained": 30, "zero variance": 30}),
        FateRow("partly", {"trained": 1}, {"trained": 30}),
        FateRow("failed", {"trained": 2}, {"trained": 50, "masked as stale": 10}),
        FateRow("no reward", {"infrastructure": 1}, {"infrastructure": 5}),
    ]


def test_shares_by_length():
    lengths = [10, 20, 30, 40, 50, 60, 70, 80, 90, 1000]
    attempts = [_attempt(num_tokens=n, **(ZERO if n > 80 else {})) for n in lengths]
    rows = by_length(attempts)
    assert [row.bucket for row in rows] == [
        "10 to 20", "30 to 40", "50 to 60", "70 to 80", "90 to 1,000",
    ]  # fmt: skip
    assert [row.num for row in rows] == [2, 2, 2, 2, 2]
    assert rows[-1].trajectories == {"zero variance": 2}
    assert by_length([]) == []
    same = by_length([_attempt(num_tokens=7)] * 4)
    assert [(row.bucket, row.num) for row in same] == [("7", 4)]


def test_bias_compares_what_is_trained_with_what_was_scored():
    attempts = [
        _attempt(1.0, num_tokens=10), _attempt(0.0, num_tokens=30),
        _attempt(0.0, num_tokens=80, **ZERO), _attempt(None, cause="engine_failed", **UNTOLD),
        _attempt(1.0, num_tokens=999, **UNTOLD),
    ]  # fmt: skip
    assert bias(attempts, "reward") == Bias(1 / 3, 0.5)
    assert bias(attempts, "num_tokens") == Bias(40.0, 20.0)
    assert bias([_attempt(**ZERO)], "reward") is None
