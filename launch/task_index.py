"""Reads a task index: `index.json`, a list of {task_id, path, pool}; paths are relative to it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.errors import UsageError
from proto import rollout_pb2
from rollout.client import RolloutClient

_POOLS = {
    "train": rollout_pb2.POOL_TRAIN,
    "dev": rollout_pb2.POOL_DEV,
    "test": rollout_pb2.POOL_TEST,
}


@dataclass(frozen=True)
class IndexedTask:
    """One line of an index."""

    task_id: str
    path: Path
    """Absolute."""
    pool: str


def read_index(path: Path) -> list[IndexedTask]:
    """Reads and checks an index. Raises UsageError when it, or a task's folder, is not there."""
    if not path.is_file():
        raise UsageError(
            f"no task set {path}: want pypi, toy, or the path of an index.json "
            "(`swe_rl tasks build` makes one)"
        )
    try:
        entries = json.loads(path.read_text())
        tasks = [
            IndexedTask(entry["task_id"], (path.parent / entry["path"]).absolute(), entry["pool"])
            for entry in entries
        ]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UsageError(
            f"{path} is no task index: want a JSON list of {{task_id, path, pool}} ({error!r})"
        ) from error
    if not tasks:
        raise UsageError(f"{path} lists no task: build the task set again")
    missing = [task.path for task in tasks if not (task.path / "task.toml").is_file()]
    if missing:
        raise UsageError(
            f"task directory {missing[0]} is missing or holds no task.toml "
            f"({len(missing)} of {len(tasks)} tasks): build the task set again"
        )
    unknown = sorted({task.pool for task in tasks} - set(_POOLS))
    if unknown:
        raise UsageError(f"{path} names pool {unknown[0]!r}: want train, dev or test")
    return tasks


async def add_tasks(rollout: RolloutClient, tasks: Sequence[IndexedTask], pool: str = "") -> None:
    """Adds tasks to their pools, or all to `pool`. Idempotent."""
    for name, number in _POOLS.items():
        mine = [
            rollout_pb2.Task(task_id=task.task_id, path=str(task.path))
            for task in tasks
            if (pool or task.pool) == name
        ]
        if mine:
            await rollout.add_tasks(rollout_pb2.AddTasksRequest(pool=number, tasks=mine))
