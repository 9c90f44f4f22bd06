"""Broker policy over a fake backend: capacity, idempotency, warm pool, expiry, cancellation."""

from __future__ import annotations

import asyncio
import io
from typing import BinaryIO

import pytest

from sandbox.backends.base import ExecOutcome, ExecSpec, SandboxLimits
from sandbox.broker import AcquireSpec, SandboxBroker
from sandbox.config import BrokerConfig, ImageConfig
from sandbox.errors import (
    BackendBusyError,
    CapacityError,
    InvalidRequestError,
    SandboxDiedError,
    StaleEpochError,
    UnknownLeaseError,
)


class FakeClock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class FakeSandbox:
    def __init__(self) -> None:
        self.alive = True
        self.closed = False
        self.specs: list[ExecSpec] = []
        self.limits: SandboxLimits | None = None

    async def prepare(self, limits: SandboxLimits, workdir: str) -> None:
        if workdir == "/bad":
            raise InvalidRequestError("bad workdir")
        self.limits = limits

    async def execute(self, spec: ExecSpec) -> ExecOutcome:
        if not self.alive:
            raise SandboxDiedError("dead")
        self.specs.append(spec)
        return ExecOutcome(b"", b"", 0, spec.command == "slow", False, 0, 0, 0.0)

    async def kill_processes(self) -> int:
        return 3

    async def upload(self, target_dir: str, archive: BinaryIO) -> tuple[int, int]:
        return 1, 2

    async def download(self, path: str, max_bytes: int) -> BinaryIO:
        return io.BytesIO(str(max_bytes).encode())

    async def collect_changes(self, path: str, max_bytes: int) -> tuple[BinaryIO, list[str]]:
        return io.BytesIO(), ["gone"]

    async def close(self) -> None:
        self.alive = False
        self.closed = True


class FakeBackend:
    name = "fake"

    def __init__(self) -> None:
        self.made: list[FakeSandbox] = []
        self.gate: asyncio.Event | None = None
        self.failures: list[Exception] = []

    async def start(self) -> None:
        pass

    async def create(self, image: str, limits: SandboxLimits) -> FakeSandbox:
        if self.gate is not None:
            await self.gate.wait()
        if self.failures:
            raise self.failures.pop(0)
        self.made.append(FakeSandbox())
        return self.made[-1]

    async def close(self) -> None:
        pass


def make(backend: FakeBackend, clock: FakeClock | None = None, **config: object) -> SandboxBroker:
    config.setdefault("reap_interval_s", 3600)
    return SandboxBroker(BrokerConfig.model_validate(config), backend, clock or FakeClock())


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_capacity_is_waited_for_and_refused_at_the_deadline() -> None:
    broker = make(FakeBackend(), capacity=1)
    first = await broker.acquire(AcquireSpec("host"), 1)
    with pytest.raises(CapacityError, match="1 leased"):
        await broker.acquire(AcquireSpec("host"), 0.01)
    waiting = asyncio.create_task(broker.acquire(AcquireSpec("host"), 5))
    await settle()
    assert await broker.release(first.lease.lease_id, first.lease.epoch)
    assert (await waiting).lease.lease_id != first.lease.lease_id
    assert broker.counters.num_acquire_failed == 1


async def test_a_repeated_key_gets_the_same_lease_even_while_it_is_made() -> None:
    backend = FakeBackend()
    backend.gate = asyncio.Event()
    broker = make(backend)
    spec = AcquireSpec("host", idempotency_key="k")
    both = [asyncio.create_task(broker.acquire(spec, 5)) for _ in range(2)]
    await settle()
    backend.gate.set()
    leases = [(await task).lease.lease_id for task in both]
    leases.append((await broker.acquire(spec, 5)).lease.lease_id)
    assert len(set(leases)) == 1 and len(backend.made) == 1


async def test_a_joined_caller_goes_on_when_the_first_is_cancelled() -> None:
    backend = FakeBackend()
    backend.gate = asyncio.Event()
    broker = make(backend)
    spec = AcquireSpec("host", idempotency_key="k")
    first = asyncio.create_task(broker.acquire(spec, 5))
    await settle()
    second = asyncio.create_task(broker.acquire(spec, 5))
    await settle()
    first.cancel()
    await settle()
    backend.gate.set()
    assert (await second).lease.idempotency_key == "k"


async def test_a_cancelled_acquire_leaves_nothing() -> None:
    backend = FakeBackend()
    backend.gate = asyncio.Event()
    broker = make(backend, capacity=1)
    call = asyncio.create_task(broker.acquire(AcquireSpec("host"), 5))
    await settle()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    backend.gate.set()
    assert len(broker.leases) == 0
    await broker.acquire(AcquireSpec("host"), 1)  # the slot is free


async def test_a_failed_prepare_closes_the_sandbox_and_frees_its_slot() -> None:
    backend = FakeBackend()
    broker = make(backend, capacity=1)
    with pytest.raises(InvalidRequestError):
        await broker.acquire(AcquireSpec("host", workdir="/bad"), 1)
    assert backend.made[0].closed
    await broker.acquire(AcquireSpec("host"), 1)


async def test_expiry_closes_the_sandbox_and_fences_the_holder() -> None:
    clock, backend = FakeClock(), FakeBackend()
    broker = make(backend, clock)
    lease = (await broker.acquire(AcquireSpec("host", ttl_s=10), 1)).lease
    clock.now_s = 5
    broker.renew(lease.lease_id, lease.epoch, 10)
    clock.now_s = 14
    assert await broker.reap() == 0
    clock.now_s = 15
    assert await broker.reap() == 1
    assert backend.made[0].closed and broker.counters.num_expired == 1
    with pytest.raises(UnknownLeaseError):
        broker.renew(lease.lease_id, lease.epoch, 10)
    assert not await broker.release(lease.lease_id, lease.epoch)


async def test_a_stale_epoch_is_refused_everywhere_and_counted() -> None:
    broker = make(FakeBackend())
    lease = (await broker.acquire(AcquireSpec("host"), 1)).lease
    stale = (lease.lease_id, lease.epoch + 1)
    spec = ExecSpec("true", "", 0, 0)
    for work in (
        broker.execute(*stale, spec),
        broker.release(*stale),
        broker.kill_processes(*stale),
        broker.download(*stale, "/", 0),
    ):
        with pytest.raises(StaleEpochError):
            await work
    assert broker.counters.num_stale_epochs == 4
    await broker.execute(lease.lease_id, lease.epoch, spec)


async def test_defaults_and_caps_are_applied_to_a_command() -> None:
    backend = FakeBackend()
    broker = make(backend, default_exec_timeout_s=7, max_exec_timeout_s=9)
    lease = (await broker.acquire(AcquireSpec("host", workdir="/w"), 1)).lease
    await broker.execute(lease.lease_id, lease.epoch, ExecSpec("slow", "", 0, 0))
    await broker.execute(lease.lease_id, lease.epoch, ExecSpec("b", "/x", 100, 10**9))
    first, second = backend.made[0].specs
    assert (first.cwd, first.timeout_s, first.output_cap_bytes) == ("/w", 7, 2**16)
    assert (second.cwd, second.timeout_s, second.output_cap_bytes) == ("/x", 9, 4 * 2**20)
    assert broker.counters.num_execs == 2 and broker.counters.num_exec_timeouts == 1


async def test_a_dead_sandbox_is_unavailable_but_an_ended_lease_is_unknown() -> None:
    clock, backend = FakeClock(), FakeBackend()
    broker = make(backend, clock)
    lease = (await broker.acquire(AcquireSpec("host", ttl_s=10), 1)).lease
    backend.made[0].alive = False
    spec = ExecSpec("true", "", 0, 0)
    with pytest.raises(SandboxDiedError, match=lease.lease_id):
        await broker.execute(lease.lease_id, lease.epoch, spec)


async def test_warm_sandboxes_are_handed_out_refilled_and_never_dead() -> None:
    backend = FakeBackend()
    broker = make(backend, images={"host": ImageConfig(warm=2)})
    await broker.start()
    await settle()
    assert len(broker.pool) == 2
    backend.made[0].alive = False
    acquired = await broker.acquire(AcquireSpec("host"), 1)
    assert acquired.warm and acquired.lease.sandbox is backend.made[1]
    await broker.reap()
    await settle()
    assert len(broker.pool) == 2 and backend.made[0].closed
    await broker.close()
    assert all(sandbox.closed for sandbox in backend.made)


async def test_a_warm_sandbox_gives_way_to_another_image() -> None:
    backend = FakeBackend()
    images = {"a": ImageConfig(warm=1), "b": ImageConfig()}
    broker = make(backend, images=images, capacity=1)
    await broker.start()
    await settle()
    assert len(broker.pool) == 1
    acquired = await broker.acquire(AcquireSpec("b"), 1)
    assert not acquired.warm and backend.made[0].closed
    await broker.close()


async def test_a_busy_backend_is_tried_again_within_its_bound() -> None:
    backend = FakeBackend()
    broker = make(backend, max_start_attempts=3)
    backend.failures = [BackendBusyError("429", 0.0)] * 2
    await broker.acquire(AcquireSpec("host"), 5)
    backend.failures = [BackendBusyError("429", 0.0)] * 3
    with pytest.raises(BackendBusyError):
        await broker.acquire(AcquireSpec("host"), 5)


@pytest.mark.parametrize(
    "spec",
    [
        AcquireSpec("host", network=True),
        AcquireSpec("host", memory_bytes=1),
        AcquireSpec("host", cpu_cores=-1),
        AcquireSpec("host", ttl_s=-1),
    ],
    ids=["network", "memory", "cpu", "ttl"],
)
async def test_bad_requests_are_refused(spec: AcquireSpec) -> None:
    backend = FakeBackend()
    broker = make(backend)
    with pytest.raises(InvalidRequestError):
        await broker.acquire(spec, 1)
    assert all(sandbox.closed for sandbox in backend.made)
