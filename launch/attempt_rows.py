"""Finished training attempts as flat rows: `metrics/attempts.jsonl`, which the report reads.

Owner of that file. It is written from the manager when a job ends, and from the ledger when a
report is wanted of a run that has not ended, or was killed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from launch.evaluation import cause_name
from launch.programs import run_program
from launch.run_directory import RunDirectory
from proto import rollout_pb2
from rollout.client import read_attempts

_EVIDENCE_CHARS = 400
_LEDGER_TIMEOUT_S = 120.0


def attempt_row(summary: rollout_pb2.AttemptSummary) -> dict[str, Any]:
    """One attempt as a flat row: times in seconds, moments in Unix seconds."""
    ref, report, turns = summary.ref, summary.report, summary.turn_times
    trained = summary.trained if summary.HasField("trained") else None
    return {
        "attempt_id": ref.attempt_id,
        "group_id": ref.group_id,
        "task_id": ref.task_id,
        "evaluation": summary.evaluation,
        "cause": cause_name(ref.cause),
        "reward": ref.reward if ref.HasField("reward") else None,
        "num_tokens": ref.num_tokens,
        "num_trainable_tokens": ref.num_trained_tokens,
        "num_turns": ref.num_turns,
        "num_tries": summary.num_tries,
        "oldest_weight_version": ref.oldest_weight_version,
        "newest_weight_version": ref.newest_weight_version,
        "consumed_at_version": summary.consumed_at_version,
        "group_state": summary.group_state,
        "group_reason": summary.group_reason,
        # What the trainer said of it; None: nothing yet.
        "num_tokens_trained": trained.num_tokens if trained else None,
        "num_tokens_masked_stale": trained.num_tokens_masked_stale if trained else None,
        "untrained_reason": trained.untrained_reason if trained else None,
        "started_at_s": _moment(ref.started_at),
        "finished_at_s": _moment(ref.finished_at),
        "duration_s": _moment(ref.finished_at) - _moment(ref.started_at),
        "environment_time_s": _seconds(report.environment_time),
        "grading_environment_time_s": _seconds(report.grading_environment_time),
        "model_time_s": _seconds(report.model_time),
        "queued_time_s": _seconds(turns.queued),
        "generating_time_s": _seconds(turns.generating),
        "engine_queued_time_s": _seconds(turns.engine_queued),
        "window_paused_time_s": _seconds(turns.window_paused),
        "tool_time_s": _seconds(report.tool_time),
        "verifier_time_s": _seconds(report.verifier_time),
        "overhead_time_s": _seconds(report.overhead_time),
        "num_model_calls": report.num_model_calls,
        "num_commands": report.num_commands,
        "num_execs": report.num_execs,
        "evidence": report.evidence[:_EVIDENCE_CHARS],
        "earlier_tries": [
            {
                "cause": cause_name(ended.cause),
                "evidence": ended.evidence[:_EVIDENCE_CHARS],
                "ended_at_s": _moment(ended.ended_at),
            }
            for ended in summary.earlier_tries
        ],
    }


def write_attempt_rows(metrics: Path, summaries: Iterable[rollout_pb2.AttemptSummary]) -> None:
    """Writes `attempts.jsonl` whole; readers see the old one or the new one."""
    temporary = metrics / ".attempts.jsonl.new"
    with temporary.open("w") as file:
        file.writelines(json.dumps(attempt_row(summary)) + "\n" for summary in summaries)
    os.replace(temporary, metrics / "attempts.jsonl")


async def refresh_from_ledger(run: RunDirectory) -> None:
    """Brings attempts.jsonl of a run that has not finished up to date with its ledger.

    Raises JobFailed when the ledger cannot be read; the old file then stays.
    """
    done = run.load_state().get("finished") and (run.metrics / "attempts.jsonl").exists()
    if done or not run.ledger.exists():
        return
    run.metrics.mkdir(exist_ok=True)
    out = run.metrics / ".attempts.read"
    try:
        await run_program(
            "rollout.attempt_summaries",
            *("--ledger", run.ledger, "--out", out),
            log=run.logs / "report.log",
            timeout_s=_LEDGER_TIMEOUT_S,
        )
        write_attempt_rows(run.metrics, read_attempts(out))
    finally:
        out.unlink(missing_ok=True)


def _seconds(duration: Duration) -> float:
    return duration.ToTimedelta().total_seconds()


def _moment(timestamp: Timestamp) -> float:
    return timestamp.ToNanoseconds() / 1e9
