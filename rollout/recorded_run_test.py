"""A run that went through a rewind, recorded and served again: the same batches, byte for byte."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from proto import rollout_pb2 as pb
from proto import trajectory_pb2 as tpb
from proto.serving import dial
from rollout.client import DeadlineError, RolloutClient, RolloutError
from rollout.config import RecordedRunConfig
from rollout.errors import NotFoundError
from rollout.fakes import Testbed, play, publish
from rollout.recorded_run import RecordedRun

DEADLINE_S = 30.0
Trained = dict[int, tuple[pb.NextBatchReply, list[tpb.TokenSequence], int]]


async def train(client: RolloutClient, step: int, version: int, *, fresh: bool = True) -> Trained:
    """Plays a step's attempts (unless groups are ready already) and consumes the batch."""
    if fresh:
        lease = pb.LeaseAttemptsRequest(worker="w", max_attempts=6)
        for index, attempt in enumerate((await client.lease_attempts(lease)).attempts):
            failed = step == 2 and index == 5
            await play(
                client,
                attempt,
                None if failed else float(index % 2),
                cause=tpb.CAUSE_UNCLASSIFIED if failed else tpb.CAUSE_SUBMITTED,
                version=version,
            )
    request = pb.NextBatchRequest(step=step, weight_version=version, num_groups=2)
    batch = await client.next_batch(request, timeout_s=5.0)
    ids = [m.attempt_id for g in batch.groups for m in g.members]
    sequences = [s async for s in client.fetch_sequences(ids)]
    dropped = {batch.groups[0].group_id: "too_few_members"} if step == 2 else {}
    await client.ack_batch(
        pb.AckBatchRequest(
            batch_id=batch.batch_id, step=step, weight_version=version, dropped_groups=dropped
        )
    )
    return {step: (batch, sequences, version)}


async def record(run_dir: Path, **settings: Any) -> tuple[Trained, Testbed]:
    """Three steps; the trainer died after the second and began again after the first."""
    bed = Testbed(run_dir, max_staleness=3, min_valid_members=2, group_size=3, **settings)
    async with bed as client:
        tasks = [pb.Task(task_id=f"t{i}", path=f"/t{i}") for i in range(4)]
        await client.add_tasks(pb.AddTasksRequest(pool=pb.POOL_TRAIN, tasks=tasks))
        await publish(client, 1)
        await client.set_admission(pb.SetAdmissionRequest(open=True))
        await client.rewind(pb.RewindRequest(step=0, lineage_token="one"))
        kept = await train(client, 1, 1)
        await train(client, 2, 2)
        await client.rewind(pb.RewindRequest(step=1, lineage_token="two"))
        kept |= await train(client, 2, 7, fresh=False)
        kept |= await train(client, 3, 8)
        if not bed.config.keep_consumed_tokens:
            await client.report_checkpoint(pb.ReportCheckpointRequest(step=3, oldest_kept_step=1))
    return kept, bed


def config(folder: Path, num_steps: int = 3) -> RecordedRunConfig:
    engines = {"python": "/usr/bin/python3", "model_path": "/nowhere"}
    rollout = {"run_dir": folder / "run", "max_staleness": 3, "engines": engines}
    return RecordedRunConfig.model_validate(
        {"rollout": rollout, "scratch_dir": folder / "scratch", "num_steps": num_steps}
    )


async def test_the_surviving_lineage_is_served_as_it_was(tmp_path: Path) -> None:
    trained, _ = await record(tmp_path / "run")
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*") if p.is_file()}
    recorded = RecordedRun(config(tmp_path))
    try:
        for step, (batch, sequences, version) in trained.items():
            again = recorded.batch(step)
            assert again is not None
            assert again.replayed_at_version == version
            assert list(again.groups) == list(batch.groups)
            assert again.max_staleness == batch.max_staleness == 3
            ids = [m.attempt_id for g in again.groups for m in g.members]
            assert [s for i in ids for s in recorded.sequences(i)] == sequences
        assert recorded.batch(4) is None
    finally:
        recorded.close()
    assert list((tmp_path / "scratch").iterdir()) == []
    after = {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*") if p.is_file()}
    assert {p: t for p, t in after.items() if not p.name.startswith("ledger.db-")} == before


async def test_a_run_under_way_is_read_with_its_write_ahead_log(tmp_path: Path) -> None:
    bed = Testbed(tmp_path / "run", max_staleness=3)
    async with bed as client:
        tasks = [pb.Task(task_id=f"t{i}", path=f"/t{i}") for i in range(4)]
        await client.add_tasks(pb.AddTasksRequest(pool=pb.POOL_TRAIN, tasks=tasks))
        await publish(client, 1)
        await client.set_admission(pb.SetAdmissionRequest(open=True))
        trained = await train(client, 1, 1)
        recorded = RecordedRun(config(tmp_path, num_steps=1))
        again = recorded.batch(1)
        recorded.close()
        assert again is not None
        assert list(again.groups) == list(trained[1][0].groups)


async def test_what_cannot_be_replayed_says_why(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="holds no ledger"):
        RecordedRun(config(tmp_path))
    await record(tmp_path / "run", keep_consumed_tokens=False)
    with pytest.raises(NotFoundError, match=r"no batch of step 4: 3 of 5 steps"):
        RecordedRun(config(tmp_path, num_steps=5))
    with pytest.raises(NotFoundError, match=r"tokens of step 1 .*keep_consumed_tokens"):
        RecordedRun(config(tmp_path))
    assert list((tmp_path / "scratch").iterdir()) == []


async def test_the_process_answers_a_trainer_and_ends(tmp_path: Path) -> None:
    trained, _ = await record(tmp_path / "run")
    file, address_file = tmp_path / "config.json", tmp_path / "address"
    file.write_text(config(tmp_path).model_dump_json())
    command = [sys.executable, "-P", "-m", "rollout.recorded_server", "--config", str(file)]
    process = subprocess.Popen([*command, "--address-file", str(address_file)])
    try:
        for _ in range(int(DEADLINE_S / 0.05)):
            if address_file.exists():
                break
            await asyncio.sleep(0.05)
        async with dial(address_file.read_text().strip()) as channel:
            client = RolloutClient(channel)
            await client.rewind(pb.RewindRequest(step=0, lineage_token="replay"))
            for step, (batch, sequences, _) in trained.items():
                request = pb.NextBatchRequest(step=step, weight_version=1, num_groups=2)
                again = await client.next_batch(request, timeout_s=5.0)
                ids = [m.attempt_id for g in again.groups for m in g.members]
                assert list(again.groups) == list(batch.groups)
                assert [s async for s in client.fetch_sequences(ids)] == sequences
                ack = pb.AckBatchRequest(batch_id=again.batch_id, step=step, weight_version=1)
                await client.ack_batch(ack)
            with pytest.raises(DeadlineError, match="step 4"):
                request = pb.NextBatchRequest(step=4, weight_version=9, num_groups=2)
                await client.next_batch(request, timeout_s=1.0)
            with pytest.raises(RolloutError):
                await client.get_status()
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
    assert list((tmp_path / "scratch").iterdir()) == []


def test_a_wrong_start_is_one_line_and_exit_2(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(config(tmp_path).model_dump_json())))
    done = subprocess.run(
        [sys.executable, "-P", "-m", "rollout.recorded_server", "--config", str(file)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env=dict(os.environ),
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and "Traceback" not in done.stderr
    assert "holds no ledger" in done.stderr
