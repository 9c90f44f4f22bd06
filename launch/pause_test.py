"""What a user is told of a pause, when it ends the job, and how another command ends it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launch.errors import JobFailed, UsageError
from launch.pause import PauseWatch, let_go_on
from launch.run_directory import RunDirectory
from proto import rollout_pb2 as pb
from proto import rollout_pb2_grpc as pb_grpc
from proto import serving


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
    with pytest.raises(JobFailed, match=r"9 of 50 .* `swe_rl resume x` goes on"):
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


class Manager(pb_grpc.RolloutManagerServicer):
    held = True

    async def GetStatus(self, request: Any, context: Any) -> pb.GetStatusReply:
        return pb.GetStatusReply(admission_held=self.held)

    async def SetAdmission(
        self, request: pb.SetAdmissionRequest, context: Any
    ) -> pb.SetAdmissionReply:
        self.held = not request.open
        return pb.SetAdmissionReply()


async def test_resume_of_a_paused_run_opens_admission(tmp_path: Path) -> None:
    run, other = RunDirectory(tmp_path), RunDirectory(tmp_path)
    run.create()
    assert not other.is_locked()
    run.lock()
    assert other.is_locked()
    with pytest.raises(UsageError, match="does not answer"):
        await let_go_on(other)
    manager = Manager()
    server = serving.make_server(
        serving.ServingConfig(),
        lambda s: pb_grpc.add_RolloutManagerServicer_to_server(manager, s),
        [],
    )
    address = await server.start()
    (run.processes / "worker.json").write_text(json.dumps({"manager_address": address}))
    try:
        await let_go_on(other)
        assert not manager.held
        with pytest.raises(UsageError, match="is not paused"):
            await let_go_on(other)
    finally:
        await server.stop(0)
    with pytest.raises(UsageError, match="does not answer"):
        await let_go_on(other)
    run.unlock()
    assert not other.is_locked()
