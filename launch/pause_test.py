"""What a user is told of a pause, when it ends the job, and how another command ends it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launch.errors import RunPaused, UsageError
from launch.pause import PauseWatch, let_go_on
from launch.run_directory import RunDirectory
from proto import rollout_pb2 as pb
from proto import rollout_pb2_grpc as pb_grpc
from proto import serving, trainer_pb2, trainer_pb2_grpc


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_pause_is_told_once_and_ends_the_job_at_its_deadline() -> None:
    told: list[str] = []
    clock = Clock()
    watch = PauseWatch("x", 60.0, told.append, clock)
    paused = pb.GetStatusReply(admission_held=True, admission_reason="9 of 50 ended unclassified")
    running = pb.GetStatusReply(admission_open=True)
    watch.look(running)
    assert told == []
    watch.look(paused)
    clock.now_s = 60.0
    watch.look(paused)
    (line,) = told
    assert "9 of 50 ended unclassified" in line and "`swe_rl resume x`" in line
    watch.look(running)
    assert told[1:] == ["the run goes on"]
    watch.look(pb.GetStatusReply(admission_reason="the rl stage is over"))
    watch.look(paused)
    clock.now_s = 120.0
    watch.look(paused)
    assert len(told) == 3, "the second pause has a deadline of its own"
    clock.now_s = 120.1
    with pytest.raises(RunPaused, match=r"9 of 50 .* `swe_rl resume x` goes on"):
        watch.look(paused)


def test_outages_are_told_when_they_begin_and_end() -> None:
    told: list[str] = []
    watch = PauseWatch("x", 60.0, told.append, Clock())

    def status(state: str) -> pb.GetStatusReply:
        sandbox = pb.BackendStatus(name="sandbox", state=state, detail="sandbox: 3 failures")
        return pb.GetStatusReply(
            backends=[sandbox, pb.BackendStatus(name="engine", state="closed")]
        )

    for state in ("closed", "open", "open", "half_open", "open"):
        watch.look(status(state))
    assert [line.partition(";")[0] for line in told] == ["outage: sandbox: 3 failures"]
    watch.look(status("closed"))
    assert told[1:] == ["outage over: sandbox"]


def test_a_guard_of_the_trainer_is_told_with_the_setting_and_ends_the_job_too() -> None:
    told: list[str] = []
    clock = Clock()
    watch = PauseWatch("x", 60.0, told.append, clock)
    running = pb.GetStatusReply(admission_open=True)
    reason = "grad_norm is 61, above trainer.rl.guards.max_grad_norm = 50 (step 7)"
    paused = trainer_pb2.GetStatusReply(state=trainer_pb2.STAGE_STATE_PAUSED, pause_reason=reason)
    asked = trainer_pb2.GetStatusReply(state=trainer_pb2.STAGE_STATE_PAUSED)
    watch.look(running, None)
    watch.look(running, asked)
    assert told == [], "whoever called Pause knows of it"
    watch.look(running, paused)
    (line,) = told
    assert line.startswith(f"the run is paused: {reason}. A checkpoint was saved.")
    assert "`swe_rl resume x --trainer.rl.guards.BAND=VALUE` (or `off`)" in line
    assert "after 60 s (run.max_pause_s) it ends" in line
    clock.now_s = 60.1
    with pytest.raises(RunPaused, match=r"max_grad_norm = 50 .*resume x --trainer") as ended:
        watch.look(running, paused)
    assert ended.value.exit_code == 3
    watch.look(running, trainer_pb2.GetStatusReply())
    assert told[1:] == ["the run goes on"]


class Manager(pb_grpc.RolloutManagerServicer):
    held = True

    async def GetStatus(self, request: Any, context: Any) -> pb.GetStatusReply:
        return pb.GetStatusReply(admission_held=self.held)

    async def SetAdmission(
        self, request: pb.SetAdmissionRequest, context: Any
    ) -> pb.SetAdmissionReply:
        self.held = not request.open
        return pb.SetAdmissionReply()


class Trainer(trainer_pb2_grpc.TrainerServicer):
    paused = False

    async def GetStatus(self, request: Any, context: Any) -> trainer_pb2.GetStatusReply:
        state = trainer_pb2.STAGE_STATE_PAUSED if self.paused else trainer_pb2.STAGE_STATE_RUNNING
        return trainer_pb2.GetStatusReply(state=state)

    async def Resume(self, request: Any, context: Any) -> trainer_pb2.ResumeReply:
        self.paused = False
        return trainer_pb2.ResumeReply()


async def test_resume_of_a_paused_run_lets_manager_and_trainer_go_on(tmp_path: Path) -> None:
    run, other = RunDirectory(tmp_path), RunDirectory(tmp_path)
    run.create()
    assert not other.is_locked()
    run.lock()
    assert other.is_locked()
    with pytest.raises(UsageError, match="does not answer"):
        await let_go_on(other)
    manager, trainer = Manager(), Trainer()

    def register(server: Any) -> None:
        pb_grpc.add_RolloutManagerServicer_to_server(manager, server)
        trainer_pb2_grpc.add_TrainerServicer_to_server(trainer, server)

    server = serving.make_server(serving.ServingConfig(), register, [])
    address = await server.start()
    run.addresses.write_text(json.dumps({"manager": address, "trainer": address}))
    try:
        await let_go_on(other)
        assert not manager.held
        with pytest.raises(UsageError, match="is not paused"):
            await let_go_on(other)
        trainer.paused = True
        await let_go_on(other)
        assert not trainer.paused
    finally:
        await server.stop(0)
    with pytest.raises(UsageError, match="does not answer"):
        await let_go_on(other)
    run.unlock()
    assert not other.is_locked()
