"""gRPC front of the broker, and its process: `python -m sandbox.server --config FILE.json`."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import BinaryIO, NoReturn, TypeVar

import grpc
import grpc.aio
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from pydantic import ValidationError

from proto import sandbox_pb2 as pb
from proto import sandbox_pb2_grpc, serving
from sandbox.backends import archive
from sandbox.backends.base import ExecSpec, Sandbox
from sandbox.backends.local import LocalBackend, sweep_leftovers
from sandbox.broker import AcquireSpec, SandboxBroker
from sandbox.config import BrokerConfig
from sandbox.errors import (
    ERROR_METADATA_KEY,
    MAX_ACQUIRE_ARCHIVE_BYTES,
    BackendSetupError,
    InvalidRequestError,
    SandboxError,
    TooLargeError,
)
from sandbox.lease_table import Lease

T = TypeVar("T")
SERVICE_NAMES = ("swe_rl.sandbox.v1.SandboxBroker",)

_CHUNK_BYTES = 256 * 1024
_DEADLINE_MARGIN_S = 0.25
"""Left of a caller's deadline so that it gets our answer instead of its own time-out."""


class BrokerServicer(sandbox_pb2_grpc.SandboxBrokerServicer):
    """Translates messages; all policy is the broker's."""

    def __init__(self, broker: SandboxBroker) -> None:
        self._broker = broker

    async def Acquire(
        self, request: pb.AcquireRequest, context: grpc.aio.ServicerContext
    ) -> pb.AcquireReply:
        remaining_s = context.time_remaining()
        timeout_s = self._broker.config.acquire_timeout_s
        if remaining_s is not None:
            timeout_s = max(0.0, remaining_s - _DEADLINE_MARGIN_S)
        if len(request.archive) > MAX_ACQUIRE_ARCHIVE_BYTES:
            error = InvalidRequestError(
                f"an archive of {len(request.archive)} bytes came with Acquire, which takes "
                f"{MAX_ACQUIRE_ARCHIVE_BYTES}: send it with Upload"
            )
            await _abort(context, error)
        spec = AcquireSpec(
            image=request.image,
            holder=request.holder,
            ttl_s=_seconds(request.ttl),
            memory_bytes=request.limits.memory_bytes,
            max_pids=request.limits.max_pids,
            cpu_cores=request.limits.cpu_cores,
            idempotency_key=request.idempotency_key,
            workdir=request.workdir,
            network=request.network,
            archive=request.archive,
        )
        acquired = await _answer(context, self._broker.acquire(spec, timeout_s))
        return pb.AcquireReply(
            lease=self._lease(acquired.lease),
            queued=_duration(acquired.queued_s),
            starting=_duration(acquired.starting_s),
            warm=acquired.warm,
        )

    async def Renew(
        self, request: pb.RenewRequest, context: grpc.aio.ServicerContext
    ) -> pb.RenewReply:
        try:
            lease = self._broker.renew(request.lease_id, request.epoch, _seconds(request.ttl))
        except SandboxError as error:
            await _abort(context, error)
        return pb.RenewReply(expires_at=self._expires_at(lease))

    async def Release(
        self, request: pb.ReleaseRequest, context: grpc.aio.ServicerContext
    ) -> pb.ReleaseReply:
        work = self._broker.release(request.lease_id, request.epoch)
        return pb.ReleaseReply(existed=await _answer(context, work))

    async def Exec(
        self, request: pb.ExecRequest, context: grpc.aio.ServicerContext
    ) -> pb.ExecReply:
        spec = ExecSpec(
            command=request.command,
            cwd=request.cwd,
            timeout_s=_seconds(request.timeout),
            output_cap_bytes=request.output_cap_bytes,
            env=dict(request.env),
            user=request.user,
            merge_output=request.merge_output,
        )
        outcome = await _answer(
            context, self._broker.execute(request.lease_id, request.epoch, spec)
        )
        return pb.ExecReply(
            stdout=outcome.stdout,
            stderr=outcome.stderr,
            exit_code=outcome.exit_code,
            timed_out=outcome.timed_out,
            oom_killed=outcome.oom_killed,
            stdout_dropped_bytes=outcome.stdout_dropped_bytes,
            stderr_dropped_bytes=outcome.stderr_dropped_bytes,
            duration=_duration(outcome.duration_s),
        )

    async def Upload(
        self, requests: AsyncIterator[pb.UploadRequest], context: grpc.aio.ServicerContext
    ) -> pb.UploadReply:
        with archive.spool() as file:
            work = self._upload(requests, file)
            num_files, num_bytes = await _answer(context, work)
        return pb.UploadReply(num_files=num_files, num_bytes=num_bytes)

    async def _upload(
        self, requests: AsyncIterator[pb.UploadRequest], file: BinaryIO
    ) -> tuple[int, int]:
        first: pb.UploadRequest | None = None
        limit = self._broker.config.max_transfer_bytes
        async for request in requests:
            if first is None:
                first = request
                self._broker.lease(first.lease_id, first.epoch)
            file.write(request.tar_chunk)
            if file.tell() > 2 * limit:
                raise TooLargeError(f"the archive has more than {2 * limit} bytes")
        if first is None:
            raise InvalidRequestError("an upload needs a first message with its lease and target")
        file.seek(0)
        return await self._broker.upload(first.lease_id, first.epoch, first.target_dir, file)

    async def Download(
        self, request: pb.DownloadRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.TarChunk]:
        work = self._broker.download(
            request.lease_id, request.epoch, request.path, request.max_bytes
        )
        with await _answer(context, work) as file:
            while data := file.read(_CHUNK_BYTES):
                yield pb.TarChunk(data=data)

    async def CollectChanges(
        self, request: pb.CollectChangesRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.TarChunk]:
        work = self._broker.collect_changes(
            request.lease_id,
            request.epoch,
            request.path,
            request.max_bytes,
            kill_processes=request.kill_processes,
            release=request.release,
        )
        file, deleted = await _answer(context, work)
        with file:
            data = file.read(_CHUNK_BYTES)
            while following := file.read(_CHUNK_BYTES):
                yield pb.TarChunk(data=data)
                data = following
        yield pb.TarChunk(data=data, deleted_paths=deleted)

    async def KillProcesses(
        self, request: pb.KillProcessesRequest, context: grpc.aio.ServicerContext
    ) -> pb.KillProcessesReply:
        work = self._broker.kill_processes(request.lease_id, request.epoch)
        return pb.KillProcessesReply(num_killed=await _answer(context, work))

    async def GetStatus(
        self, request: pb.GetStatusRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetStatusReply:
        broker = self._broker
        reply = pb.GetStatusReply(
            counters=pb.BrokerCounters(**vars(broker.counters)),
            num_active=len(broker.leases),
            capacity=broker.config.capacity,
            num_warm=len(broker.pool),
        )
        if request.include_leases:
            reply.leases.extend(
                pb.LeaseInfo(
                    lease=self._lease(lease),
                    holder=lease.holder,
                    image=lease.image,
                    num_execs=lease.num_execs,
                )
                for lease in broker.leases
            )
        return reply

    def _lease(self, lease: Lease[Sandbox]) -> pb.Lease:
        return pb.Lease(
            lease_id=lease.lease_id,
            epoch=lease.epoch,
            expires_at=self._expires_at(lease),
            backend=self._broker.backend.name,
        )

    def _expires_at(self, lease: Lease[Sandbox]) -> Timestamp:
        stamp = Timestamp()
        left_s = lease.expires_s - self._broker.clock()
        stamp.FromNanoseconds(time.time_ns() + int(left_s * 1e9))
        return stamp


async def _answer(context: grpc.aio.ServicerContext, work: Awaitable[T]) -> T:
    """Awaits work, and ends the call with the status of a SandboxError."""
    try:
        return await work
    except SandboxError as error:
        await _abort(context, error)


async def _abort(context: grpc.aio.ServicerContext, error: SandboxError) -> NoReturn:
    await context.abort(
        error.status, str(error), trailing_metadata=((ERROR_METADATA_KEY, type(error).__name__),)
    )
    raise AssertionError("abort raises")


def _seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(int(max(0.0, seconds) * 1e9))
    return duration


def make_server(broker: SandboxBroker, config: serving.ServingConfig) -> serving.Server:
    """A server for the broker, not bound yet."""
    return serving.make_server(
        config,
        lambda server: sandbox_pb2_grpc.add_SandboxBrokerServicer_to_server(
            BrokerServicer(broker), server
        ),
        SERVICE_NAMES,
    )


async def run(
    config: BrokerConfig, serving_config: serving.ServingConfig, path: Path | None
) -> None:
    """Serves until SIGTERM or SIGINT. Raises BackendSetupError, serving.ServingError."""
    stop = serving.termination_event()
    broker = SandboxBroker(config, LocalBackend(config))
    try:
        await broker.start()
        await serving.serve(make_server(broker, serving_config), path, stop)
    finally:
        await broker.close()


def main(argv: list[str] | None = None) -> int:
    """The process. Returns 2 after one line on stderr when it cannot start."""
    parser = argparse.ArgumentParser(prog="sandbox.server", description=__doc__)
    parser.add_argument("--config", type=Path, help="JSON of BrokerConfig; absent: defaults")
    parser.add_argument(
        "--sweep", action="store_true", help="remove what killed brokers left behind, and exit"
    )
    serving.add_serving_arguments(parser)
    args = parser.parse_args(argv)
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
    )
    try:
        text = args.config.read_text() if args.config else "{}"
        config = BrokerConfig.model_validate_json(text)
        if args.sweep:
            sweep_leftovers(config)
            return 0
        serving_config = serving.serving_config(args).model_copy(
            update={"drain_timeout_s": config.drain_timeout_s}
        )
        serving.run_service(run(config, serving_config, args.address_file))
    except (ValidationError, OSError, BackendSetupError, serving.ServingError) as error:
        return serving.fail(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
