"""Runs held-out evaluations through the rollout manager and keeps their results.

Owner of `metrics/evaluations.json`: {name: {stage, pool, temperature, agent, weight_version,
tasks}}, and `step` in those that the trainer asked for during RL; and of `metrics/best.json`, the
best of these: {step, weight_version, pass_at_1}. An evaluation is pinned to one weight_version; the
job publishes nothing while one runs.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from launch.errors import JobFailed
from launch.run_directory import write_json
from proto import rollout_pb2, trajectory_pb2
from rollout.client import (
    ConflictError,
    DeadlineError,
    RolloutClient,
    UnavailableError,
    evaluation_was_cancelled,
)

_POLL_S = 20.0
_RETRY_S = 0.2
_RECORD_TIMEOUT_S = 60.0


def cause_name(cause: int) -> str:
    """CAUSE_TURN_CAP -> turn_cap"""
    return trajectory_pb2.Cause.Name(cause).removeprefix("CAUSE_").lower()


def evaluation_name(stage: str, temperature: float) -> str:
    """Name of an evaluation at the manager and in evaluations.json."""
    return f"{stage}-greedy" if temperature == 0 else f"{stage}-t{temperature:g}"


def load_evaluations(metrics: Path) -> dict[str, Any]:
    """Results by name; empty before the first."""
    path = metrics / "evaluations.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}


def is_evaluated(metrics: Path, stage: str, temperature: float) -> bool:
    """True when the result is there already."""
    return evaluation_name(stage, temperature) in load_evaluations(metrics)


async def evaluate(
    client: RolloutClient,
    metrics: Path,
    *,
    stage: str,
    temperature: float,
    attempts_per_task: int,
    pool: rollout_pb2.Pool = rollout_pb2.POOL_TEST,
    agent: str = "mini",
    flush_before: bool = False,
    timeout_s: float,
    republish: Callable[[], Awaitable[object]] | None = None,
) -> dict[str, Any]:
    """Evaluates and returns the result, which is also kept in metrics/evaluations.json.

    A result that is already there is returned as it is. republish publishes the same weights again,
    when the engines that served them are lost; the evaluation then starts over at their new version.
    Raises JobFailed at the deadline, and if it began with other settings before a resume.
    """
    deadline = time.monotonic() + timeout_s
    name = evaluation_name(stage, temperature)
    results = load_evaluations(metrics)
    if name in results:
        return dict(results[name])
    request = rollout_pb2.StartEvaluationRequest(
        name=name,
        pool=pool,
        attempts_per_task=attempts_per_task,
        temperature=temperature,
        agent=agent,
        flush_before=flush_before,
    )
    await _start(client, request, deadline)
    reply = await _finished(client, request, deadline, timeout_s, republish)
    result = _result(reply, stage, temperature, agent, pool)
    results[name] = result
    write_json(metrics / "evaluations.json", results)
    return result


async def record_periodic(client: RolloutClient, metrics: Path) -> None:
    """Adds the evaluations that the trainer asked for during RL, as metrics/selection.jsonl tells."""
    path = metrics / "selection.jsonl"
    candidates = (
        [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    )
    if not candidates:
        return
    results = load_evaluations(metrics)
    for candidate in candidates:
        name = candidate["evaluation"]
        if name in results:
            continue
        reply = await client.get_evaluation(
            rollout_pb2.GetEvaluationRequest(name=name), timeout_s=_RECORD_TIMEOUT_S
        )
        temperature = float(candidate["temperature"])
        result = _result(
            reply, f"rl-step-{candidate['step']}", temperature, "mini", rollout_pb2.POOL_DEV
        )
        results[name] = result | {"step": candidate["step"]}
    write_json(metrics / "evaluations.json", results)
    best = max(candidates, key=lambda c: (c["pass_at_1"], c["step"]))
    write_json(
        metrics / "best.json", {key: best[key] for key in ("step", "weight_version", "pass_at_1")}
    )


def _result(
    reply: rollout_pb2.GetEvaluationReply,
    stage: str,
    temperature: float,
    agent: str,
    pool: rollout_pb2.Pool,
) -> dict[str, Any]:
    return {
        "stage": stage,
        "pool": rollout_pb2.Pool.Name(pool).removeprefix("POOL_").lower(),
        "temperature": temperature,
        "agent": agent,
        "weight_version": reply.weight_version,
        "tasks": [
            {
                "task_id": task.task_id,
                "rewards": list(task.rewards),
                "causes": [cause_name(cause) for cause in task.causes],
                "attempt_ids": list(task.attempt_ids),
            }
            for task in reply.tasks
        ],
    }


async def _start(
    client: RolloutClient, request: rollout_pb2.StartEvaluationRequest, deadline: float
) -> None:
    """Starts it, or a cancelled one over; a manager that is being restarted is waited for."""
    while True:
        try:
            await client.start_evaluation(request)
            return
        except ConflictError as error:
            raise JobFailed(
                f"evaluation {request.name} began with other settings than "
                f"evaluation.attempts_per_task={request.attempts_per_task}: resume with the value "
                "that it began with, or start a new run"
            ) from error
        except (DeadlineError, UnavailableError):
            if time.monotonic() >= deadline:
                raise
            await asyncio.sleep(_RETRY_S)


async def _finished(
    client: RolloutClient,
    request: rollout_pb2.StartEvaluationRequest,
    deadline: float,
    timeout_s: float,
    republish: Callable[[], Awaitable[object]] | None,
) -> rollout_pb2.GetEvaluationReply:
    asked = rollout_pb2.GetEvaluationRequest(name=request.name)
    reply = rollout_pb2.GetEvaluationReply()
    while (left := min(_POLL_S, deadline - time.monotonic())) > 0:
        try:
            reply = await client.get_evaluation(asked, timeout_s=max(left, 0.1))
        except (DeadlineError, UnavailableError):
            await asyncio.sleep(_RETRY_S)
            continue
        if reply.finished and not evaluation_was_cancelled(reply):
            return reply
        if reply.republish_requested and republish is not None:
            await republish()
        if reply.finished or reply.republish_requested:
            await _start(client, request, deadline)
            await asyncio.sleep(_RETRY_S)
    raise JobFailed(
        f"evaluation {request.name} did not end within {timeout_s:.0f} s "
        f"({reply.num_finished} of {reply.num_attempts} attempts); raise evaluation.timeout_s"
    )
