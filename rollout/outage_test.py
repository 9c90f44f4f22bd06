"""Five minutes without a broker, on a clock that the test moves: nothing is lost, nothing is spent.

The manager, its tables, its breakers and its server are real; the test plays the workers and
reports what they would: a try that starts during the outage fails, as `backend_away`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from proto import rollout_pb2 as pb
from proto import trajectory_pb2 as tpb
from rollout.attempt_table import Attempt
from rollout.client import RolloutClient
from rollout.fakes import Testbed, play, publish

_OUTAGE_S = 300.0
_STEP_S = 1.0
_SLOTS = 16
_GROUPS, _SIZE = 8, 4


async def _begin(client: RolloutClient) -> None:
    tasks = [pb.Task(task_id=f"t{i}", path=f"/tasks/t{i}") for i in range(_GROUPS)]
    await client.add_tasks(pb.AddTasksRequest(pool=pb.POOL_TRAIN, tasks=tasks))
    await publish(client, 1)
    await client.set_admission(pb.SetAdmissionRequest(open=True))


async def _lease(bed: Testbed, num: int) -> list[Attempt]:
    """What may start at this moment; past the wire, which would wait for more in real time."""
    return await bed.manager.lease_attempts("w0", num, timeout_s=0.0)


async def _fail(client: RolloutClient, leased: Attempt, *, away: bool) -> bool:
    request = pb.FinishAttemptRequest(
        attempt_id=leased.attempt_id,
        epoch=leased.epoch,
        cause=tpb.CAUSE_SANDBOX_FAILED,
        report=pb.AttemptReport(evidence="exception=HealthcheckError", backend_away=away),
    )
    return (await client.finish_attempt(request)).requeued


def _state(status: pb.GetStatusReply, name: str) -> str:
    return next(b.state for b in status.backends if b.name == name)


def _testbed(folder: Path, **settings: Any) -> Testbed:
    return Testbed(
        folder,
        group_size=_SIZE,
        batch_groups=_GROUPS,
        drop_zero_variance=False,
        lease_ttl_s=60.0,
        **settings,
    )


@pytest.mark.parametrize("away", [True, False], ids=["unreachable", "every_start_fails"])
async def test_a_five_minute_outage_of_the_broker_costs_no_group(
    tmp_path: Path, away: bool
) -> None:
    """Either the worker can tell that the broker is away, or only the failures of all tasks do."""
    bed = _testbed(tmp_path)
    async with bed as client:
        await _begin(client)
        running = await _lease(bed, _SLOTS)
        assert len(running) == _SLOTS
        for leased in running[:4]:
            await play(client, leased, 1.0)
        running = running[4:]

        # Every sandbox dies at once; then the workers ask for more, second by second.
        num_tries = 0
        began_s = bed.clock.now_s
        states = set()
        while bed.clock.now_s < began_s + _OUTAGE_S:
            for leased in running:
                assert await _fail(client, leased, away=away), "requeued, each time"
            num_tries += len(running)
            bed.clock.now_s += _STEP_S
            bed.manager.tick()
            running = await _lease(bed, _SLOTS)
            states.add(_state(await client.get_status(), "sandbox"))
        assert {"open", "half_open"} <= states, states
        assert num_tries < 60, "an outage is probed, not hammered"
        status = await client.get_status()
        assert status.admission_open and not status.admission_held
        assert status.num_groups_dropped == 0 and status.causes == {"submitted": 4}
        (sandbox,) = (b for b in status.backends if b.name == "sandbox")
        assert sandbox.num_opened == 1
        assert sandbox.opened_at.ToSeconds() - began_s <= 2 * _STEP_S

        # It is back: within max_open_s probes find out, and everything goes on.
        back_s = bed.clock.now_s
        while not running:
            bed.clock.now_s += _STEP_S
            bed.manager.tick()
            running = await _lease(bed, _SLOTS)
        assert bed.clock.now_s - back_s <= bed.config.breaker.max_open_s + _STEP_S
        assert len(running) == bed.config.breaker.num_probes
        spent = sum(a.num_retries for a in bed.manager.attempts.select("1"))
        assert spent == 0, "the outage paid for every try"
        while running:
            for leased in running:
                await play(client, leased, 1.0)
            running = await _lease(bed, _SLOTS)
        status = await client.get_status()
        assert _state(status, "sandbox") == "closed"
        assert not next(b for b in status.backends if b.name == "sandbox").HasField("opened_at")
        assert status.num_groups_ready == _GROUPS and status.num_groups_dropped == 0
        assert status.causes == {"submitted": _GROUPS * _SIZE}


async def test_the_outage_outlives_a_restart_of_the_manager(tmp_path: Path) -> None:
    bed = _testbed(tmp_path)
    async with bed as client:
        await _begin(client)
        for leased in await _lease(bed, _SLOTS):
            await _fail(client, leased, away=True)
        assert await _lease(bed, _SLOTS) == []
    bed = _testbed(tmp_path)
    async with bed as client:
        await publish(client, 2)
        num_tries = 0
        for _ in range(int(_OUTAGE_S / _STEP_S)):
            for leased in await _lease(bed, _SLOTS):
                assert await _fail(client, leased, away=True)
                num_tries += 1
            bed.clock.now_s += _STEP_S
            bed.manager.tick()
        assert num_tries < 60
        assert sum(a.num_retries for a in bed.manager.attempts.select("1")) == 0
        assert (await client.get_status()).num_groups_dropped == 0


async def test_an_outage_without_end_pauses_the_run(tmp_path: Path) -> None:
    bed = _testbed(tmp_path, pause={"max_outage_s": 100.0})
    async with bed as client:
        await _begin(client)
        for leased in await _lease(bed, _SLOTS):
            await _fail(client, leased, away=True)
        bed.clock.now_s += 101.0
        bed.manager.tick()
        status = await client.get_status()
        assert status.admission_held
        assert "an outage lasts for 101 s: sandbox: " in status.admission_reason
        assert await _lease(bed, 1) == [], "no probes either: a person looks first"
        await client.set_admission(pb.SetAdmissionRequest(open=True))
        assert len(await _lease(bed, _SLOTS)) == bed.config.breaker.num_probes


async def test_an_attempt_that_breaks_its_backend_by_itself_ends_all_the_same(
    tmp_path: Path,
) -> None:
    """Its tries are free while each looks like an outage, within max_free_retries."""
    bed = _testbed(tmp_path, max_free_retries=5, max_attempt_retries=1)
    async with bed as client:
        await _begin(client)
        num_tries = 0
        while True:
            (leased,) = await _lease(bed, 1)
            num_tries += 1
            assert leased.attempt_id == "g000001-00"
            if not await _fail(client, leased, away=True):
                break
            bed.clock.now_s += bed.config.breaker.max_open_s
        assert num_tries == 1 + 5 + 1
        assert (await client.get_status()).causes == {"sandbox_failed": 1}


async def test_a_worker_that_drains_spends_no_retry(tmp_path: Path) -> None:
    bed = _testbed(tmp_path, pause={"window": 8, "min_tries": 2, "max_failure_rate": 0.1})
    async with bed as client:
        await _begin(client)
        for leased in await _lease(bed, _SLOTS):
            request = pb.FinishAttemptRequest(
                attempt_id=leased.attempt_id,
                epoch=leased.epoch,
                cause=tpb.CAUSE_INTERRUPTED,
                report=pb.AttemptReport(backend_away=True),
            )
            assert (await client.finish_attempt(request)).requeued
        assert sum(a.num_retries for a in bed.manager.attempts.select("1")) == 0
        status = await client.get_status()
        assert status.admission_open, "it is no failure that a run should pause for"
        assert len(await _lease(bed, _SLOTS)) == _SLOTS, "and no outage"


async def test_engines_that_are_all_gone_spend_no_retry(tmp_path: Path) -> None:
    """The manager knows its engines: no report has to say so."""
    bed = _testbed(tmp_path)
    async with bed as client:
        await _begin(client)
        (first, second) = await _lease(bed, 2)

        async def fail(leased: Attempt) -> int:
            await client.finish_attempt(
                pb.FinishAttemptRequest(
                    attempt_id=leased.attempt_id,
                    epoch=leased.epoch,
                    cause=tpb.CAUSE_ENGINE_FAILED,
                )
            )
            return bed.manager.attempts.get(leased.attempt_id).num_retries

        assert await fail(first) == 1
        await bed.fake_pool.restart("engine0", "test")
        assert await fail(second) == 0
