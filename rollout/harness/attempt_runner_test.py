"""Attempts end to end: real Harbor, real mini-swe-agent, small servers around them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from proto import sandbox_pb2, sandbox_pb2_grpc, trajectory_pb2
from rollout.harness import fakes
from rollout.harness.attempt_rig import FIX, KEY, SUBMIT, AttemptRig
from rollout.harness.config import TOY_PROFILE
from rollout.harness.fakes import refuse, say, script


class Rig(AttemptRig):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.broker = fakes.FakeBroker(folder / "boxes")


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    rig = Rig(tmp_path)
    (tmp_path / "boxes").mkdir()
    server, address = await fakes.serve(
        lambda s: sandbox_pb2_grpc.add_SandboxBrokerServicer_to_server(rig.broker, s)
    )
    await rig.start(address)
    yield rig
    await rig.stop()
    await server.stop(0)
    assert not rig.broker.boxes, "a sandbox was leaked"


async def test_oracle_gets_1(rig: Rig, tmp_path: Path) -> None:
    cause, reward, report = await rig.run(fakes.write_task(tmp_path), "oracle")
    assert (cause, reward) == ("CAUSE_SUBMITTED", 1.0), report
    assert report.num_execs == rig.broker.num_execs
    assert rig.broker.num_acquired == 2


async def test_nop_gets_0(rig: Rig, tmp_path: Path) -> None:
    cause, reward, report = await rig.run(fakes.write_task(tmp_path), "nop")
    assert (cause, reward) == ("CAUSE_SUBMITTED", 0.0), report
    assert (report.num_commands, report.num_verifier_commands) == (0, 1)


async def test_mini_solves_and_is_counted(rig: Rig, tmp_path: Path) -> None:
    rig.gateway.sessions[KEY] = script("cat calc.py", FIX, SUBMIT)
    cause, reward, report = await rig.run(fakes.write_task(tmp_path))
    assert (cause, reward) == ("CAUSE_SUBMITTED", 1.0), report
    assert (report.num_model_calls, report.num_commands, report.num_verifier_commands) == (3, 3, 1)
    assert report.num_execs == rig.broker.num_execs == 4
    assert rig.broker.commands[:3] == ["cat calc.py", FIX, SUBMIT]
    last = rig.gateway.requests[-1]
    assert [m["role"] for m in last] == ["user", "assistant", "user", "assistant", "user"]
    assert last[0]["content"] == "Fix calc.add."
    assert last[2]["content"] == "def add(a, b):\n    return a - b"
    assert last[4]["content"] == "ok"
    atif = json.loads((tmp_path / "trajectories" / "a1.json").read_text())
    assert [step["source"] for step in atif["steps"]] == [
        "user",
        "agent",
        "user",
        "agent",
        "user",
        "agent",
    ]
    assert atif["extra"]["reward"] == 1.0


async def test_a_trajectory_that_cannot_be_written_costs_no_attempt(
    rig: Rig, tmp_path: Path
) -> None:
    (tmp_path / "trajectories").write_text("a file where the folder should be")
    rig.gateway.sessions[KEY] = script(FIX, SUBMIT)
    cause, reward, report = await rig.run(fakes.write_task(tmp_path))
    assert (cause, reward) == ("CAUSE_SUBMITTED", 1.0), report
    assert (tmp_path / "trajectories").is_file()


async def test_equal_work_is_graded_once_when_set_so(rig: Rig, tmp_path: Path) -> None:
    rig.configure(grading={"reuse_verdicts": 4})
    task = fakes.write_task(tmp_path)
    num_verifier_commands = []
    for commands, want in [
        ((FIX, SUBMIT), 1.0),
        (("cat calc.py", FIX, "echo x > __pycache__.pyc", SUBMIT), 1.0),
        ((SUBMIT,), 0.0),
        (("sed -i s/-/*/ calc.py", SUBMIT), 0.0),
        ((SUBMIT,), 0.0),
    ]:
        rig.gateway.sessions[KEY] = script(*commands)
        cause, reward, report = await rig.run(task)
        assert (cause, reward) == ("CAUSE_SUBMITTED", want), report
        num_verifier_commands.append(report.num_verifier_commands)
    assert num_verifier_commands == [1, 0, 1, 1, 0]
    assert rig.broker.num_acquired == 5 + 3
    assert "equal work was graded before: output differs" in report.evidence


async def test_tests_that_die_are_no_verdict_on_equal_work(rig: Rig, tmp_path: Path) -> None:
    rig.configure(grading={"reuse_verdicts": 4})
    task = fakes.write_task(tmp_path, test_sh="#!/bin/sh\nkill -9 $$\n", solve_sh=None)
    for _ in range(2):
        rig.gateway.sessions[KEY] = script(SUBMIT)
        cause, reward, report = await rig.run(task)
        assert (reward, report.num_verifier_commands) == (None, 2), (cause, report)


async def test_mini_profile_uses_bash_blocks(rig: Rig, tmp_path: Path) -> None:
    def block(command: str) -> str:
        return f"THOUGHT: try.\n\n```mswea_bash_command\n{command}\n```"

    rig.gateway.sessions[KEY] = script("no block here", block(FIX), block(SUBMIT))
    cause, reward, report = await rig.run(fakes.write_task(tmp_path, profile="mini"))
    assert (cause, reward) == ("CAUSE_SUBMITTED", 1.0), report
    first, second = rig.gateway.requests[:2]
    assert [m["role"] for m in first] == ["system", "user"]
    assert second[2] == {"role": "assistant", "content": "no block here"}
    assert "EXACTLY ONE action" in second[3]["content"]


async def test_left_over_process_cannot_forge(rig: Rig, tmp_path: Path) -> None:
    """A process of the agent that writes rewards and breaks files all the time has no effect."""
    forge = (
        "(while :; do mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; "
        "echo 'print(5, 8)' > /tests/check.py; sleep 0.01; done) >/dev/null 2>&1 &"
    )
    test_sh = "#!/bin/sh\n[ \"$(python3 -S -B /tests/check.py)\" = '5 8' ] && r=1 || r=0\nsleep 0.3\necho $r > /logs/verifier/reward.txt\n"
    task = fakes.write_task(tmp_path, test_sh=test_sh, grading=None)
    rig.gateway.sessions[KEY] = script(forge, SUBMIT)
    cause, reward, report = await rig.run(task)
    assert (cause, reward) == ("CAUSE_SUBMITTED", 0.0), report


async def test_restored_and_deleted_files(rig: Rig, tmp_path: Path) -> None:
    """Changes of restored paths are dropped; deletions and new files are carried."""
    test_sh = "#!/bin/sh\ncat t.py new.py; ls pkg 2>/dev/null; exit 3\n"
    task = fakes.write_task(
        tmp_path,
        test_sh=test_sh,
        grading='{"kind":"stdout","expect":"import calc\\nY","restore":["t.py"]}',
    )
    rig.gateway.sessions[KEY] = script("echo broken > t.py; echo Y > new.py; rm -r pkg", SUBMIT)
    cause, reward, report = await rig.run(task)
    assert (cause, reward) == ("CAUSE_SUBMITTED", 1.0), report


@pytest.mark.parametrize(
    ("code", "cause"),
    [("context_length_exceeded", "CAUSE_TOKEN_CAP"), ("turn_limit_exceeded", "CAUSE_TURN_CAP")],
)
async def test_caps_are_graded(rig: Rig, tmp_path: Path, code: str, cause: str) -> None:
    def answer(messages: list[dict[str, str]]) -> web.Response:
        return say(FIX) if len(messages) == 1 else refuse(400, code)

    rig.gateway.sessions[KEY] = answer
    got, reward, report = await rig.run(fakes.write_task(tmp_path))
    assert (got, reward) == (cause, 1.0), report


async def test_caps_are_not_graded_when_set_so(rig: Rig, tmp_path: Path) -> None:
    rig.configure(grading={"grade_capped": False})
    rig.gateway.sessions[KEY] = lambda messages: refuse(400, "turn_limit_exceeded")
    got, reward, report = await rig.run(fakes.write_task(tmp_path))
    assert (got, reward, report.num_verifier_commands) == ("CAUSE_TURN_CAP", 0.0, 0)


async def test_length_cut_answer_ends_the_toy_agent(rig: Rig, tmp_path: Path) -> None:
    rig.gateway.sessions[KEY] = lambda messages: say("sed -i", "length")
    cause, reward, report = await rig.run(fakes.write_task(tmp_path))
    assert (cause, reward, report.num_commands) == ("CAUSE_TOKEN_CAP", 0.0, 0)


async def test_loop(rig: Rig, tmp_path: Path) -> None:
    rig.configure(profiles={"toy": TOY_PROFILE.model_copy(update={"loop_limit": 3})})
    rig.gateway.sessions[KEY] = script("ls")
    cause, reward, report = await rig.run(fakes.write_task(tmp_path))
    assert (cause, reward, report.num_commands) == ("CAUSE_LOOP", 0.0, 2)


async def test_time_budget_counts_decoding_not_queues(rig: Rig, tmp_path: Path) -> None:
    async def slow(messages: list[dict[str, str]]) -> web.Response:
        await asyncio.sleep(0.3)
        return say(FIX if len(messages) == 1 else SUBMIT, decode_ms=10)

    rig.gateway.sessions[KEY] = slow
    task, budget = fakes.write_task(tmp_path), {"nanos": 250_000_000}
    cause, reward, report = await rig.run(task, time_budget=budget)
    assert (cause, reward) == ("CAUSE_SUBMITTED", 1.0), report
    rig.gateway.sessions[KEY] = script("sleep 5")
    started = time.monotonic()
    cause, reward, report = await rig.run(task, time_budget=budget)
    assert (cause, reward) == ("CAUSE_TIME_BUDGET", 0.0), report
    assert time.monotonic() - started < 3


async def test_command_that_cannot_be_run_is_an_observation(rig: Rig, tmp_path: Path) -> None:
    rig.gateway.sessions[KEY] = script("ls\0", FIX, SUBMIT)
    cause, reward, report = await rig.run(fakes.write_task(tmp_path))
    assert (cause, reward) == ("CAUSE_SUBMITTED", 1.0), report
    assert rig.gateway.requests[1][-1]["content"].startswith("cannot execute")


async def test_engine_failure_is_masked(rig: Rig, tmp_path: Path) -> None:
    rig.gateway.sessions[KEY] = lambda messages: refuse(503, "engine_failed")
    cause, reward, report = await rig.run(fakes.write_task(tmp_path))
    assert (cause, reward, report.backend_away) == ("CAUSE_ENGINE_FAILED", None, False)
    assert "engine_failed" in report.evidence and len(rig.gateway.requests) == 1


async def test_outage_of_a_gateway_is_bridged(rig: Rig, tmp_path: Path) -> None:
    solve, failures = script(FIX, SUBMIT), iter([503, 502, 503])

    def answer(messages: list[dict[str, str]]) -> Any:
        status = next(failures, None)
        return refuse(status, "unavailable") if status else solve(messages)

    rig.gateway.sessions[KEY] = answer
    rig.configure(gateway_urls=["http://127.0.0.1:9", rig.gateway.url], model_retries=6)
    cause, reward, _ = await rig.run(fakes.write_task(tmp_path))
    assert (cause, reward) == ("CAUSE_SUBMITTED", 1.0)


async def test_outage_of_all_gateways_ends(rig: Rig, tmp_path: Path) -> None:
    rig.configure(gateway_urls=["http://127.0.0.1:9"], model_retries=2)
    cause, reward, report = await rig.run(fakes.write_task(tmp_path))
    assert (cause, reward, report.backend_away) == ("CAUSE_ENGINE_FAILED", None, True)


async def test_fenced_session_is_interrupted(rig: Rig, tmp_path: Path) -> None:
    cause, reward, _ = await rig.run(fakes.write_task(tmp_path))
    assert (cause, reward) == ("CAUSE_INTERRUPTED", None)


async def test_dead_sandbox_is_no_observation(rig: Rig, tmp_path: Path) -> None:
    def die(box: fakes.Box, command: str) -> None:
        box.is_dead = command == "boom"

    rig.broker.intercept = die
    rig.gateway.sessions[KEY] = script("ls", "boom", SUBMIT)
    cause, reward, report = await rig.run(fakes.write_task(tmp_path))
    assert (cause, reward) == ("CAUSE_SANDBOX_FAILED", None), report
    assert len(rig.gateway.requests) == 2


async def test_a_broker_that_refuses_or_is_gone_tells_of_the_whole_backend(
    rig: Rig, tmp_path: Path
) -> None:
    task = fakes.write_task(tmp_path)
    rig.broker.refusal = "CapacityError"
    cause, reward, report = await rig.run(task, "nop")
    assert (cause, reward, report.backend_away) == ("CAUSE_SANDBOX_FAILED", None, True), report
    rig.broker.refusal = ""

    def vanish(box: fakes.Box, command: str) -> None:
        rig.broker.is_away = command == "boom"

    rig.broker.intercept = vanish
    rig.gateway.sessions[KEY] = script("ls", "boom")
    cause, reward, report = await rig.run(task)
    rig.broker.is_away = False
    assert (cause, reward, report.backend_away) == ("CAUSE_SANDBOX_FAILED", None, True), report
    await rig.broker.release_all()


async def test_a_sandbox_that_dies_tells_of_itself_only(rig: Rig, tmp_path: Path) -> None:
    def die(box: fakes.Box, command: str) -> None:
        box.is_dead = command == "/tests/test.sh"

    rig.broker.intercept = die
    cause, reward, report = await rig.run(fakes.write_task(tmp_path), "nop")
    assert (cause, reward, report.backend_away) == ("CAUSE_SANDBOX_FAILED", None, False), report
    assert "failed_phase=verifier" in report.evidence


async def test_a_broker_gone_after_the_agents_oom_is_no_zero(rig: Rig, tmp_path: Path) -> None:
    def vanish(box: fakes.Box, command: str) -> sandbox_pb2.ExecReply | None:
        rig.broker.is_away = command == "boom"
        oom = command == "eat"
        return sandbox_pb2.ExecReply(exit_code=137, oom_killed=True) if oom else None

    rig.broker.intercept = vanish
    rig.gateway.sessions[KEY] = script("eat", "boom")
    cause, reward, report = await rig.run(fakes.write_task(tmp_path))
    rig.broker.is_away = False
    assert (cause, reward, report.backend_away) == ("CAUSE_SANDBOX_FAILED", None, True), report
    await rig.broker.release_all()


async def test_a_broken_archive_is_the_brokers(rig: Rig, tmp_path: Path) -> None:
    rig.broker.corrupt_archives = True
    cause, reward, report = await rig.run(fakes.write_task(tmp_path), "nop")
    assert (cause, reward) == ("CAUSE_SANDBOX_FAILED", None), report


async def test_a_worker_without_disk_is_ours(rig: Rig, tmp_path: Path) -> None:
    (tmp_path / "full").write_text("")
    rig.configure(trials_dir=tmp_path / "full" / "trials")
    done = await rig.runner.run(rig.lease(fakes.write_task(tmp_path), "nop"))
    assert done.cause == trajectory_pb2.CAUSE_HARNESS_FAILED, done
    assert "NotADirectoryError" in done.report.evidence


async def test_sandbox_that_dies_of_the_agents_memory_use(rig: Rig, tmp_path: Path) -> None:
    def die(box: fakes.Box, command: str) -> sandbox_pb2.ExecReply | None:
        box.is_dead = command == "boom"
        oom = command == "eat"
        return sandbox_pb2.ExecReply(exit_code=137, oom_killed=True) if oom else None

    rig.broker.intercept = die
    rig.gateway.sessions[KEY] = script("eat", "boom")
    cause, reward, report = await rig.run(fakes.write_task(tmp_path))
    assert (cause, reward) == ("CAUSE_AGENT_OOM", 0.0), report


@pytest.mark.parametrize(
    ("solution_passes", "cause", "reward"),
    [(True, "CAUSE_TESTS_HUNG", 0.0), (False, "CAUSE_VERIFIER_FAILED", None)],
)
async def test_hanging_tests(
    rig: Rig, tmp_path: Path, solution_passes: bool, cause: str, reward: float | None
) -> None:
    """Tests that hang on the patch: its doing only if the solution passes beside it."""
    body = "python3 -S -B -E /tests/check.py" if solution_passes else "sleep 30"
    test_sh = f"#!/bin/sh\ngrep -q hang calc.py && sleep 30\n{body}\n"
    task = fakes.write_task(tmp_path, verifier_s=0.7, test_sh=test_sh)
    rig.gateway.sessions[KEY] = script("echo '# hang' >> calc.py", SUBMIT)
    got, got_reward, report = await rig.run(task)
    assert (got, got_reward) == (cause, reward), report
    assert rig.broker.num_acquired == 4  # agent, two runs, control


async def test_tests_that_die_once_are_run_again(rig: Rig, tmp_path: Path) -> None:
    num_tests = 0

    def oom_once(box: fakes.Box, command: str) -> sandbox_pb2.ExecReply | None:
        nonlocal num_tests
        num_tests += command == "/tests/test.sh"
        oom = command == "/tests/test.sh" and num_tests == 1
        return sandbox_pb2.ExecReply(exit_code=137, oom_killed=True) if oom else None

    rig.broker.intercept = oom_once
    rig.gateway.sessions[KEY] = script(FIX, SUBMIT)
    cause, reward, report = await rig.run(fakes.write_task(tmp_path))
    assert (cause, reward, num_tests) == ("CAUSE_SUBMITTED", 1.0, 2), report


@pytest.mark.parametrize(
    ("solution_passes", "cause", "reward"),
    [(True, "CAUSE_SUBMITTED", 0.0), (False, "CAUSE_VERIFIER_FAILED", None)],
)
async def test_tests_killed_by_a_signal(
    rig: Rig, tmp_path: Path, solution_passes: bool, cause: str, reward: float | None
) -> None:
    """Never scored at once: 0 only if it repeats and the solution passes beside it."""
    condition = "grep -q unfixed calc.py && " if solution_passes else ""
    test_sh = f"#!/bin/sh\n{condition}kill -9 $$\npython3 -S -B -E /tests/check.py\n"
    task = fakes.write_task(tmp_path, test_sh=test_sh)
    rig.gateway.sessions[KEY] = script("echo '# unfixed' >> calc.py", SUBMIT)
    got, got_reward, report = await rig.run(task)
    assert (got, got_reward) == (cause, reward), report
    assert rig.broker.num_acquired == 4  # agent, two runs, control


async def test_tests_out_of_memory(rig: Rig, tmp_path: Path) -> None:
    def oom(box: fakes.Box, command: str) -> sandbox_pb2.ExecReply | None:
        hit = command == "/tests/test.sh" and "eat" in (box.root / "app/calc.py").read_text()
        return sandbox_pb2.ExecReply(exit_code=137, oom_killed=True) if hit else None

    rig.broker.intercept = oom
    rig.gateway.sessions[KEY] = script("echo '# eat' >> calc.py", SUBMIT)
    cause, reward, report = await rig.run(fakes.write_task(tmp_path))
    assert (cause, reward) == ("CAUSE_TESTS_OOM", 0.0), report


async def test_pytest_log(rig: Rig, tmp_path: Path) -> None:
    log = "/logs/verifier/pytest.txt"
    test_sh = (
        "#!/bin/sh\n(python3 -S -B /tests/check.py | grep -q '5 8' && w=PASSED || w=FAILED\n"
        "echo '== short test summary info =='; echo $w t.py::test_add; "
        f"echo 'tests exited with status 0') > {log}\n"
    )
    grading = json.dumps({"kind": "pytest", "fail_to_pass": ["t.py::test_add"], "log": log})
    task = fakes.write_task(tmp_path, test_sh=test_sh, grading=grading)
    for commands, want in (((FIX, SUBMIT), 1.0), ((SUBMIT,), 0.0)):
        rig.gateway.sessions[KEY] = script(*commands)
        cause, reward, report = await rig.run(task)
        assert (cause, reward) == ("CAUSE_SUBMITTED", want), report


@pytest.mark.parametrize(
    ("solution_passes", "cause", "reward"),
    [(True, "CAUSE_SUBMITTED", 0.0), (False, "CAUSE_VERIFIER_FAILED", None)],
)
async def test_a_log_too_large_to_read(
    rig: Rig, tmp_path: Path, solution_passes: bool, cause: str, reward: float | None
) -> None:
    """The patch's doing only if the solution's own log can be read."""
    log = "/logs/verifier/pytest.txt"
    condition = "grep -q flood calc.py && " if solution_passes else ""
    test_sh = (
        f"#!/bin/sh\n(echo '== short test summary info =='; echo PASSED t.py::test_add; "
        f"echo 'tests exited with status 0') > {log}\n"
        f"{condition}head -c 300000 /dev/zero >> {log}; true\n"
    )
    grading = json.dumps({"kind": "pytest", "fail_to_pass": ["t.py::test_add"], "log": log})
    task = fakes.write_task(tmp_path, test_sh=test_sh, grading=grading)
    rig.configure(grading={"max_log_bytes": 200000})
    rig.gateway.sessions[KEY] = script("echo '# flood' >> calc.py", SUBMIT)
    got, got_reward, report = await rig.run(task)
    assert (got, got_reward) == (cause, reward), report
    assert "log is not read" in report.evidence


async def test_silent_verifier(rig: Rig, tmp_path: Path) -> None:
    task = fakes.write_task(tmp_path, grading=None, test_sh="#!/bin/sh\ntrue\n")
    cause, reward, report = await rig.run(task, "nop")
    assert (cause, reward) == ("CAUSE_VERIFIER_FAILED", None), report


@pytest.mark.parametrize("defect", ["missing", "grading", "profile", "agent"])
async def test_malformed_tasks_are_ours(rig: Rig, tmp_path: Path, defect: str) -> None:
    agent, task = "nop", tmp_path / "missing"
    if defect == "grading":
        task = fakes.write_task(tmp_path, grading='{"kind": "magic"}')
    elif defect == "profile":
        task = fakes.write_task(tmp_path, profile="unknown")
    elif defect == "agent":
        task, agent = fakes.write_task(tmp_path), "gpt"
    done = await rig.runner.run(rig.lease(task, agent))
    assert done.cause == trajectory_pb2.CAUSE_HARNESS_FAILED, done
    assert not done.HasField("reward") and done.report.evidence


async def test_abandoned_trial_stops_at_once(rig: Rig, tmp_path: Path) -> None:
    rig.gateway.sessions[KEY] = script("sleep 20")
    started = time.monotonic()
    run = asyncio.create_task(rig.runner.run(rig.lease(fakes.write_task(tmp_path))))
    while "sleep 20" not in rig.broker.commands:
        await asyncio.sleep(0.02)
    run.cancel()
    done = await run
    assert done.cause == trajectory_pb2.CAUSE_INTERRUPTED and not done.HasField("reward")
    assert time.monotonic() - started < 5 and not rig.broker.boxes


async def test_many_at_a_time(rig: Rig, tmp_path: Path) -> None:
    task = fakes.write_task(tmp_path)
    leases = []
    for number in range(24):
        key = f"{number:040d}"
        rig.gateway.sessions[key] = script(*((FIX, SUBMIT) if number % 2 else (SUBMIT,)))
        leases.append(rig.lease(task, attempt_id=f"a{number}", session_key=key))
    done = await asyncio.gather(*(rig.runner.run(lease) for lease in leases))
    assert [d.reward for d in done] == [0.0, 1.0] * 12
