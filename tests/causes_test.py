"""Rewards and causes with scripted agents, while each kind of failure hits a fifth of the attempts.

Real manager, ledger, scheduler, gateway, worker process and sandboxes. What every try does, and
how it is made to fail, is in scripted_attempts; each failure is made at the boundary that
it names. In the middle the worker is killed with SIGKILL and started again under its name.
"""

from __future__ import annotations

import asyncio
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from proto import rollout_pb2 as pb
from proto import trajectory_pb2 as tpb
from rollout.attempt_table import Attempt
from rollout.harness.fakes import write_task
from tests import scripted_attempts as scripted
from tests.scripted_attempts import Failure
from tests.scripted_world import World, open_world

_TIMEOUT_S = 270.0
_TAKEN_OVER = "the worker restarted"
_SETTINGS: dict[str, Any] = {
    "group_size": scripted.GROUP_SIZE,
    "batch_groups": scripted.NUM_GROUPS,
    "max_staleness": 0,
    "min_valid_members": 2,
    "max_attempt_retries": scripted.MAX_RETRIES,
    "time_budget_s": 15.0,
    # Nobody waits for a lease to expire here: a worker that starts again takes over at once.
    "lease_ttl_s": 600.0,
    "sampling": {"stop_token_ids": [2]},
    "caps": {
        "max_new_tokens_per_turn": scripted.TURN_TOKENS,
        "max_total_tokens": 4096,
        "max_turns": scripted.MAX_TURNS,
    },
    # More than half of all tries fail by the script, in no outage.
    "breaker": {"min_failures": 1000, "doubt_failures": 1000},
    "pause": {"max_failure_rate": 1.0},
}


def cause_name(cause: int) -> str:
    return tpb.Cause.Name(tpb.Cause.ValueType(cause)).removeprefix("CAUSE_").lower()


async def _until_finished(world: World, count: int) -> None:
    deadline_s = time.monotonic() + _TIMEOUT_S
    while world.bed.manager.attempts.count("state='finished'") < count:
        assert time.monotonic() < deadline_s, (await world.client.get_status(), "too slow")
        await asyncio.sleep(0.2)


async def _until_idle(world: World) -> None:
    deadline_s = time.monotonic() + _TIMEOUT_S
    while world.bed.manager.attempts.count("state<>'finished'"):
        assert time.monotonic() < deadline_s, (await world.client.get_status(), "too slow")
        await asyncio.sleep(0.2)


def test_the_script_is_what_it_claims() -> None:
    scripts = scripted.write_scripts(seed=3)
    hits = Counter(failure for script in scripts.values() for failure in script.failures)
    assert hits == dict.fromkeys(Failure, scripted.NUM_ATTEMPTS // 5)
    plays = Counter(s.play.cause for s in scripts.values() if s.reward is not None)
    assert set(plays) == {
        *("submitted", "turn_cap", "token_cap", "time_budget", "loop"),
        *("agent_oom", "tests_hung", "tests_oom"),
    }
    assert {s.reward for s in scripts.values()} == {0.0, 0.5, 1.0, None}
    spent = [m for m, s in scripts.items() if s.reward is None and m[0] != scripted.DOOMED_GROUP]
    assert spent, "an attempt outside the doomed group spends its retries too"
    reasons = {scripted.outcome(scripts, g + 1).drop_reason for g in range(scripted.NUM_GROUPS)}
    assert {"", "too_few_valid_members"} <= reasons


async def test_every_reward_and_every_cause_equals_the_script(tmp_path: Path) -> None:
    scripts = scripted.write_scripts(seed=3)
    with tempfile.TemporaryDirectory(prefix="swe_rl_causes.", dir="/tmp") as scratch:
        async with open_world(tmp_path, Path(scratch), scripts, **_SETTINGS) as world:
            tasks = []
            for number in range(scripted.NUM_GROUPS):
                path = write_task(
                    tmp_path / "tasks",
                    f"t{number:02d}",
                    verifier_s=5.0,
                    test_sh=scripted.TEST_SH,
                    grading=None,
                )
                toml = path / "task.toml"
                toml.write_text(toml.read_text() + "memory_mb = 128\n")
                tasks.append(pb.Task(task_id=path.name, path=str(path)))
            await world.client.add_tasks(pb.AddTasksRequest(pool=pb.POOL_TRAIN, tasks=tasks))
            await world.client.set_admission(pb.SetAdmissionRequest(open=True))
            await world.worker.start()
            await _until_finished(world, scripted.NUM_ATTEMPTS // 4)
            await world.worker.end(signal.SIGKILL)
            await world.worker.start()
            await _until_idle(world)
            await _compare(world, scripts)


async def _compare(world: World, scripts: dict[tuple[int, int], scripted.Script]) -> None:
    manager = world.bed.manager
    finished = {scripted.parse(a.attempt_id): a for a in manager.attempts.select("1")}
    assert set(scripts) <= set(finished)
    got = {member: _told(world, finished[member]) for member in scripts}
    want = {member: (s.causes, s.reward) for member, s in scripts.items()}
    wrong = {
        member: (got[member], want[member]) for member in scripts if got[member] != want[member]
    }
    assert not wrong, wrong

    groups = manager.ledger.db.execute("SELECT number, state, reason FROM groups").fetchall()
    ready = 0
    for number, state, reason in groups:
        if number > scripted.NUM_GROUPS:
            assert reason == "zero_variance", "a group of extras"
            continue
        expected = scripted.outcome(scripts, number).drop_reason
        assert (state, reason) == ("dropped" if expected else "ready", expected), number
        ready += not expected
    batch = await world.client.next_batch(
        pb.NextBatchRequest(step=1, weight_version=1, num_groups=ready), timeout_s=10.0
    )
    trained = {m.attempt_id: m.reward for group in batch.groups for m in group.members}
    assert trained == {
        finished[member].attempt_id: script.reward
        for member, script in scripts.items()
        if script.reward is not None and not scripted.outcome(scripts, member[0]).drop_reason
    }
    killed = manager.ledger.number("SELECT COUNT(*) FROM tries WHERE evidence=?", _TAKEN_OVER)
    assert killed > 0, "the worker held nothing when it was killed"
    assert sum(a.num_retries for a in finished.values()) == sum(
        len(script.causes) - 1 for script in scripts.values()
    ), "retries were spent on what the script does not have"
    status = await world.client.get_status()
    assert not status.admission_held and "unclassified" not in status.causes
    assert all(backend.num_opened == 0 for backend in status.backends)


def _told(world: World, attempt: Attempt) -> tuple[list[str], float | None]:
    """The causes of the tries that counted, and the reward."""
    rows = world.bed.manager.ledger.db.execute(
        "SELECT cause, evidence FROM tries WHERE attempt_id=? ORDER BY epoch", (attempt.attempt_id,)
    ).fetchall()
    return [cause_name(cause) for cause, words in rows if words != _TAKEN_OVER], attempt.reward
