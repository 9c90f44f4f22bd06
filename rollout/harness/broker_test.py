"""Attempts in real sandboxes: the broker runs as its own process, in its own environment."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from bazel.environments import PYTHON
from rollout.harness import fakes
from rollout.harness.attempt_rig import FIX, KEY, SUBMIT, AttemptRig
from rollout.harness.fakes import script


@pytest.fixture(scope="module")
def broker_address() -> Iterator[str]:
    # A short folder: the broker puts its sockets and mounts below it.
    with tempfile.TemporaryDirectory(prefix="harness_broker.") as folder:
        path, address = Path(folder, "config.json"), Path(folder, "address")
        config = {"images": {"toy": {"base": "host"}}, "state_dir": folder}
        if "SWE_RL_SANDBOX_INIT" in os.environ:
            config["init_binary"] = os.environ["SWE_RL_SANDBOX_INIT"]
        path.write_text(json.dumps(config))
        command = [PYTHON["main"], "-P", "-m", "sandbox.server", "--config", str(path)]
        broker = subprocess.Popen([*command, "--address-file", str(address)])
        try:
            deadline_s = time.monotonic() + 30
            while not address.exists() and broker.poll() is None and time.monotonic() < deadline_s:
                time.sleep(0.05)
            yield address.read_text().strip()
        finally:
            broker.terminate()
            broker.wait(30)


@pytest.fixture
async def rig(tmp_path: Path, broker_address: str) -> AsyncIterator[AttemptRig]:
    rig = AttemptRig(tmp_path)
    await rig.start(broker_address)
    yield rig
    assert (await rig.sandboxes.status()).num_active == 0, "a sandbox was leaked"
    await rig.stop()


@pytest.mark.parametrize(("agent", "want"), [("oracle", 1.0), ("nop", 0.0)])
async def test_oracle_and_nop(rig: AttemptRig, tmp_path: Path, agent: str, want: float) -> None:
    cause, reward, report = await rig.run(fakes.write_task(tmp_path), agent)
    assert (cause, reward) == ("CAUSE_SUBMITTED", want), report


async def test_mini_solves_and_counts_agree(rig: AttemptRig, tmp_path: Path) -> None:
    before = (await rig.sandboxes.status()).counters
    rig.gateway.sessions[KEY] = script("python3 t.py; ls", FIX, SUBMIT)
    cause, reward, report = await rig.run(fakes.write_task(tmp_path))
    assert (cause, reward) == ("CAUSE_SUBMITTED", 1.0), report
    after = (await rig.sandboxes.status()).counters
    assert after["num_execs"] - before["num_execs"] == report.num_execs == 4
    assert after["num_acquired"] - before["num_acquired"] == 2
    assert rig.gateway.requests[1][-1]["content"] == "__pycache__\ncalc.py\npkg\nt.py"


async def test_left_over_process_cannot_forge(rig: AttemptRig, tmp_path: Path) -> None:
    forge = (
        "(while :; do mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; "
        "echo 'print(5, 8)' > /tests/check.py; sleep 0.01; done) >/dev/null 2>&1 &"
    )
    test_sh = (
        "#!/bin/sh\n[ \"$(python3 -S -B /tests/check.py)\" = '5 8' ] && r=1 || r=0\n"
        "sleep 0.3\necho $r > /logs/verifier/reward.txt\n"
    )
    rig.gateway.sessions[KEY] = script(forge, SUBMIT)
    cause, reward, report = await rig.run(fakes.write_task(tmp_path, test_sh=test_sh, grading=None))
    assert (cause, reward) == ("CAUSE_SUBMITTED", 0.0), report


async def test_changes_are_carried(rig: AttemptRig, tmp_path: Path) -> None:
    """New, changed, deleted and restored files, modes and links."""
    test_sh = "#!/bin/sh\ncat t.py new/deep.py link; ./tool; ls pkg 2>/dev/null; exit 3\n"
    grading = json.dumps(
        {"kind": "stdout", "expect": "import calc\nY\nY\nran", "restore": ["t.py", "extra/**"]}
    )
    work = (
        "echo broken > t.py; mkdir new extra; echo Y > new/deep.py; ln -s new/deep.py link; "
        "rm -r pkg; printf '#!/bin/sh\\necho ran\\n' > tool; chmod +x tool; mkfifo pipe"
    )
    rig.gateway.sessions[KEY] = script(work, SUBMIT)
    task = fakes.write_task(tmp_path, test_sh=test_sh, grading=grading)
    cause, reward, report = await rig.run(task)
    assert (cause, reward) == ("CAUSE_SUBMITTED", 1.0), report


async def test_hanging_tests(rig: AttemptRig, tmp_path: Path) -> None:
    test_sh = "#!/bin/sh\ngrep -q hang calc.py && sleep 30\npython3 -S -B -E /tests/check.py\n"
    rig.gateway.sessions[KEY] = script("echo '# hang' >> calc.py", SUBMIT)
    task = fakes.write_task(tmp_path, verifier_s=1.0, test_sh=test_sh)
    cause, reward, report = await rig.run(task)
    assert (cause, reward) == ("CAUSE_TESTS_HUNG", 0.0), report


async def test_tests_out_of_memory(rig: AttemptRig, tmp_path: Path) -> None:
    """A patch that eats the sandbox's memory when it is imported."""
    eats = "echo 'X = [bytes(1 << 20) + bytes([i % 256]) for i in range(9000)]' >> calc.py"
    rig.gateway.sessions[KEY] = script(eats, SUBMIT)
    task = fakes.write_task(tmp_path)
    toml = task / "task.toml"
    toml.write_text(toml.read_text() + "memory_mb = 64\n")
    cause, reward, report = await rig.run(task)
    assert (cause, reward) == ("CAUSE_TESTS_OOM", 0.0), report


async def test_abandoned_attempt_frees_its_sandbox(rig: AttemptRig, tmp_path: Path) -> None:
    rig.gateway.sessions[KEY] = script("sleep 60")
    run = asyncio.create_task(rig.runner.run(rig.lease(fakes.write_task(tmp_path))))
    while not rig.gateway.requests:
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.3)
    run.cancel()
    done = await asyncio.wait_for(run, 10)
    assert not done.HasField("reward"), done


async def test_released_sandbox_is_a_failure_of_ours(rig: AttemptRig, tmp_path: Path) -> None:
    """Someone takes the sandbox away under a running agent."""

    async def answer(messages: list[dict[str, str]]) -> object:
        if len(messages) > 1:
            for lease in (await rig.sandboxes.status(include_leases=True)).leases:
                await rig.sandboxes.release(lease)  # type: ignore[arg-type]
        return fakes.say("ls")

    rig.gateway.sessions[KEY] = answer  # type: ignore[assignment]
    cause, reward, report = await rig.run(fakes.write_task(tmp_path))
    assert (cause, reward, report.backend_away) == ("CAUSE_SANDBOX_FAILED", None, True), report


async def test_sixteen_at_a_time(rig: AttemptRig, tmp_path: Path) -> None:
    task, leases = fakes.write_task(tmp_path), []
    for number in range(32):
        key = f"{number:040d}"
        rig.gateway.sessions[key] = script(*((FIX, SUBMIT) if number % 2 else (SUBMIT,)))
        leases.append(rig.lease(task, attempt_id=f"a{number}", session_key=key))
    gate = asyncio.Semaphore(16)

    async def one(lease: object) -> float:
        async with gate:
            return (await rig.runner.run(lease)).reward  # type: ignore[arg-type]

    assert await asyncio.gather(*map(one, leases)) == [0.0, 1.0] * 16
