"""The worker's loops against an in-process manager; the trial is a small stand-in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from proto import rollout_pb2, rollout_pb2_grpc, trajectory_pb2
from proto.serving import dial
from rollout.client import FencedError, RolloutClient
from rollout.harness.config import HarnessConfig
from rollout.harness.fakes import FakeManager, serve
from rollout.harness.worker import Worker

T = trajectory_pb2


class StubRunner:
    """Runs until `release`, or ends as interrupted when cancelled."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.running: set[str] = set()
        self.peak = 0

    async def run(self, leased: rollout_pb2.LeasedAttempt) -> rollout_pb2.FinishAttemptRequest:
        self.running.add(leased.attempt_id)
        self.peak = max(self.peak, len(self.running))
        request = rollout_pb2.FinishAttemptRequest(
            attempt_id=leased.attempt_id, epoch=leased.epoch, cause=T.CAUSE_SUBMITTED, reward=1.0
        )
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            request.cause = T.CAUSE_INTERRUPTED
            request.ClearField("reward")
        finally:
            self.running.discard(leased.attempt_id)
        return request


class Rig:
    def __init__(
        self, manager: FakeManager, worker: Worker, runner: StubRunner, clock: list[float]
    ) -> None:
        self.manager, self.worker, self.runner, self.clock = manager, worker, runner, clock
        self.config: HarnessConfig
        self.client: RolloutClient
        self.stop = asyncio.Event()
        self.task = asyncio.create_task(worker.run(self.stop))

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.01)

    async def drain(self) -> None:
        self.stop.set()
        await asyncio.wait_for(self.task, 10)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    manager = FakeManager(
        queue=[rollout_pb2.LeasedAttempt(attempt_id=f"a{i}", epoch=1) for i in range(5)]
    )
    server, address = await serve(
        lambda s: rollout_pb2_grpc.add_RolloutManagerServicer_to_server(manager, s)
    )
    config = HarnessConfig(
        manager_address=address,
        broker_address="127.0.0.1:1",
        gateway_urls=["http://127.0.0.1:1"],
        trials_dir=tmp_path,
        concurrency=3,
        lease_wait_s=0.5,
        renew_interval_s=3600,  # tests call renew_once
        backoff_max_s=0.2,
        finish_retry_s=30,
    )
    channel, runner, clock = dial(address), StubRunner(), [1000.0]
    client = RolloutClient(channel)
    worker = Worker(config, "w1", client, runner, clock=lambda: clock[0])
    rig = Rig(manager, worker, runner, clock)
    rig.config, rig.client = config, client
    yield rig
    rig.runner.release.set()
    await rig.drain()
    await channel.close()
    await server.stop(0)


async def test_runs_everything_within_its_concurrency(rig: Rig) -> None:
    await rig.until(lambda: len(rig.runner.running) == 3)
    await asyncio.sleep(0.05)
    assert len(rig.manager.queue) == 2
    rig.runner.release.set()
    await rig.manager.until_finished(5)
    assert rig.runner.peak == 3
    assert {f.cause for f in rig.manager.finished.values()} == {T.CAUSE_SUBMITTED}


async def test_lost_lease_is_abandoned_and_not_reported(rig: Rig) -> None:
    await rig.until(lambda: len(rig.runner.running) == 3)
    rig.manager.lost.add("a1")
    await rig.worker.renew_once()
    await rig.until(lambda: rig.worker.num_lost == 1)
    rig.runner.release.set()
    await rig.manager.until_finished(4)
    assert "a1" not in rig.manager.finished


async def test_renewal_outage_abandons_only_expired_leases(rig: Rig) -> None:
    await rig.until(lambda: len(rig.runner.running) == 3)
    rig.manager.outage = grpc.StatusCode.UNAVAILABLE
    await rig.worker.renew_once()
    await asyncio.sleep(0.05)
    assert len(rig.runner.running) == 3
    rig.clock[0] = 1e12  # far past every expiry
    await rig.worker.renew_once()
    await rig.until(lambda: rig.worker.num_lost == 3)
    rig.manager.outage = None
    rig.runner.release.set()
    await rig.manager.until_finished(2)


async def test_manager_outage_delays_results_only(rig: Rig) -> None:
    await rig.until(lambda: len(rig.runner.running) == 3)
    rig.manager.outage = grpc.StatusCode.UNAVAILABLE
    rig.runner.release.set()
    await asyncio.sleep(0.3)
    assert not rig.manager.finished
    rig.manager.outage = None
    await rig.manager.until_finished(5)
    assert rig.worker.num_lost == 0


async def test_refused_results_are_counted_as_lost(rig: Rig) -> None:
    await rig.until(lambda: len(rig.runner.running) == 3)
    rig.manager.lost.update({"a0", "a1"})
    rig.runner.release.set()
    await rig.manager.until_finished(3)
    assert rig.worker.num_lost == 2


async def test_drain_reports_interrupted(rig: Rig) -> None:
    await rig.until(lambda: len(rig.runner.running) == 3)
    await rig.drain()
    assert {f.cause for f in rig.manager.finished.values()} == {T.CAUSE_INTERRUPTED}
    assert len(rig.manager.finished) == 3 and len(rig.manager.queue) == 2
    assert not any(f.HasField("reward") for f in rig.manager.finished.values())


async def test_every_start_is_another_incarnation_and_a_lost_name_ends_the_worker(
    rig: Rig,
) -> None:
    await rig.until(lambda: len(rig.runner.running) == 3)
    (first,) = rig.manager.incarnations
    assert len(first) >= 16
    rig.manager.fenced_names.add("w1")
    rig.runner.release.set()
    with pytest.raises(FencedError):
        await asyncio.wait_for(rig.task, 10)
    rig.manager.fenced_names.clear()
    again = Worker(rig.config, "w1", rig.client, rig.runner)
    rig.task = asyncio.create_task(again.run(rig.stop))
    await rig.until(lambda: len(rig.manager.incarnations) == 2)


async def test_an_attempt_that_comes_back_replaces_the_old_try(rig: Rig) -> None:
    await rig.until(lambda: len(rig.runner.running) == 3)
    rig.manager.lost.add("a2")
    await rig.worker.renew_once()
    await rig.until(lambda: rig.worker.num_lost == 1)
    rig.manager.lost.clear()
    rig.manager.queue.append(rollout_pb2.LeasedAttempt(attempt_id="a2", epoch=2))
    rig.runner.release.set()
    await rig.manager.until_finished(5)
    assert rig.manager.finished["a2"].epoch == 2
