"""The manager's process: killed in the middle, started again, and started wrongly."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from proto import rollout_pb2 as pb
from proto.serving import dial
from rollout.client import NotFoundError, RolloutClient
from rollout.config import RolloutConfig
from rollout.fakes import make_turn, play

DEADLINE_S = 30.0


def write_config(folder: Path) -> Path:
    """A manager whose engine cannot start: these attempts sample nothing by themselves."""
    config = RolloutConfig.model_validate(
        {
            "run_dir": folder / "run",
            "agent": "oracle",
            "group_size": 2,
            "batch_groups": 2,
            "lock_wait_s": 0.2,
            "engines": {"python": "/bin/false", "model_path": "/nowhere", "max_restarts": 0},
        }
    )
    path = folder / "manager.json"
    path.write_text(config.model_dump_json())
    return path


def start(config: Path, listen: str = "127.0.0.1:0") -> subprocess.Popen[str]:
    address_file = config.with_name("address")
    address_file.unlink(missing_ok=True)
    command = [sys.executable, "-P", "-m", "rollout.server", "--config", str(config)]
    command += ["--listen", listen, "--address-file", str(address_file)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


async def address(config: Path, process: subprocess.Popen[str]) -> str:
    path = config.with_name("address")
    for _ in range(int(DEADLINE_S / 0.05)):
        if path.exists():
            return path.read_text().strip()
        assert process.poll() is None, process.communicate()[1]
        await asyncio.sleep(0.05)
    raise AssertionError("the server did not start in time")


def fails_with(process: subprocess.Popen[str]) -> str:
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 2, errors
    lines = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "Traceback" not in errors, errors
    return lines[0]


async def append(client: RolloutClient, leased: pb.LeasedAttempt, index: int) -> None:
    turn = make_turn(leased.attempt_id, index, [1, 2, 3], [7, 8], history=5 * index)
    await client.append_turn(pb.AppendTurnRequest(ticket_id="t", epoch=leased.epoch, turn=turn))


async def test_killed_in_the_middle_it_goes_on_where_it_was(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    process = start(config)
    try:
        async with dial(await address(config, process)) as channel:
            client = RolloutClient(channel)
            tasks = [pb.Task(task_id=f"t{i}", path=f"/t{i}") for i in range(3)]
            await client.add_tasks(pb.AddTasksRequest(pool=pb.POOL_TRAIN, tasks=tasks))
            await client.set_admission(pb.SetAdmissionRequest(open=True))
            request = pb.LeaseAttemptsRequest(worker="w", max_attempts=4)
            leased = list((await client.lease_attempts(request)).attempts)
            assert len(leased) == 4
            finished, torn = leased[0], leased[1]
            await append(client, finished, 0)
            await play(client, finished, 1.0, num_turns=0)
            await append(client, torn, 0)
            process.send_signal(signal.SIGKILL)
        process.wait(DEADLINE_S)
        token_file = tmp_path / "run" / "tokens" / f"{torn.attempt_id}.turns"
        with token_file.open("ab") as file:
            file.write(b"\x10\x00\x00\x00torn")  # a record that the kill cut short

        process = start(config)
        async with dial(await address(config, process)) as channel:
            client = RolloutClient(channel)
            status = await client.get_status()
            assert (status.num_attempts_finished, status.num_attempts_queued) == (1, 3)
            assert status.admission_open, "what a driver set holds"
            with pytest.raises(NotFoundError):
                await client.get_session(torn.session_key)
            again = list((await client.lease_attempts(request)).attempts)
            assert again[0].attempt_id == torn.attempt_id and again[0].epoch > torn.epoch
            assert finished.attempt_id not in {a.attempt_id for a in again}
            for attempt in again[:3]:
                _, turns = await client.get_session(attempt.session_key)
                assert turns == []
                await append(client, attempt, 0)
                await append(client, attempt, 1)
            rewards = [0.0, 0.0, 1.0]
            for attempt, reward in zip(again[:3], rewards, strict=True):
                await play(client, attempt, reward, num_turns=0)
            batch = await client.next_batch(
                pb.NextBatchRequest(step=1, weight_version=1, num_groups=2)
            )
            members = [m for g in batch.groups for m in g.members]
            assert [m.num_turns for m in members] == [1, 2, 2, 2]
            ids = [m.attempt_id for m in members]
            assert len([s async for s in client.fetch_sequences(ids)]) == 4
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


async def test_a_second_manager_on_a_run_is_one_line(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    process = start(config)
    try:
        await address(config, process)
        assert "ledger" in fails_with(start(config))
    finally:
        process.terminate()
        process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0


def test_wrong_starts_are_one_line_each(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert str(port) in fails_with(start(config, f"127.0.0.1:{port}"))
    assert "TLS" in fails_with(start(config, "0.0.0.0:0"))
    settings = json.loads(config.read_text())
    config.write_text(json.dumps(settings | {"surprise": 1}))
    assert "surprise" in fails_with(start(config))
    config.unlink()
    assert str(config) in fails_with(start(config))


def test_help_loads_no_torch() -> None:
    script = "import sys; sys.argv=['x', '--help']\nfrom rollout import server\n"
    script += "try:\n  server.main()\nexcept SystemExit: pass\nassert 'torch' not in sys.modules"
    subprocess.run(
        [sys.executable, "-P", "-c", script], check=True, timeout=DEADLINE_S, env=dict(os.environ)
    )
