"""One leased sandbox: acquire, keep alive, use, release.

Owner: the attempt's environment. A session renews its lease in a task of its own until
`close`. Every failure of the broker or the sandbox becomes Harbor's `HealthcheckError`, so
that a dead sandbox ends the trial and never looks like a command's output. Cancelling an
`execute` cancels its RPC, upon which the broker kills the command's processes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from harbor.environments.base import HealthcheckError

from rollout.harness.config import SandboxUse
from rollout.harness.errors import TaskFormatError, TransferTooLargeError
from sandbox.client import (
    MAX_ACQUIRE_ARCHIVE_BYTES,
    AcquiredLease,
    Changes,
    ExecResult,
    InvalidRequestError,
    SandboxClient,
    SandboxError,
    StaleEpochError,
    TooLargeError,
    UnknownLeaseError,
)

_T = TypeVar("_T")


OnFailure = Callable[[SandboxError], None]
"""Told of each failure of the sandbox or its broker, before HealthcheckError is raised for it."""


async def _guard(call: Awaitable[_T], what: str, on_failure: OnFailure) -> _T:
    """Sorts the broker's errors: a bad request, too much data, or a sandbox that is dead to us."""
    try:
        return await call
    except InvalidRequestError as error:
        raise TaskFormatError(f"{what}: {error}") from error
    except TooLargeError as error:
        raise TransferTooLargeError(f"{what}: {error}") from error
    except SandboxError as error:
        on_failure(error)
        raise HealthcheckError(f"{what}: {type(error).__name__} {error}") from error


class SandboxSession:
    """A lease on one sandbox. Make it with `acquire`, give it back with `close`.

    Methods raise HealthcheckError when the sandbox or its broker failed, TaskFormatError when
    the broker refuses the request itself.
    """

    def __init__(
        self, client: SandboxClient, config: SandboxUse, lease: AcquiredLease, on_failure: OnFailure
    ) -> None:
        self._client, self._config, self._held_lease = client, config, lease
        self._on_failure = on_failure
        self._lost: SandboxError | None = None
        self._is_released = False
        self._keeper = asyncio.create_task(self._keep_alive(), name=f"keep-{lease.lease_id}")

    @classmethod
    async def acquire(
        cls,
        client: SandboxClient,
        config: SandboxUse,
        *,
        image: str,
        holder: str,
        workdir: str,
        on_failure: OnFailure,
        archive: bytes,
        memory_bytes: int = 0,
        cpu_cores: float = 0.0,
    ) -> SandboxSession:
        """Leases a fresh sandbox within acquire_timeout_s, filled from the tar `archive` at `/`."""
        fits = len(archive) <= MAX_ACQUIRE_ARCHIVE_BYTES
        call = client.acquire(
            image,
            holder=holder,
            ttl_s=config.ttl_s,
            memory_bytes=memory_bytes,
            cpu_cores=cpu_cores,
            workdir=workdir,
            archive=archive if fits else b"",
            timeout_s=config.acquire_timeout_s,
        )
        lease = await _guard(call, f"sandbox of image {image!r} for {holder}", on_failure)
        session = cls(client, config, lease, on_failure)
        if not fits:
            try:
                await session.upload(archive, "/")
            except BaseException:
                await session.close()
                raise
        return session

    async def _guarded(self, call: Awaitable[_T], what: str) -> _T:
        where = f"{what} in sandbox {self._held_lease.lease_id}"
        return await _guard(call, where, self._on_failure)

    @property
    def _lease(self) -> AcquiredLease:
        if self._lost is not None:
            self._on_failure(self._lost)
            raise HealthcheckError(
                f"sandbox {self._held_lease.lease_id} is gone: {type(self._lost).__name__} "
                f"{self._lost}"
            )
        return self._held_lease

    async def execute(
        self,
        command: str,
        *,
        timeout_s: float,
        output_cap_bytes: int,
        cwd: str = "",
        env: Mapping[str, str] | None = None,
        user: str = "",
        merge_output: bool = False,
    ) -> ExecResult:
        """Runs one command to its end or its timeout."""
        call = self._client.exec(
            self._lease,
            command,
            cwd=cwd,
            env=env,
            timeout_s=timeout_s,
            output_cap_bytes=output_cap_bytes,
            user=user,
            merge_output=merge_output,
            deadline_s=timeout_s + self._config.exec_slack_s,
        )
        return await self._guarded(call, "command")

    async def upload(self, archive: bytes, target_dir: str) -> None:
        """Unpacks a tar below target_dir."""
        timeout_s = self._config.transfer_timeout_s
        call = self._client.upload_tar(self._lease, archive, target_dir, timeout_s)
        await self._guarded(call, f"upload to {target_dir}")

    async def download(self, path: str, max_bytes: int) -> bytes | None:
        """A tar of path, or None when there is no such file or folder.

        Raises TransferTooLargeError past max_bytes.
        """
        timeout_s = self._config.transfer_timeout_s
        call = self._client.download(self._lease, path, max_bytes, timeout_s)
        try:
            return await self._guarded(call, f"download of {path}")
        except TaskFormatError:
            return None

    async def take_changes(self, path: str, max_bytes: int) -> Changes:
        """Kills all that was left running, tells what changed below path since the lease began,
        uploads included, and gives the sandbox back.

        Raises TransferTooLargeError past max_bytes; the sandbox then lives on.
        """
        timeout_s = self._config.transfer_timeout_s
        call = self._client.collect_changes(
            self._lease, path, max_bytes, timeout_s, kill_processes=True, release=True
        )
        changes = await self._guarded(call, f"changes of {path}")
        self._is_released = True
        self._keeper.cancel()
        return changes

    async def kill_processes(self) -> None:
        """Kills all that was left running."""
        await self._guarded(self._client.kill_processes(self._lease), "killing processes")

    async def close(self) -> None:
        """Gives the sandbox back. Never raises: a lease that cannot be released expires."""
        self._keeper.cancel()
        if self._is_released:
            return
        with contextlib.suppress(SandboxError):
            await self._client.release(self._held_lease)

    async def _keep_alive(self) -> None:
        normal_s = self._config.ttl_s / 3
        pause_s = normal_s
        while True:
            await asyncio.sleep(pause_s)
            try:
                await self._client.renew(self._held_lease, self._config.ttl_s)
            except (UnknownLeaseError, StaleEpochError) as error:
                self._lost = error
                return
            except SandboxError:
                pause_s = min(normal_s, 1.0)  # tried often while the lease lasts
            else:
                pause_s = normal_s
