"""A finished attempt as a row says what its summary says, in seconds."""

from __future__ import annotations

import json

from launch.attempt_rows import attempt_row, write_attempt_rows
from proto import rollout_pb2, trajectory_pb2


def _summary() -> rollout_pb2.AttemptSummary:
    summary = rollout_pb2.AttemptSummary(num_tries=2, group_state="trained")
    ref, report = summary.ref, summary.report
    ref.attempt_id, ref.task_id, ref.cause = "a", "t", trajectory_pb2.CAUSE_SUBMITTED
    ref.num_tokens, ref.num_trained_tokens, ref.reward = 60, 20, 0.0
    ref.started_at.FromMilliseconds(10_000)
    ref.finished_at.FromMilliseconds(12_500)
    report.environment_time.FromMilliseconds(300)
    report.grading_environment_time.FromMilliseconds(100)
    report.evidence = "x" * 1000
    summary.turn_times.generating.FromMilliseconds(750)
    summary.turn_times.window_paused.FromMilliseconds(50)
    summary.trained.num_tokens, summary.trained.num_tokens_masked_stale = 15, 5
    ended = summary.earlier_tries.add(cause=trajectory_pb2.CAUSE_SANDBOX_FAILED, evidence="died")
    ended.ended_at.FromMilliseconds(11_000)
    return summary


def test_row_of_an_attempt():
    row = attempt_row(_summary())
    assert (row["duration_s"], row["started_at_s"], row["reward"]) == (2.5, 10.0, 0.0)
    assert (row["environment_time_s"], row["grading_environment_time_s"]) == (0.3, 0.1)
    assert (row["generating_time_s"], row["window_paused_time_s"]) == (0.75, 0.05)
    assert (row["num_trainable_tokens"], row["num_tokens_trained"]) == (20, 15)
    assert (row["num_tokens_masked_stale"], row["untrained_reason"]) == (5, "")
    assert row["earlier_tries"] == [
        {"cause": "sandbox_failed", "evidence": "died", "ended_at_s": 11.0}
    ]
    assert len(row["evidence"]) == 400


def test_unset_is_none_and_not_zero():
    row = attempt_row(rollout_pb2.AttemptSummary())
    assert row["reward"] is row["num_tokens_trained"] is row["untrained_reason"] is None


def test_rows_replace_the_old_file(tmp_path):
    write_attempt_rows(tmp_path, [_summary(), _summary()])
    write_attempt_rows(tmp_path, [_summary()])
    lines = (tmp_path / "attempts.jsonl").read_text().splitlines()
    assert [json.loads(line)["attempt_id"] for line in lines] == ["a"]
    assert [path.name for path in tmp_path.iterdir()] == ["attempts.jsonl"]
