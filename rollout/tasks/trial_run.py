"""One run of a task's tests in a sandbox of its own, with the gold patch or with none.

Owner: rollout/tasks, used by validate.py. No agent is involved, so one sandbox does for both
the patch and the tests. grading.json never enters it.

Errors: InfrastructureError when the broker or the sandbox failed, which says nothing about
the task; every call has a deadline, and the lease is released in any case.
"""

from __future__ import annotations

import io
import tarfile
import tomllib
import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
from google.protobuf.duration_pb2 import Duration

from proto import sandbox_pb2, sandbox_pb2_grpc
from rollout.tasks.grading import Grade, GradingError, GradingSpec, grade
from rollout.tasks.harbor_task import IndexEntry, TaskError

PATCHES = ("gold", "empty")
GRADING_FILE = "grading.json"
_CALL_TIMEOUT_S = 120.0
_LEASE_SLACK_S = 60.0
_CHUNK_BYTES = 1 << 20
_OUTPUT_CAP_BYTES = 4 << 20


class InfrastructureError(RuntimeError):
    """The broker or a sandbox failed; nothing was learned about the task."""


@dataclass(frozen=True)
class RunnableTask:
    """What of a task folder a run needs, read once."""

    task_id: str
    image: str
    workdir: str
    memory_mb: int
    verifier_timeout_s: float
    spec: GradingSpec
    environment: bytes
    """tar, as are the next two."""
    tests: bytes
    solution: bytes


def load_task(entry: IndexEntry) -> RunnableTask:
    """Reads a task folder. Raises TaskError."""
    try:
        data = tomllib.loads((entry.path / "task.toml").read_text("utf-8"))
        environment = data["environment"]
        return RunnableTask(
            task_id=entry.task_id,
            image=environment["docker_image"],
            workdir=environment["workdir"],
            memory_mb=int(environment.get("memory_mb", 0)),
            verifier_timeout_s=float(data["verifier"]["timeout_sec"]),
            spec=GradingSpec.load(entry.path / "tests" / GRADING_FILE),
            environment=_tar(entry.path / "environment"),
            tests=_tar(entry.path / "tests", leave_out=GRADING_FILE),
            solution=_tar(entry.path / "solution"),
        )
    except (OSError, KeyError, ValueError, GradingError) as error:
        raise TaskError(f"task {entry.task_id} in {entry.path} is malformed: {error!r}") from error


async def run_task(channel: grpc.aio.Channel, task: RunnableTask, patch: str) -> Grade:
    """Grades `task` with `patch` (gold or empty). Raises InfrastructureError."""
    assert patch in PATCHES
    stub: Any = sandbox_pb2_grpc.SandboxBrokerStub(channel)  # type: ignore[no-untyped-call]
    request = sandbox_pb2.AcquireRequest(
        image=task.image,
        holder=f"validate/{task.task_id}/{patch}",
        ttl=_seconds(2 * task.verifier_timeout_s + _LEASE_SLACK_S),
        limits=sandbox_pb2.Limits(memory_bytes=task.memory_mb << 20),
        idempotency_key=uuid.uuid4().hex,
        workdir=task.workdir,
    )
    try:
        reply = await stub.Acquire(request, timeout=_CALL_TIMEOUT_S)
        key = {"lease_id": reply.lease.lease_id, "epoch": reply.lease.epoch}
        try:
            return await _grade_in(stub, key, task, patch)
        finally:
            release = sandbox_pb2.ReleaseRequest(**key)
            await stub.Release(release, timeout=_CALL_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        raise InfrastructureError(
            f"task {task.task_id}, {patch} patch: broker answered {error.code().name}: "
            f"{error.details()}"
        ) from error


async def _grade_in(stub: Any, key: Mapping[str, Any], task: RunnableTask, patch: str) -> Grade:
    await _upload(stub, key, task.environment, task.workdir)
    timeout_s = task.verifier_timeout_s
    if patch == "gold":
        await _upload(stub, key, task.solution, "/solution")
        solved = await _execute(stub, key, "sh /solution/solve.sh", timeout_s)
        if solved.exit_code or solved.timed_out:
            tail = solved.stdout[-200:].decode(errors="replace")
            return Grade(None, f"solve.sh ended with status {solved.exit_code}: {tail!r}")
    await _upload(stub, key, task.tests, "/tests")
    command = "mkdir -p /logs/verifier && exec /tests/test.sh"
    ran = await _execute(stub, key, command, timeout_s)
    if ran.timed_out:
        return Grade(None, f"the tests took over {timeout_s} s")
    if ran.oom_killed:
        return Grade(None, f"the tests ran out of their {task.memory_mb} MiB")
    if task.spec.kind == "stdout":
        output, truncated = ran.stdout, ran.stdout_dropped_bytes > 0
    else:
        output, truncated = await _download(stub, key, task.spec.log), False
    return grade(task.spec, output.decode(errors="replace"), truncated=truncated)


async def _execute(stub: Any, key: Mapping[str, Any], command: str, timeout_s: float) -> Any:
    request = sandbox_pb2.ExecRequest(
        command=command,
        timeout=_seconds(timeout_s),
        output_cap_bytes=_OUTPUT_CAP_BYTES,
        **key,
    )
    return await stub.Exec(request, timeout=timeout_s + _LEASE_SLACK_S)


async def _upload(stub: Any, key: Mapping[str, Any], tar: bytes, target: str) -> None:
    async def pieces() -> AsyncIterator[sandbox_pb2.UploadRequest]:
        for start in range(0, len(tar), _CHUNK_BYTES):
            head = {"target_dir": target, **key} if start == 0 else {}
            yield sandbox_pb2.UploadRequest(tar_chunk=tar[start : start + _CHUNK_BYTES], **head)

    await stub.Upload(pieces(), timeout=_CALL_TIMEOUT_S)


async def _download(stub: Any, key: Mapping[str, Any], path: str) -> bytes:
    """Content of a file of the sandbox; empty where there is none."""
    request = sandbox_pb2.DownloadRequest(path=path, **key)
    chunks = [c.data async for c in stub.Download(request, timeout=_CALL_TIMEOUT_S)]
    data = b"".join(chunks)
    if not data:
        return b""
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for member in archive:
            content = archive.extractfile(member)
            if content is not None:
                return content.read()
    return b""


def _tar(folder: Path, leave_out: str = "") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and path.name != leave_out:
                archive.add(path, str(path.relative_to(folder)))
    return buffer.getvalue()


def _seconds(value: float) -> Duration:
    duration = Duration()
    duration.FromMilliseconds(int(value * 1000))
    return duration
