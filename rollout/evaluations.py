"""Evaluations: attempts at tasks under one pinned weight_version, never trained on.

Owner: rollout.manager. Works on the Ledger's connection. Their attempts stand first in the
queue. An attempt whose turn was sampled at another version is tried again within the bound
on retries, then ends as interrupted: never scored. Once every engine that served the version
is lost, the next publication cancels what has not ended; a repeated start then starts the whole
over at the version served now.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from proto import rollout_pb2 as pb
from proto import trajectory_pb2 as tpb
from rollout.attempt_table import Attempt, AttemptTable
from rollout.errors import BadRequestError, ConflictError, NotFoundError
from rollout.ledger import Ledger

AGENTS = ("mini", "oracle", "nop")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")


@dataclass(frozen=True, slots=True)
class Evaluation:
    """An evaluation that was started."""

    name: str
    temperature: float
    weight_version: int
    agent: str


class Evaluations:
    """Starts and reads evaluations."""

    def __init__(self, ledger: Ledger, attempts: AttemptTable) -> None:
        self._ledger = ledger
        self._attempts = attempts

    def is_known(self, request: pb.StartEvaluationRequest) -> bool:
        """True for a repeated start. Raises ConflictError for other arguments."""
        row = self._ledger.one("SELECT request FROM evaluations WHERE name=?", request.name)
        if row is None:
            return False
        if pb.StartEvaluationRequest.FromString(row["request"]) != request:
            raise ConflictError(
                f"evaluation {request.name} was started with other arguments; use another name"
            )
        return True

    def start(self, request: pb.StartEvaluationRequest, weight_version: int) -> None:
        """Queues the attempts of a new evaluation.

        Raises:
            BadRequestError: bad name, agent or numbers, or no tasks.
            NotFoundError: a task id is unknown.
        """
        _check(request)
        task_ids = list(request.task_ids) or self._ledger.task_ids(request.pool)
        if not task_ids:
            raise BadRequestError(
                f"evaluation {request.name}: pool {pb.Pool.Name(request.pool)} has no tasks; "
                "add some with AddTasks"
            )
        with self._ledger.transaction() as db:
            db.execute(
                "INSERT INTO evaluations VALUES(?,?,?,?)",
                (
                    request.name,
                    request.SerializeToString(deterministic=True),
                    request.temperature,
                    weight_version,
                ),
            )
            for index, task_id in enumerate(task_ids):
                if self._ledger.task_path(task_id) is None:
                    raise NotFoundError(f"evaluation {request.name}: no task {task_id}")
                for k in range(request.attempts_per_task):
                    attempt_id = f"e-{request.name}-{index:05d}-{k:02d}"
                    self._attempts.start_evaluation_attempt(
                        attempt_id, request.name, task_id, request.agent
                    )

    def get(self, name: str) -> Evaluation:
        """Raises NotFoundError."""
        row = self._ledger.one("SELECT * FROM evaluations WHERE name=?", name)
        if row is None:
            raise NotFoundError(f"no evaluation {name} was started")
        agent = pb.StartEvaluationRequest.FromString(row["request"]).agent
        return Evaluation(name, row["temperature"], row["weight_version"], agent)

    def unfinished(self) -> list[Evaluation]:
        """Those with an attempt that has not ended."""
        rows = self._ledger.db.execute(
            "SELECT DISTINCT evaluation FROM attempts WHERE evaluation<>'' AND state<>'finished'"
        ).fetchall()
        return [self.get(row[0]) for row in rows]

    def is_cancelled(self, name: str) -> bool:
        """True when it lost its version before it ended."""
        return bool(self._attempts.count("evaluation=? AND cause=?", name, tpb.CAUSE_CANCELLED))

    def cancel(self, name: str, weight_version: int, now_s: float) -> list[Attempt]:
        """Ends what has not ended, as `weight_version` has taken the place of the version that it is
        pinned to; returns the attempts that were under way.
        """
        evidence = (
            f"no engine serves weight_version {self.get(name).weight_version} any more, since "
            f"{weight_version} was published"
        )
        return self._attempts.cancel_evaluation(name, evidence, now_s)

    def restart(self, name: str, weight_version: int) -> None:
        """Pins a cancelled evaluation to another version and queues every attempt again, those that
        were scored too: an evaluation never mixes versions.
        """
        with self._ledger.transaction() as db:
            db.execute(
                "UPDATE evaluations SET weight_version=? WHERE name=?", (weight_version, name)
            )
            self._attempts.requeue_evaluation(name)

    def progress(self, name: str) -> pb.GetEvaluationReply:
        """How far it is; with every task's results once all attempts ended."""
        evaluation = self.get(name)
        total = self._attempts.count("evaluation=?", name)
        finished = self._attempts.count("evaluation=? AND state='finished'", name)
        reply = pb.GetEvaluationReply(
            finished=finished == total,
            num_finished=finished,
            num_attempts=total,
            weight_version=evaluation.weight_version,
        )
        if reply.finished:
            reply.tasks.extend(self._results(name))
        return reply

    def _results(self, name: str) -> list[pb.EvaluatedTask]:
        tasks: dict[str, pb.EvaluatedTask] = {}
        for attempt in self._attempts.select("evaluation=? ORDER BY number", name):
            task = tasks.setdefault(attempt.task_id, pb.EvaluatedTask(task_id=attempt.task_id))
            task.causes.append(tpb.Cause.ValueType(attempt.cause))
            task.attempt_ids.append(attempt.attempt_id)
            if attempt.reward is not None:
                task.rewards.append(attempt.reward)
        return list(tasks.values())


def _check(request: pb.StartEvaluationRequest) -> None:
    if not _NAME.fullmatch(request.name):
        raise BadRequestError(
            f"evaluation name {request.name!r}: want up to 80 letters, digits, '.', '_' and '-'"
        )
    if request.agent not in AGENTS:
        raise BadRequestError(
            f"evaluation {request.name}: agent {request.agent!r} is none of {AGENTS}"
        )
    if request.attempts_per_task < 1 or request.temperature < 0:
        raise BadRequestError(
            f"evaluation {request.name}: got attempts_per_task {request.attempts_per_task} and "
            f"temperature {request.temperature}; want at least 1, and 0 or more"
        )
