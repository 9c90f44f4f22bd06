"""The job's patience with a process that is being restarted, and its last words."""

from __future__ import annotations

import asyncio
import io
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest
from rich.console import Console

from launch import job as job_module
from launch.errors import JobFailed
from launch.evaluation import evaluate
from launch.job import Job, _told_in_one_line
from launch.recipe import Recipe
from launch.run_directory import RunDirectory
from proto import rollout_pb2, trainer_pb2
from rollout.client import ConflictError, UnavailableError


def rpc_error(code: grpc.StatusCode) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details="why")


class FakeTrainer:
    """Answers from a script: replies and errors, in order."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.num_stages = 0

    async def get_status(self) -> trainer_pb2.GetStatusReply:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def run_stage(self, *_: Any) -> int:
        self.num_stages += 1
        return 2 if self.num_stages > 1 else 0


def train(tmp_path, monkeypatch, trainer: FakeTrainer, **run: Any) -> str:
    monkeypatch.setattr(job_module, "_POLL_S", 0.001)
    directory = RunDirectory(tmp_path)
    directory.create()
    recipe = Recipe.model_validate({"run": run})
    deployment: Any = SimpleNamespace()
    told = io.StringIO()
    job = Job(recipe, directory, deployment, Console(file=told))
    client: Any = trainer
    asyncio.run(job._train(client, trainer_pb2.STAGE_KIND_RL, "rl", 3))
    return told.getvalue()


def status(state: trainer_pb2.StageState, *finished: str) -> trainer_pb2.GetStatusReply:
    return trainer_pb2.GetStatusReply(state=state, finished_stages=finished)


def test_a_trainer_that_is_restarted_gets_its_stage_again(tmp_path, monkeypatch):
    idle, running = trainer_pb2.STAGE_STATE_IDLE, trainer_pb2.STAGE_STATE_RUNNING
    away = rpc_error(grpc.StatusCode.UNAVAILABLE)
    slow = rpc_error(grpc.StatusCode.DEADLINE_EXCEEDED)
    trainer = FakeTrainer(
        away, status(idle), status(running), away, slow, away, status(idle), status(idle, "rl")
    )
    told = train(tmp_path, monkeypatch, trainer)
    assert trainer.num_stages == 2
    assert trainer.answers == []
    assert "rl goes on at step 3 of 3, from the checkpoint of step 2" in told
    assert RunDirectory(tmp_path).load_state()["resumed_at_steps"] == [2]


def test_a_stage_that_had_begun_says_where_it_goes_on(tmp_path, monkeypatch):
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics" / "rl.jsonl").write_text("{}")
    idle = status(trainer_pb2.STAGE_STATE_IDLE)
    trainer = FakeTrainer(idle, status(trainer_pb2.STAGE_STATE_IDLE, "rl"))
    told = train(tmp_path, monkeypatch, trainer)
    assert "rl goes on at step 1 of 3, without a checkpoint" in told


def test_patience_has_an_end(tmp_path, monkeypatch):
    away = rpc_error(grpc.StatusCode.UNAVAILABLE)
    trainer = FakeTrainer(*[away] * 1000)
    with pytest.raises(grpc.aio.AioRpcError):
        train(tmp_path, monkeypatch, trainer, start_timeout_s=0.05)


def test_what_cannot_pass_is_not_asked_again(tmp_path, monkeypatch):
    trainer = FakeTrainer(rpc_error(grpc.StatusCode.INTERNAL))
    with pytest.raises(grpc.aio.AioRpcError):
        train(tmp_path, monkeypatch, trainer)


def test_refusals_are_told_in_one_line():
    with pytest.raises(JobFailed, match=r"^the trainer: why \(INTERNAL\)$"), _told_in_one_line():
        raise rpc_error(grpc.StatusCode.INTERNAL)
    with (
        pytest.raises(JobFailed, match=r"^the manager: no \(ConflictError\)$"),
        _told_in_one_line(),
    ):
        raise ConflictError("no")


class LosingManager:
    """Away at first; then an evaluation loses its engines, is cancelled by the publication, and ends
    when it was started again."""

    def __init__(self) -> None:
        self.script: list[str] = []
        self.num_asked = 0

    async def start_evaluation(self, _request: Any) -> None:
        if not self.script:
            self.script.append("refused")
            raise UnavailableError("a window is open")
        self.script.append("started")

    async def get_evaluation(self, _request: Any, timeout_s: float) -> Any:
        self.num_asked += 1
        if self.num_asked == 1:
            raise UnavailableError("restarting")
        is_over = self.script[-2:] == ["published", "started"]
        return rollout_pb2.GetEvaluationReply(
            finished=is_over, republish_requested=not is_over, weight_version=2 + is_over
        )

    async def publish(self) -> None:
        self.script.append("published")


def test_an_evaluation_that_lost_its_engines_gets_its_weights_again(tmp_path):
    manager = LosingManager()
    client: Any = manager
    result = asyncio.run(
        evaluate(
            client,
            tmp_path,
            stage="base",
            temperature=1.0,
            attempts_per_task=1,
            timeout_s=60.0,
            republish=manager.publish,
        )
    )
    assert manager.script == ["refused", "started", "published", "started"]
    assert result["weight_version"] == 3
