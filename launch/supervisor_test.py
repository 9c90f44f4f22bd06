"""Start order, restart policy, crash reasons and take-down, with real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from launch import descendants
from launch.errors import ProcessFailed
from launch.supervisor import ProcessSpec, RestartPolicy, Supervisor

TOLD: list[str] = []
SLEEP = "import time; time.sleep(60)"


def spec(tmp_path: Path, name: str, code: str, **changes) -> ProcessSpec:
    async def ready() -> bool:
        return True

    return ProcessSpec(
        **{
            "name": name,
            "argv": [sys.executable, "-c", code],
            "log_path": tmp_path / f"{name}.log",
            "ready": ready,
            "restart": RestartPolicy(max_restarts=0, backoff_s=0.01),
            "stop_timeout_s": 3.0,
            **changes,
        }
    )


def supervised(scenario):
    """Runs scenario(supervisor) and closes it; nothing may be left."""

    async def run():
        supervisor = Supervisor(poll_interval_s=0.02, notify=TOLD.append)
        try:
            await scenario(supervisor)
        finally:
            await supervisor.close()

    asyncio.run(run())
    assert descendants.descendants(os.getpid()) == []


def test_a_start_failure_tells_the_error_line_of_the_log(tmp_path):
    async def scenario(supervisor):
        async def never() -> bool:
            return False

        code = "import sys; print('noise'); print('error: port 1 is taken', file=sys.stderr); sys.exit(2)"
        with pytest.raises(
            ProcessFailed, match=r"broker did not start: port 1 is taken \(exit code 2"
        ):
            await supervisor.start(spec(tmp_path, "broker", code, ready=never))

    supervised(scenario)


def test_never_ready_is_a_failure_and_is_taken_down(tmp_path):
    async def scenario(supervisor):
        async def never() -> bool:
            return False

        with pytest.raises(ProcessFailed, match=r"not ready within 0 s"):
            await supervisor.start(spec(tmp_path, "slow", SLEEP, ready=never, start_timeout_s=0.2))

    supervised(scenario)


def test_a_dead_process_is_restarted_within_its_policy(tmp_path):
    async def scenario(supervisor):
        TOLD.clear()
        await supervisor.start(spec(tmp_path, "p", SLEEP, restart=RestartPolicy(1, 600, 0.01)))
        first = supervisor.pid("p")
        os.kill(first, signal.SIGKILL)

        async def work():
            deadline = time.monotonic() + 20
            while supervisor.pid("p") in (first, None) and time.monotonic() < deadline:
                await asyncio.sleep(0.02)
            second = supervisor.pid("p")
            assert second not in (first, None)
            assert supervisor.restarts() == {"p": 1}
            assert len(TOLD) == 1
            assert "p died and is started again" in TOLD[0]
            os.kill(second, signal.SIGKILL)
            await asyncio.sleep(20)

        with pytest.raises(ProcessFailed, match="p died: .*SIGKILL"):
            await supervisor.guard(work())

    supervised(scenario)


def test_guard_returns_the_result_and_passes_errors_on(tmp_path):
    async def scenario(supervisor):
        async def value():
            return 7

        async def broken():
            raise LookupError("x")

        assert await supervisor.guard(value()) == 7
        with pytest.raises(LookupError):
            await supervisor.guard(broken())

    supervised(scenario)


def test_close_ends_stubborn_processes_and_orphans_of_other_sessions(tmp_path):
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    forks = (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0: time.sleep(60)\n"
        "    os._exit(0)\n"
        "time.sleep(60)"
    )

    async def scenario(supervisor):
        await supervisor.start(spec(tmp_path, "stubborn", stubborn, stop_timeout_s=0.3))
        await supervisor.start(spec(tmp_path, "forks", forks))
        await asyncio.sleep(0.5)
        assert len(descendants.descendants(os.getpid())) >= 3

    supervised(scenario)


def test_a_process_that_cannot_be_spawned_again_is_a_failure(tmp_path):
    async def scenario(supervisor):
        log = tmp_path / "logs"
        log.mkdir()
        await supervisor.start(spec(log, "p", SLEEP, restart=RestartPolicy(3, 600, 0.01)))
        (log / "p.log").unlink()
        log.rmdir()
        os.kill(supervisor.pid("p"), signal.SIGKILL)
        with pytest.raises(ProcessFailed, match="p cannot be started: .*No such file"):
            await asyncio.wait_for(supervisor.guard(asyncio.sleep(20)), 10)

    supervised(scenario)
