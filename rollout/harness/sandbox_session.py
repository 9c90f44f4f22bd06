"""One leased sandbox: acquire, keep alive, use, release.

Owner: the attempt's environment. A session renews its lease in a task of its own until
`close`. Every failure of the broker or the sandbox becomes Harbor's `HealthcheckError`, so
that a dead sandbox ends the trial and never looks like a command's output. Cancelling an
`execute` cancels its RPC, upon which the broker kills the command's whole process group.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.duration_pb2 import Duration
from harbor.environments.base import HealthcheckError

from proto import sandbox_pb2 as pb
from proto import sandbox_pb2_grpc as pb_grpc
from rollout.harness.config import SandboxUse
from rollout.harness.errors import TaskFormatError, TransferTooLargeError

_T = TypeVar("_T")
_CHUNK_BYTES = 1 << 20


def _duration(seconds: float) -> Duration:
    value = Duration()
    value.FromMilliseconds(round(seconds * 1000))
    return value


class SandboxSession:
    """A lease on one sandbox. Make it with `acquire`, give it back with `close`."""

    def __init__(self, stub: Any, config: SandboxUse, lease: pb.Lease) -> None:
        self._stub, self._config, self._lease = stub, config, lease
        self._lost = ""
        self._keeper = asyncio.create_task(self._keep_alive(), name=f"keep-{lease.lease_id}")

    @classmethod
    async def acquire(
        cls,
        channel: grpc.aio.Channel,
        config: SandboxUse,
        *,
        image: str,
        holder: str,
        workdir: str,
        memory_bytes: int = 0,
        cpu_cores: float = 0.0,
    ) -> SandboxSession:
        """Leases a fresh sandbox. Raises HealthcheckError, or TaskFormatError for a bad image."""
        stub: Any = pb_grpc.SandboxBrokerStub(channel)  # type: ignore[no-untyped-call]
        request = pb.AcquireRequest(
            image=image,
            holder=holder,
            ttl=_duration(config.ttl_s),
            limits=pb.Limits(memory_bytes=memory_bytes, cpu_cores=cpu_cores),
            idempotency_key=secrets.token_hex(16),
            workdir=workdir,
        )
        try:
            reply = await stub.Acquire(request, timeout=config.acquire_timeout_s)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                raise TaskFormatError(
                    f"the broker refuses image {image!r}, workdir {workdir!r} for {holder}: "
                    f"{error.details()}; correct the task or the broker's images"
                ) from error
            raise HealthcheckError(
                f"no sandbox for {holder} (image {image!r}): {error.code().name} {error.details()}"
            ) from error
        return cls(stub, config, reply.lease)

    @property
    def lease_id(self) -> str:
        """The lease's id, for messages."""
        return self._lease.lease_id

    @property
    def lost(self) -> str:
        """Why the lease is gone, as far as the keeper knows; empty while it is held."""
        return self._lost

    def _key(self) -> dict[str, Any]:
        if self._lost:
            raise HealthcheckError(f"sandbox {self.lease_id} is gone: {self._lost}")
        return {"lease_id": self._lease.lease_id, "epoch": self._lease.epoch}

    async def _guard(self, call: Awaitable[_T], what: str) -> _T:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            where = f"{what} in sandbox {self.lease_id}: {error.details()}"
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise TransferTooLargeError(where) from error
            if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                raise TaskFormatError(where) from error
            raise HealthcheckError(
                f"{what} failed in sandbox {self.lease_id}: {error.code().name} {error.details()}"
            ) from error

    async def execute(
        self,
        command: str,
        *,
        timeout_s: float,
        output_cap_bytes: int,
        cwd: str = "",
        env: dict[str, str] | None = None,
        user: str = "",
        merge_output: bool = False,
    ) -> pb.ExecReply:
        """Runs one command to its end or its timeout. Raises HealthcheckError."""
        request = pb.ExecRequest(
            command=command,
            cwd=cwd,
            env=env or {},
            timeout=_duration(timeout_s),
            output_cap_bytes=output_cap_bytes,
            user=user,
            merge_output=merge_output,
            **self._key(),
        )
        deadline = timeout_s + self._config.exec_slack_s
        return await self._guard(self._stub.Exec(request, timeout=deadline), "exec")

    async def upload(self, tar: bytes, target_dir: str) -> None:
        """Unpacks a tar below target_dir. Raises HealthcheckError."""
        key = self._key()

        async def messages() -> AsyncIterator[pb.UploadRequest]:
            yield pb.UploadRequest(target_dir=target_dir, tar_chunk=tar[:_CHUNK_BYTES], **key)
            for start in range(_CHUNK_BYTES, len(tar), _CHUNK_BYTES):
                yield pb.UploadRequest(tar_chunk=tar[start : start + _CHUNK_BYTES])

        call = self._stub.Upload(messages(), timeout=self._config.transfer_timeout_s)
        await self._guard(call, f"upload to {target_dir}")

    async def download(self, path: str, max_bytes: int = 0) -> bytes | None:
        """A tar of path, or None when there is no such path.

        Raises HealthcheckError, or TransferTooLargeError past max_bytes.
        """
        request = pb.DownloadRequest(path=path, max_bytes=max_bytes, **self._key())
        call = self._stub.Download(request, timeout=self._config.transfer_timeout_s)
        try:
            tar, _ = await self._guard(self._join(call), f"download of {path}")
        except TaskFormatError:
            return None
        return tar

    async def collect_changes(self, path: str, max_bytes: int) -> tuple[bytes, list[str]]:
        """A tar of what changed below path since the lease began, and the deleted paths.

        Raises HealthcheckError, or TransferTooLargeError past max_bytes.
        """
        request = pb.CollectChangesRequest(path=path, max_bytes=max_bytes, **self._key())
        call = self._stub.CollectChanges(request, timeout=self._config.transfer_timeout_s)
        return await self._guard(self._join(call), f"collecting changes of {path}")

    @staticmethod
    async def _join(call: Any) -> tuple[bytes, list[str]]:
        data, deleted = bytearray(), []
        async for chunk in call:
            data += chunk.data
            deleted.extend(chunk.deleted_paths)
        return bytes(data), deleted

    async def kill_processes(self) -> None:
        """Kills all that the agent left running. Raises HealthcheckError."""
        request = pb.KillProcessesRequest(**self._key())
        call = self._stub.KillProcesses(request, timeout=self._config.control_timeout_s)
        await self._guard(call, "killing processes")

    async def close(self) -> None:
        """Gives the sandbox back. Never raises: a lease that cannot be released expires."""
        self._keeper.cancel()
        request = pb.ReleaseRequest(lease_id=self._lease.lease_id, epoch=self._lease.epoch)
        try:
            await self._stub.Release(request, timeout=self._config.control_timeout_s)
        except grpc.aio.AioRpcError as error:
            self._lost = self._lost or error.code().name

    async def _keep_alive(self) -> None:
        pause = self._config.ttl_s / 3
        while True:
            await asyncio.sleep(pause)
            request = pb.RenewRequest(
                lease_id=self._lease.lease_id,
                epoch=self._lease.epoch,
                ttl=_duration(self._config.ttl_s),
            )
            try:
                await self._stub.Renew(request, timeout=self._config.control_timeout_s)
            except grpc.aio.AioRpcError as error:
                if error.code() in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION):
                    self._lost = f"lease lost ({error.code().name} {error.details()})"
                    return
                pause = min(
                    pause, 1.0
                )  # the broker does not answer: try often while the lease lasts
            else:
                pause = self._config.ttl_s / 3
