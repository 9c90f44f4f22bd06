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
from dataclasses import dataclass
from pathlib import Path

from rollout.tasks.grading import Grade, GradingError, GradingSpec, grade
from rollout.tasks.harbor_task import IndexEntry, TaskError
from sandbox.client import AcquiredLease, InvalidRequestError, SandboxClient, SandboxError

PATCHES = ("gold", "empty")
GRADING_FILE = "grading.json"
_ACQUIRE_TIMEOUT_S = 120.0
_LEASE_SLACK_S = 120.0
_OUTPUT_CAP_BYTES = 1 << 20
_LOG_CAP_BYTES = 16 << 20


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


async def run_task(client: SandboxClient, task: RunnableTask, patch: str) -> Grade:
    """Grades `task` with `patch` (gold or empty).

    Raises InfrastructureError, or TaskError when the broker refuses what the task asks for.
    """
    assert patch in PATCHES
    try:
        lease = await client.acquire(
            task.image,
            holder=f"validate/{task.task_id}/{patch}",
            ttl_s=2 * task.verifier_timeout_s + _LEASE_SLACK_S,
            memory_bytes=task.memory_mb << 20,
            workdir=task.workdir,
            timeout_s=_ACQUIRE_TIMEOUT_S,
        )
        try:
            return await _grade_in(client, lease, task, patch)
        finally:
            await client.release(lease)
    except InvalidRequestError as error:
        raise TaskError(f"task {task.task_id}: the broker refuses it: {error}") from error
    except SandboxError as error:
        raise InfrastructureError(f"task {task.task_id}, {patch} patch: {error}") from error


async def _grade_in(
    client: SandboxClient, lease: AcquiredLease, task: RunnableTask, patch: str
) -> Grade:
    await client.upload_tar(lease, task.environment, task.workdir)
    timeout_s = task.verifier_timeout_s
    if patch == "gold":
        await client.upload_tar(lease, task.solution, "/solution")
        solved = await client.exec(
            lease, "sh /solution/solve.sh", timeout_s=timeout_s, merge_output=True
        )
        if solved.exit_code or solved.timed_out:
            tail = solved.stdout[-200:].decode(errors="replace")
            return Grade(None, f"solve.sh ended with status {solved.exit_code}: {tail!r}")
    await client.upload_tar(lease, task.tests, "/tests")
    ran = await client.exec(
        lease,
        "mkdir -p /logs/verifier && exec /tests/test.sh",
        timeout_s=timeout_s,
        output_cap_bytes=_OUTPUT_CAP_BYTES,
    )
    if ran.timed_out:
        return Grade(None, f"the tests took over {timeout_s} s")
    if ran.oom_killed:
        return Grade(None, f"the tests ran out of their {task.memory_mb} MiB")
    output, truncated = ran.stdout, ran.stdout_dropped_bytes > 0
    if task.spec.kind == "pytest":
        try:
            output = await client.download_file(lease, task.spec.log, _LOG_CAP_BYTES)
        except InvalidRequestError:
            return Grade(None, f"the tests left no log {task.spec.log}")
        truncated = False
    return grade(task.spec, output.decode(errors="replace"), truncated=truncated)


def _tar(folder: Path, leave_out: str = "") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and path.name != leave_out:
                archive.add(path, str(path.relative_to(folder)))
    return buffer.getvalue()
