"""The broker: owner of every sandbox and of the leases on them.

    gRPC (server.py)                      reaper: every reap_interval_s, frees expired leases
        |                                        |
        v                                        v
    SandboxBroker --- LeaseTable (who owns what until when, fenced by epoch)
        |    |
        |    `--- WarmPool  <--- refill task (starts sandboxes while there is room)
        |
        `--- StartRate ---> Backend.create ---> Sandbox

One event loop owns all of it. What blocks: Acquire on a slot of `capacity`, on the start rate and
on the backend; Exec on the command before it in the same sandbox; transfers on the backend's
threads. A slot is held from before a sandbox is made until it is wholly closed. A sandbox is
leased once and never goes back to the pool.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

from sandbox.backends.base import Backend, ExecOutcome, ExecSpec, Sandbox, SandboxLimits
from sandbox.config import BrokerConfig
from sandbox.errors import (
    BackendBusyError,
    CapacityError,
    InvalidRequestError,
    SandboxDiedError,
    SandboxError,
    StaleEpochError,
    UnknownLeaseError,
)
from sandbox.lease_table import Lease, LeaseTable
from sandbox.pool import WarmPool
from sandbox.reaper import run_reaper
from sandbox.start_rate import StartRate

_log = logging.getLogger(__name__)

_BUSY_RETRY_S = 0.25
_REFILL_RETRY_S = 2.0


@dataclass
class Counters:
    """As BrokerCounters of the contract."""

    num_acquired: int = 0
    num_released: int = 0
    num_expired: int = 0
    num_acquire_failed: int = 0
    num_execs: int = 0
    num_exec_timeouts: int = 0
    num_oom_kills: int = 0
    num_warm_hits: int = 0
    num_stale_epochs: int = 0


@dataclass(frozen=True)
class AcquireSpec:
    """An Acquire request; zero and empty mean the broker's default."""

    image: str
    holder: str = ""
    ttl_s: float = 0.0
    memory_bytes: int = 0
    max_pids: int = 0
    cpu_cores: float = 0.0
    idempotency_key: str = ""
    workdir: str = ""
    network: bool = False
    archive: bytes = b""
    """A tar to unpack at `/`."""


@dataclass(frozen=True)
class Acquired:
    """A lease and how it came about."""

    lease: Lease[Sandbox]
    queued_s: float
    starting_s: float
    warm: bool


class SandboxBroker:
    """See the module's docstring. All methods run on one event loop."""

    def __init__(
        self,
        config: BrokerConfig,
        backend: Backend,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.backend = backend
        self.clock = clock
        self.counters = Counters()
        self.leases: LeaseTable[Sandbox] = LeaseTable(clock)
        self.pool: WarmPool[Sandbox] = WarmPool(
            {name: image.warm for name, image in config.images.items()}
        )
        self._slots = asyncio.Semaphore(config.capacity)
        self._start_rate = StartRate(config.start_rate_per_s, config.start_burst, clock)
        self._acquiring: dict[str, asyncio.Task[Acquired]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._refill_wanted = asyncio.Event()
        self._loops: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Starts the backend, the reaper and the refill. Raises BackendSetupError."""
        await self.backend.start()
        self._loops = [
            asyncio.create_task(run_reaper(self.reap, self.config.reap_interval_s)),
            asyncio.create_task(self._refill_loop()),
        ]
        self._refill_wanted.set()

    async def close(self) -> None:
        """Ends every lease and sandbox, then the backend."""
        for task in [*self._loops, *self._acquiring.values()]:
            task.cancel()
        await asyncio.gather(*self._loops, *self._acquiring.values(), return_exceptions=True)
        sandboxes = [lease.sandbox for lease in self.leases.pop_all()]
        while (warm := self.pool.take_any()) is not None:
            sandboxes.append(warm)
        await asyncio.gather(*(sandbox.close() for sandbox in sandboxes), return_exceptions=True)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=10)
        await self.backend.close()

    async def acquire(self, spec: AcquireSpec, timeout_s: float) -> Acquired:
        """Gives a fresh sandbox within timeout_s.

        Raises InvalidRequestError, CapacityError, SandboxDiedError. Cancelled or failed, it
        leaves nothing behind; with an idempotency key, a repeat joins the first call.
        """
        key = spec.idempotency_key
        while key:
            lease = self.leases.find(key)
            if lease is not None:
                return Acquired(lease, 0.0, 0.0, warm=False)
            running = self._acquiring.get(key)
            if running is None:
                break
            await asyncio.wait({running})
            if not running.cancelled():
                return running.result()
        task = asyncio.create_task(self._acquire(spec, timeout_s))
        if key:
            self._acquiring[key] = task
            task.add_done_callback(lambda _: self._forget_acquiring(key, task))
        try:
            return await task
        except SandboxError:
            self.counters.num_acquire_failed += 1
            raise
        except asyncio.CancelledError:
            self.counters.num_acquire_failed += 1
            # The call ended while the answer was on its way: nobody would ever release it.
            if task.done() and not task.cancelled() and task.exception() is None:
                self._end(task.result().lease)
            raise

    def _forget_acquiring(self, key: str, task: asyncio.Task[Acquired]) -> None:
        if self._acquiring.get(key) is task:
            del self._acquiring[key]

    async def _acquire(self, spec: AcquireSpec, timeout_s: float) -> Acquired:
        limits, ttl_s = self._limits(spec), self._ttl_s(spec.ttl_s)
        workdir = spec.workdir or "/app"
        started_s = self.clock()
        sandbox = self.pool.take(spec.image) if spec.cpu_cores == 0 else None
        warm = sandbox is not None
        ready_s = started_s
        if sandbox is None:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._take_slot()
                    ready_s, sandbox = await self._start_in_slot(spec.image, limits)
            except TimeoutError as error:
                raise CapacityError(
                    f"no sandbox for {spec.holder or 'the caller'} within {timeout_s:.1f} s: "
                    f"{len(self.leases)} leased and {len(self.pool)} warm of "
                    f"{self.config.capacity}; release leases, raise capacity or wait longer"
                ) from error
        try:
            await sandbox.prepare(limits, workdir)
            if spec.archive:
                await sandbox.upload("/", io.BytesIO(spec.archive))
        except BaseException:
            await self._dispose(sandbox)
            raise
        finally:
            self._refill_wanted.set()
        lease = self.leases.add(
            sandbox,
            ttl_s=ttl_s,
            holder=spec.holder,
            image=spec.image,
            workdir=workdir,
            idempotency_key=spec.idempotency_key,
        )
        self.counters.num_acquired += 1
        self.counters.num_warm_hits += warm
        return Acquired(lease, ready_s - started_s, 0 if warm else self.clock() - ready_s, warm)

    def renew(self, lease_id: str, epoch: int, ttl_s: float) -> Lease[Sandbox]:
        """Extends a lease. Raises UnknownLeaseError, StaleEpochError."""
        lease = self.lease(lease_id, epoch)
        return self.leases.renew(lease.lease_id, epoch, self._ttl_s(ttl_s))

    async def release(self, lease_id: str, epoch: int) -> bool:
        """Frees a sandbox; False when it was gone. Raises StaleEpochError."""
        try:
            lease = self.leases.remove(lease_id, epoch)
        except StaleEpochError:
            self.counters.num_stale_epochs += 1
            raise
        if lease is None:
            return False
        self.counters.num_released += 1
        await asyncio.shield(self._spawn(self._dispose(lease.sandbox)))
        return True

    async def reap(self) -> int:
        """Frees what has expired; returns how many."""
        expired = self.leases.pop_expired()
        self.counters.num_expired += len(expired)
        for lease in expired:
            _log.warning("lease %s of %s expired", lease.lease_id, lease.holder)
        await asyncio.gather(*(self._dispose(lease.sandbox) for lease in expired))
        dead = self.pool.take_dead()
        await asyncio.gather(*(self._dispose(sandbox) for sandbox in dead))
        if expired or dead:
            self._refill_wanted.set()
        return len(expired)

    def lease(self, lease_id: str, epoch: int) -> Lease[Sandbox]:
        """The lease that a call names. Raises UnknownLeaseError, StaleEpochError."""
        try:
            return self.leases.get(lease_id, epoch)
        except StaleEpochError:
            self.counters.num_stale_epochs += 1
            raise

    async def execute(self, lease_id: str, epoch: int, spec: ExecSpec) -> ExecOutcome:
        """Runs a command; zero timeout or cap means the default, empty cwd the workdir."""
        lease = self.lease(lease_id, epoch)
        config = self.config
        spec = replace(
            spec,
            cwd=spec.cwd or lease.workdir,
            timeout_s=min(
                spec.timeout_s or config.default_exec_timeout_s, config.max_exec_timeout_s
            ),
            output_cap_bytes=min(
                spec.output_cap_bytes or config.default_output_cap_bytes,
                config.max_output_cap_bytes,
            ),
        )
        lease.num_execs += 1
        self.counters.num_execs += 1
        try:
            outcome = await self._run(lease, lease.sandbox.execute(spec))
        except InvalidRequestError:
            lease.num_execs -= 1  # it never reached the sandbox
            self.counters.num_execs -= 1
            raise
        self.counters.num_exec_timeouts += outcome.timed_out
        self.counters.num_oom_kills += outcome.oom_killed
        return outcome

    async def kill_processes(self, lease_id: str, epoch: int) -> int:
        """Kills all but init; returns how many."""
        lease = self.lease(lease_id, epoch)
        return await self._run(lease, lease.sandbox.kill_processes())

    async def upload(
        self, lease_id: str, epoch: int, target_dir: str, archive: BinaryIO
    ) -> tuple[int, int]:
        """Unpacks a tar file; returns (files, bytes)."""
        lease = self.lease(lease_id, epoch)
        return await self._run(lease, lease.sandbox.upload(target_dir, archive))

    async def download(self, lease_id: str, epoch: int, path: str, max_bytes: int) -> BinaryIO:
        """A tar file of path."""
        lease = self.lease(lease_id, epoch)
        return await self._run(lease, lease.sandbox.download(path, self._transfer(max_bytes)))

    async def collect_changes(
        self,
        lease_id: str,
        epoch: int,
        path: str,
        max_bytes: int,
        *,
        kill_processes: bool = False,
        release: bool = False,
    ) -> tuple[BinaryIO, list[str]]:
        """A tar file of the changes below path, and the deleted paths. `release` ends the lease
        after it.
        """
        lease = self.lease(lease_id, epoch)
        if kill_processes:
            await self._run(lease, lease.sandbox.kill_processes())
        work = lease.sandbox.collect_changes(path, self._transfer(max_bytes))
        file, deleted = await self._run(lease, work)
        if release:
            try:
                await self.release(lease_id, epoch)
            except BaseException:
                file.close()
                raise
        return file, deleted

    async def _run(self, lease: Lease[Sandbox], work: Coroutine[Any, Any, Any]) -> Any:
        """Awaits work in a sandbox; one that died because its lease ended is unknown instead."""
        try:
            return await work
        except SandboxDiedError as error:
            try:
                self.leases.get(lease.lease_id, lease.epoch)
            except UnknownLeaseError as gone:
                raise UnknownLeaseError(
                    f"lease {lease.lease_id} ended (released or expired) during the call"
                ) from gone
            raise SandboxDiedError(f"lease {lease.lease_id}: {error}") from error

    def _limits(self, spec: AcquireSpec) -> SandboxLimits:
        if spec.network:
            raise InvalidRequestError("network=true is refused: the local backend has none to give")
        if spec.memory_bytes and spec.memory_bytes < 16 * 2**20:
            raise InvalidRequestError(
                f"memory_bytes={spec.memory_bytes} is below 16 MiB: nothing would start"
            )
        if spec.cpu_cores < 0 or (0 < spec.cpu_cores < 0.01):
            raise InvalidRequestError(f"cpu_cores={spec.cpu_cores} is below 0.01")
        return SandboxLimits(
            memory_bytes=spec.memory_bytes or self.config.default_memory_bytes,
            max_pids=spec.max_pids or self.config.default_max_pids,
            cpu_cores=spec.cpu_cores,
        )

    def _ttl_s(self, ttl_s: float) -> float:
        if ttl_s < 0:
            raise InvalidRequestError(f"ttl of {ttl_s} s is negative")
        return min(ttl_s or self.config.default_ttl_s, self.config.max_ttl_s)

    def _transfer(self, max_bytes: int) -> int:
        return min(max_bytes or self.config.max_transfer_bytes, self.config.max_transfer_bytes)

    async def _take_slot(self) -> None:
        """Waits for a slot; a warm sandbox of another image gives its own up."""
        if self._slots.locked():
            spare = self.pool.take_any()
            if spare is not None:
                self._spawn(self._dispose(spare))
        await self._slots.acquire()

    async def _start_in_slot(self, image: str, limits: SandboxLimits) -> tuple[float, Sandbox]:
        """Starts a sandbox in a slot already taken; frees the slot on failure."""
        try:
            for attempt in range(self.config.max_start_attempts):
                if (delay_s := self._start_rate.reserve()) > 0:
                    await asyncio.sleep(delay_s)
                begun_s = self.clock()
                try:
                    sandbox = await self.backend.create(image, limits)
                except BackendBusyError as error:
                    self._start_rate.refused(error.retry_after_s or _BUSY_RETRY_S)
                    if attempt + 1 == self.config.max_start_attempts:
                        raise
                    _log.warning("backend busy, start %d: %s", attempt + 1, error)
                    continue
                self._start_rate.succeeded()
                return begun_s, sandbox
            raise AssertionError("max_start_attempts is at least 1")
        except BaseException:
            self._slots.release()
            raise

    async def _dispose(self, sandbox: Sandbox) -> None:
        """Closes a sandbox, then frees its slot."""
        try:
            await sandbox.close()
        finally:
            self._slots.release()
            self._refill_wanted.set()

    def _end(self, lease: Lease[Sandbox]) -> None:
        with contextlib.suppress(SandboxError):
            if self.leases.remove(lease.lease_id, lease.epoch) is not None:
                self._spawn(self._dispose(lease.sandbox))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _refill_loop(self) -> None:
        """Keeps the pool at its targets while there is room."""
        while True:
            await self._refill_wanted.wait()
            self._refill_wanted.clear()
            while missing := self.pool.missing():
                if self._slots.locked():
                    break  # a release frees a slot and asks again
                await self._slots.acquire()
                image = missing[0]
                try:
                    _, sandbox = await self._start_in_slot(image, self._limits(AcquireSpec(image)))
                except SandboxError as error:
                    _log.warning("cannot warm a sandbox of %s: %s", image, error)
                    await asyncio.sleep(_REFILL_RETRY_S)
                    self._refill_wanted.set()
                    break
                self.pool.add(image, sandbox)
