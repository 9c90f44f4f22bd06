"""Evaluations that the trainer asked for are kept beside the job's own, with their step."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from launch.errors import JobFailed
from launch.evaluation import evaluate, load_evaluations, record_periodic
from proto import rollout_pb2, trajectory_pb2
from rollout.client import ConflictError


class FinishedEvaluations:
    """Answers get_evaluation as a manager that has finished every evaluation."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def get_evaluation(
        self, request: rollout_pb2.GetEvaluationRequest, timeout_s: float
    ) -> rollout_pb2.GetEvaluationReply:
        self.asked.append(request.name)
        version = int(request.name.rpartition("-v")[2])
        reply = rollout_pb2.GetEvaluationReply(finished=True, weight_version=version)
        reply.tasks.add(
            task_id="t",
            rewards=[1.0, 0.0],
            causes=[trajectory_pb2.CAUSE_SUBMITTED, trajectory_pb2.CAUSE_TURN_CAP],
            attempt_ids=["a", "b"],
        )
        return reply


def candidate(step: int, score: float) -> dict[str, Any]:
    return {
        "step": step,
        "weight_version": step + 2,
        "evaluation": f"rl-step-{step}-v{step + 2}",
        "temperature": 1.0,
        "pass_at_1": score,
        "num_scored": 2,
        "duration_s": 1.0,
        "checkpoint": f"000002-rl-{step}",
    }


def test_candidates_become_dev_evaluations_once(tmp_path):
    rows = [candidate(0, 0.25), candidate(8, 0.5), candidate(16, 0.5), candidate(24, 0.25)]
    (tmp_path / "selection.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    client: Any = FinishedEvaluations()
    for _ in range(2):  # the second time as after a resume
        asyncio.run(record_periodic(client, tmp_path))
    assert client.asked == [row["evaluation"] for row in rows]
    kept = load_evaluations(tmp_path)
    assert [(e["stage"], e["pool"], e["step"], e["weight_version"]) for e in kept.values()] == [
        (f"rl-step-{step}", "dev", step, step + 2) for step in (0, 8, 16, 24)
    ]
    assert kept["rl-step-8-v10"]["tasks"] == [
        {
            "task_id": "t",
            "rewards": [1.0, 0.0],
            "causes": ["submitted", "turn_cap"],
            "attempt_ids": ["a", "b"],
        }
    ]
    best = json.loads((tmp_path / "best.json").read_text())
    assert best == {"step": 16, "weight_version": 18, "pass_at_1": 0.5}


def test_a_run_without_them_is_left_alone(tmp_path):
    client: Any = FinishedEvaluations()
    asyncio.run(record_periodic(client, tmp_path))
    assert list(tmp_path.iterdir()) == []


class RefusesToStart:
    """Answers as a manager that holds an evaluation of this name with other arguments."""

    async def start_evaluation(self, request: rollout_pb2.StartEvaluationRequest) -> None:
        raise ConflictError(f"evaluation {request.name} was started with other arguments")


def test_changed_settings_of_a_begun_evaluation_are_named(tmp_path):
    client: Any = RefusesToStart()
    call = evaluate(
        client, tmp_path, stage="sft", temperature=1.0, attempts_per_task=3, timeout_s=5.0
    )
    with pytest.raises(JobFailed, match=r"sft-t1 .*attempts_per_task=3: resume with the value"):
        asyncio.run(call)
    assert not (tmp_path / "evaluations.json").exists()
