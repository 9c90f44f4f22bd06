"""Writing Harbor task folders, and the index that lists them.

Owner: rollout/tasks. A folder holds task.toml, instruction.md, environment/ (what the agent
finds in the workdir), tests/ (test.sh and grading.json) and solution/ (solve.sh).
Invariants: folders appear whole (written aside, then renamed); an index names only folders
that exist; paths in an index are relative to it, so a task set can be moved.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

WORKDIR = "/app"
INDEX_NAME = "index.json"


class TaskError(ValueError):
    """A task, an index or a package's data is missing or malformed; the message says which."""


@dataclass(frozen=True)
class IndexEntry:
    """One line of an index."""

    task_id: str
    path: Path
    """The task's folder, absolute once read."""
    pool: str
    """train, dev or test."""


@dataclass(frozen=True)
class TaskFolder:
    """Contents of a task folder before it is written."""

    task_id: str
    instruction: str
    image: str
    """Name of an image in the broker's configuration."""
    profile: str
    """Agent profile of the harness worker: toy or mini."""
    environment: Mapping[str, bytes]
    """Files of the workdir by relative path."""
    grading: Mapping[str, object]
    """tests/grading.json (see grading.py); stays on the worker."""
    test_sh: str
    solve_sh: str
    tests: Mapping[str, bytes]
    """Further files of tests/ by relative path."""
    solution: Mapping[str, bytes]
    """Further files of solution/ by relative path."""
    metadata: Mapping[str, object]
    """Facts for tools, under [metadata] of task.toml: strings, ints, lists of strings."""
    agent_timeout_s: float
    verifier_timeout_s: float
    memory_mb: int


def write_folder(parent: Path, task: TaskFolder) -> Path:
    """Writes `task` below `parent` and returns its folder, replacing an older one."""
    parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".new-", dir=parent))
    try:
        staging.chmod(0o755)
        _write(staging / "task.toml", _task_toml(task).encode())
        _write(staging / "instruction.md", task.instruction.encode())
        for name, data in task.environment.items():
            _write(staging / "environment" / name, data)
        grading = json.dumps(dict(task.grading), indent=1).encode()
        _write(staging / "tests" / "grading.json", grading)
        for name, data in task.tests.items():
            _write(staging / "tests" / name, data)
        _write(staging / "tests" / "test.sh", task.test_sh.encode(), mode=0o755)
        for name, data in task.solution.items():
            _write(staging / "solution" / name, data)
        _write(staging / "solution" / "solve.sh", task.solve_sh.encode(), mode=0o755)
        folder = parent / task.task_id
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(staging, folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return folder


def write_index(path: Path, entries: Iterable[IndexEntry]) -> None:
    """Writes an index atomically; entry paths become relative to it where they can."""
    rows = [
        {
            "task_id": entry.task_id,
            "path": os.path.relpath(entry.path, path.parent),
            "pool": entry.pool,
        }
        for entry in entries
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_name(path.name + ".new")
    staging.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    os.replace(staging, path)


def read_index(path: Path) -> list[IndexEntry]:
    """Reads an index.

    Raises TaskError when it is missing or malformed, names a task twice, or names a folder
    that is not there.
    """
    try:
        rows = json.loads(path.read_text("utf-8"))
        entries = [
            IndexEntry(str(r["task_id"]), (path.parent / r["path"]).resolve(), str(r["pool"]))
            for r in rows
        ]
    except OSError as error:
        raise TaskError(f"task index {path} cannot be read: {error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise TaskError(
            f"task index {path} is malformed ({error!r}); wanted a JSON list of "
            "{task_id, path, pool}"
        ) from error
    seen: set[str] = set()
    for entry in entries:
        if entry.task_id in seen:
            raise TaskError(f"task index {path} names task_id {entry.task_id!r} twice")
        seen.add(entry.task_id)
        if not (entry.path / "task.toml").is_file():
            raise TaskError(
                f"task {entry.task_id} of {path}: no task.toml in {entry.path}; write the tasks anew"
            )
    return entries


def _task_toml(task: TaskFolder) -> str:
    metadata = {"profile": task.profile, **task.metadata}
    lines = [
        'schema_version = "1.4"',
        "[task]",
        f"name = {json.dumps('swe-rl/' + task.task_id)}",
        "[metadata]",
        *(f"{key} = {json.dumps(value)}" for key, value in metadata.items()),
        "[agent]",
        f"timeout_sec = {task.agent_timeout_s}",
        "[verifier]",
        f"timeout_sec = {task.verifier_timeout_s}",
        "[environment]",
        "build_timeout_sec = 60.0",
        f"docker_image = {json.dumps(task.image)}",
        f"workdir = {json.dumps(WORKDIR)}",
        "cpus = 1",
        f"memory_mb = {task.memory_mb}",
    ]
    return "\n".join(lines) + "\n"


def _write(path: Path, data: bytes, mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    path.chmod(mode)
