"""The worker as a process: real command line, servers around it, SIGTERM."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from proto import (
    rollout_pb2,
    rollout_pb2_grpc,
    sandbox_pb2_grpc,
    trajectory_pb2,
)
from rollout.harness import fakes
from rollout.harness.config import HarnessConfig

COMMAND = [sys.executable, "-P", "-m", "rollout.harness.worker"]


async def start(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *COMMAND, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )


async def test_works_and_drains_on_sigterm(tmp_path: Path) -> None:
    broker, manager, gateway = fakes.FakeBroker(tmp_path), fakes.FakeManager(), fakes.FakeGateway()
    server, address = await fakes.serve(
        lambda s: sandbox_pb2_grpc.add_SandboxBrokerServicer_to_server(broker, s),
        lambda s: rollout_pb2_grpc.add_RolloutManagerServicer_to_server(manager, s),
    )
    await gateway.start()
    config = HarnessConfig(
        manager_address=address,
        broker_address=address,
        gateway_urls=[gateway.url],
        trials_dir=tmp_path / "trials",
        lease_wait_s=1.0,
    )
    path, task = tmp_path / "config.json", fakes.write_task(tmp_path)
    path.write_text(config.model_dump_json())
    for name, answers in (("solved", ("sed -i s/-/+/ calc.py", "")), ("stuck", ("sleep 60",))):
        key = name * 8
        gateway.sessions[key] = fakes.script(
            *(
                answers
                if name == "stuck"
                else (answers[0], "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
            )
        )
        manager.queue.append(
            rollout_pb2.LeasedAttempt(
                attempt_id=name,
                epoch=1,
                task_id="t",
                task_path=str(task),
                session_key=key,
                agent="mini",
            )
        )
    process = await start("--config", str(path), "--name", "w1")
    try:
        await manager.until_finished(1, timeout_s=40)
        assert manager.finished["solved"].reward == 1.0
        async with asyncio.timeout(20):
            while "sleep 60" not in broker.commands:
                await asyncio.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        output = await asyncio.wait_for(process.communicate(), 30)
    finally:
        if process.returncode is None:
            os.kill(process.pid, signal.SIGKILL)
            await process.wait()
        await gateway.stop()
        await server.stop(0)
    assert process.returncode == 0, output
    assert manager.finished["stuck"].cause == trajectory_pb2.CAUSE_INTERRUPTED
    assert not broker.boxes, "a sandbox was leaked"
    assert b"Traceback" not in output[1] and b"DEBUG" not in output[1], output[1].decode()


async def test_bad_configuration_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"manager_address": "127.0.0.1:1", "typo": 1}')
    process = await start("--config", str(path), "--name", "w1")
    _, errors = await process.communicate()
    assert process.returncode == 2
    assert errors.decode().startswith("error: ") and errors.count(b"\n") == 1
    assert b"typo" in errors
