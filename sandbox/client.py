"""Client of the sandbox broker: typed results, one deadline a call, one error class a cause.

    client = SandboxClient(channel)
    lease = await client.acquire("host", holder=attempt_id)
    result = await client.exec(lease, "python3 t.py", timeout_s=10)
    await client.release(lease)

Owner of a lease: whoever acquired it, until it expires; renew in good time. Only this file of the
package (and the error classes that it hands on) may be imported by other packages.
"""

from __future__ import annotations

import asyncio
import io
import secrets
import tarfile
import time
from collections.abc import AsyncIterator, Awaitable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.duration_pb2 import Duration

from proto import sandbox_pb2 as pb
from proto import sandbox_pb2_grpc
from sandbox.errors import (
    ERROR_METADATA_KEY,
    MAX_ACQUIRE_ARCHIVE_BYTES,
    BackendBusyError,
    BackendSetupError,
    BrokerAwayError,
    CapacityError,
    DeadlineError,
    InvalidRequestError,
    SandboxDiedError,
    SandboxError,
    StaleEpochError,
    TooLargeError,
    UnknownLeaseError,
    error_class,
)

__all__ = [
    "MAX_ACQUIRE_ARCHIVE_BYTES",
    "AcquiredLease",
    "BackendBusyError",
    "BackendSetupError",
    "BrokerAwayError",
    "BrokerStatus",
    "CapacityError",
    "Changes",
    "DeadlineError",
    "ExecResult",
    "InvalidRequestError",
    "LeaseStatus",
    "SandboxClient",
    "SandboxDiedError",
    "SandboxError",
    "StaleEpochError",
    "TooLargeError",
    "UnknownLeaseError",
]

T = TypeVar("T")
_CHUNK_BYTES = 256 * 1024
_EXEC_MARGIN_S = 60.0
"""An Exec's deadline beyond its command's: queueing behind another command, and the kill."""


@dataclass(frozen=True)
class AcquiredLease:
    """Ownership of one sandbox. Times in seconds; expires_at_s is Unix time at acquisition."""

    lease_id: str
    epoch: int
    expires_at_s: float
    backend: str
    queued_s: float
    starting_s: float
    warm: bool


@dataclass(frozen=True)
class ExecResult:
    """What became of a command. exit_code is 128 + n for death by signal n."""

    stdout: bytes
    stderr: bytes
    exit_code: int
    timed_out: bool
    oom_killed: bool
    stdout_dropped_bytes: int
    stderr_dropped_bytes: int
    duration_s: float


@dataclass(frozen=True)
class Changes:
    """Tar of created and modified files, and deleted paths, all relative to the directory."""

    archive: bytes
    deleted_paths: tuple[str, ...]


@dataclass(frozen=True)
class LeaseStatus:
    """One lease as the broker sees it."""

    lease_id: str
    epoch: int
    holder: str
    image: str
    num_execs: int


@dataclass(frozen=True)
class BrokerStatus:
    """Counters by their name in BrokerCounters, and the state now."""

    counters: dict[str, int]
    num_active: int
    capacity: int
    num_warm: int
    leases: tuple[LeaseStatus, ...]


class SandboxClient:
    """Async client on a channel that the caller owns and closes."""

    def __init__(self, channel: grpc.aio.Channel, timeout_s: float = 30.0) -> None:
        """Args: timeout_s is the deadline of calls that set none."""
        self._stub = sandbox_pb2_grpc.SandboxBrokerStub(channel)
        self._timeout_s = timeout_s

    async def acquire(
        self,
        image: str,
        *,
        holder: str = "",
        ttl_s: float | None = None,
        memory_bytes: int = 0,
        max_pids: int = 0,
        cpu_cores: float = 0.0,
        workdir: str = "",
        network: bool = False,
        archive: bytes = b"",
        idempotency_key: str | None = None,
        timeout_s: float = 120.0,
    ) -> AcquiredLease:
        """Gives a fresh sandbox within timeout_s.

        Args: archive is a tar of at most MAX_ACQUIRE_ARCHIVE_BYTES, unpacked at `/`.

        Raises CapacityError, BackendBusyError, InvalidRequestError, SandboxDiedError,
        BrokerAwayError, DeadlineError.
        """
        request = pb.AcquireRequest(
            image=image,
            holder=holder,
            ttl=_duration(ttl_s),
            limits=pb.Limits(memory_bytes=memory_bytes, max_pids=max_pids, cpu_cores=cpu_cores),
            idempotency_key=secrets.token_hex(16) if idempotency_key is None else idempotency_key,
            workdir=workdir,
            network=network,
            archive=archive,
        )
        reply = await _call(self._stub.Acquire(request, timeout=timeout_s, wait_for_ready=True))
        return AcquiredLease(
            lease_id=reply.lease.lease_id,
            epoch=reply.lease.epoch,
            expires_at_s=reply.lease.expires_at.ToNanoseconds() / 1e9,
            backend=reply.lease.backend,
            queued_s=_seconds(reply.queued),
            starting_s=_seconds(reply.starting),
            warm=reply.warm,
        )

    async def renew(self, lease: AcquiredLease, ttl_s: float | None = None) -> float:
        """Extends the lease; returns its expiry as Unix time."""
        request = pb.RenewRequest(lease_id=lease.lease_id, epoch=lease.epoch, ttl=_duration(ttl_s))
        reply = await _call(self._stub.Renew(request, timeout=self._timeout_s))
        return float(reply.expires_at.ToNanoseconds() / 1e9)

    async def release(self, lease: AcquiredLease) -> bool:
        """Frees the sandbox; False when it was gone already."""
        request = pb.ReleaseRequest(lease_id=lease.lease_id, epoch=lease.epoch)
        return bool((await _call(self._stub.Release(request, timeout=self._timeout_s))).existed)

    async def exec(
        self,
        lease: AcquiredLease,
        command: str,
        *,
        cwd: str = "",
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        output_cap_bytes: int = 0,
        user: str = "",
        merge_output: bool = False,
        deadline_s: float | None = None,
    ) -> ExecResult:
        """Runs a command exactly as given. Cancelling kills it. A time-out is a result.

        Args: timeout_s bounds the command, deadline_s the call (queueing included).
        """
        request = pb.ExecRequest(
            lease_id=lease.lease_id,
            epoch=lease.epoch,
            command=command,
            cwd=cwd,
            env=env or {},
            timeout=_duration(timeout_s),
            output_cap_bytes=output_cap_bytes,
            user=user,
            merge_output=merge_output,
        )
        if deadline_s is None:
            deadline_s = (3600.0 if timeout_s is None else timeout_s) + _EXEC_MARGIN_S
        reply = await _call(self._stub.Exec(request, timeout=deadline_s))
        return ExecResult(
            stdout=reply.stdout,
            stderr=reply.stderr,
            exit_code=reply.exit_code,
            timed_out=reply.timed_out,
            oom_killed=reply.oom_killed,
            stdout_dropped_bytes=reply.stdout_dropped_bytes,
            stderr_dropped_bytes=reply.stderr_dropped_bytes,
            duration_s=_seconds(reply.duration),
        )

    async def upload_tar(
        self, lease: AcquiredLease, archive: bytes, target_dir: str, timeout_s: float = 120.0
    ) -> tuple[int, int]:
        """Unpacks a tar archive below target_dir; returns (files, bytes of content)."""

        async def requests() -> AsyncIterator[pb.UploadRequest]:
            yield pb.UploadRequest(
                lease_id=lease.lease_id,
                epoch=lease.epoch,
                target_dir=target_dir,
                tar_chunk=archive[:_CHUNK_BYTES],
            )
            for at in range(_CHUNK_BYTES, len(archive), _CHUNK_BYTES):
                yield pb.UploadRequest(tar_chunk=archive[at : at + _CHUNK_BYTES])

        reply = await _call(self._stub.Upload(requests(), timeout=timeout_s))
        return reply.num_files, reply.num_bytes

    async def upload_dir(
        self, lease: AcquiredLease, source_dir: Path, target_dir: str, timeout_s: float = 120.0
    ) -> tuple[int, int]:
        """Uploads what source_dir contains; returns (files, bytes of content)."""
        archive = await asyncio.to_thread(_pack_directory, source_dir)
        return await self.upload_tar(lease, archive, target_dir, timeout_s)

    async def upload_files(
        self,
        lease: AcquiredLease,
        files: Mapping[str, bytes],
        target_dir: str,
        *,
        mode: int = 0o644,
        timeout_s: float = 120.0,
    ) -> tuple[int, int]:
        """Uploads contents by path relative to target_dir; returns (files, bytes of content)."""
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for name, content in files.items():
                member = tarfile.TarInfo(name)
                member.size, member.mode, member.mtime = len(content), mode, int(time.time())
                tar.addfile(member, io.BytesIO(content))
        return await self.upload_tar(lease, buffer.getvalue(), target_dir, timeout_s)

    async def download(
        self, lease: AcquiredLease, path: str, max_bytes: int = 0, timeout_s: float = 120.0
    ) -> bytes:
        """A tar archive of a file (one member) or of what a directory contains."""
        request = pb.DownloadRequest(
            lease_id=lease.lease_id, epoch=lease.epoch, path=path, max_bytes=max_bytes
        )
        data, _ = await _collect(self._stub.Download(request, timeout=timeout_s))
        return data

    async def download_file(
        self, lease: AcquiredLease, path: str, max_bytes: int = 0, timeout_s: float = 120.0
    ) -> bytes:
        """The content of one file. Raises InvalidRequestError when there is none."""
        data = await self.download(lease, path, max_bytes, timeout_s)
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            members = tar.getmembers()
            content = tar.extractfile(members[0]) if len(members) == 1 else None
            if content is None or members[0].name != path.rpartition("/")[2]:
                raise InvalidRequestError(f"{path} of lease {lease.lease_id} is not a file")
            return content.read()

    async def collect_changes(
        self,
        lease: AcquiredLease,
        path: str,
        max_bytes: int = 0,
        timeout_s: float = 120.0,
        *,
        kill_processes: bool = False,
        release: bool = False,
    ) -> Changes:
        """What changed below a directory since the lease began, uploads included.

        Args: kill_processes kills what still runs first; release frees the sandbox afterwards, unless
        the call fails.
        """
        request = pb.CollectChangesRequest(
            lease_id=lease.lease_id,
            epoch=lease.epoch,
            path=path,
            max_bytes=max_bytes,
            kill_processes=kill_processes,
            release=release,
        )
        data, deleted = await _collect(self._stub.CollectChanges(request, timeout=timeout_s))
        return Changes(data, tuple(deleted))

    async def kill_processes(self, lease: AcquiredLease) -> int:
        """Kills every process of the sandbox but its init; returns how many."""
        request = pb.KillProcessesRequest(lease_id=lease.lease_id, epoch=lease.epoch)
        reply = await _call(self._stub.KillProcesses(request, timeout=self._timeout_s))
        return int(reply.num_killed)

    async def status(self, include_leases: bool = False) -> BrokerStatus:
        """Counters and, when asked, leases."""
        request = pb.GetStatusRequest(include_leases=include_leases)
        reply = await _call(self._stub.GetStatus(request, timeout=self._timeout_s))
        names = pb.BrokerCounters.DESCRIPTOR.fields_by_name
        return BrokerStatus(
            counters={name: getattr(reply.counters, name) for name in names},
            num_active=reply.num_active,
            capacity=reply.capacity,
            num_warm=reply.num_warm,
            leases=tuple(
                LeaseStatus(
                    info.lease.lease_id, info.lease.epoch, info.holder, info.image, info.num_execs
                )
                for info in reply.leases
            ),
        )


def _pack_directory(source_dir: Path) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path in sorted(source_dir.iterdir()):
            tar.add(path, arcname=path.name)
    return buffer.getvalue()


async def _call(call: Awaitable[T]) -> T:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise _translate(error) from error


async def _collect(call: Any) -> tuple[bytes, list[str]]:
    data = bytearray()
    deleted: list[str] = []
    try:
        async for chunk in call:
            data += chunk.data
            deleted += chunk.deleted_paths
    except grpc.aio.AioRpcError as error:
        raise _translate(error) from error
    return bytes(data), deleted


def _translate(error: grpc.aio.AioRpcError) -> SandboxError:
    name = ""
    for key, value in error.trailing_metadata() or ():
        if key == ERROR_METADATA_KEY:
            name = str(value)
    return error_class(error.code(), name)(error.details() or error.code().name)


def _duration(seconds: float | None) -> Duration | None:
    if seconds is None:
        return None
    duration = Duration()
    duration.FromNanoseconds(int(seconds * 1e9))
    return duration


def _seconds(duration: Duration) -> float:
    return float(duration.ToNanoseconds() / 1e9)
