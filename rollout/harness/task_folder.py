"""Task folders, read and packed once: what Harbor would redo for every trial.

Owner: the worker. A task folder does not change during a run, so the parsed Harbor task, its
checksum, its grading spec and its packed files are kept, least recently used dropped by size.
"""

from __future__ import annotations

import os
import warnings
from collections import OrderedDict
from functools import cached_property
from pathlib import Path
from typing import Any

from harbor.environments.definition import should_upload_environment_dir
from harbor.models.job.lock import TrialLock
from harbor.models.task.task import Task
from harbor.tasks.client import TaskDownloadResult

from rollout.harness.changes import TreeFile, TreeLink, pack
from rollout.harness.errors import TaskFormatError
from rollout.harness.grading import GRADING_FILE, TaskGrading, load_grading
from rollout.harness.verdicts import Verdicts

Tree = dict[str, TreeFile | TreeLink]
LOG_DIRS = ("/logs/agent", "/logs/verifier", "/logs/artifacts")


class _CheckedTask(Task):
    """Harbor's task with its checksum computed once (it hashes the whole folder)."""

    @cached_property
    def _checksum(self) -> str:
        with warnings.catch_warnings():  # Harbor deprecates it and still asks for it
            warnings.simplefilter("ignore", DeprecationWarning)
            return super().checksum

    @property
    def checksum(self) -> str:
        """Hex SHA-256 over the folder."""
        return self._checksum


class TaskFolder:
    """One task as the harness uses it. Raises TaskFormatError when it cannot be run."""

    def __init__(self, path: Path, default_image: str, default_workdir: str) -> None:
        self.path = path
        try:
            self.task: Task = _CheckedTask(path)
        except (OSError, ValueError) as error:
            raise TaskFormatError(f"task folder {path} cannot be read: {error}") from error
        if self.task.has_steps:
            raise TaskFormatError(
                f"task folder {path} has [[steps]]: only single-step tasks run here"
            )
        environment = self.task.config.environment
        self.image = environment.docker_image or default_image
        self.workdir = environment.workdir or default_workdir
        self.memory_bytes = (environment.memory_mb or 0) << 20
        self.cpu_cores = float(environment.cpus or 0)
        self.grading: TaskGrading = load_grading(self.task.paths.tests_dir)
        # As in Harbor: beside a Dockerfile the folder is build context, not content.
        uploads = should_upload_environment_dir(
            self.task.paths.environment_dir, docker_image=self.image
        )
        self.environment_tree = read_tree(self.task.paths.environment_dir) if uploads else {}
        self.tests_tree = read_tree(self.task.paths.tests_dir)
        self.tests_tree.pop(GRADING_FILE, None)
        self.solution_tree = read_tree(self.task.paths.solution_dir)
        # Prebuilt: what a new sandbox gets for the agent.
        self.start_tar = pack({self.workdir: self.environment_tree}, LOG_DIRS)
        self.locks: dict[str, TrialLock] = {}
        self.verdicts = Verdicts()

    @property
    def download_result(self) -> TaskDownloadResult:
        """What Harbor's task client reports for a local folder."""
        return TaskDownloadResult(path=self.path, download_time_sec=0.0, cached=True)

    @property
    def profile(self) -> str | None:
        """[metadata] profile of task.toml."""
        value: Any = (self.task.config.metadata or {}).get("profile")
        return str(value) if value is not None else None

    @property
    def size_bytes(self) -> int:
        """Memory that the packed files take, roughly."""
        trees = (self.environment_tree, self.tests_tree, self.solution_tree)
        files = (entry for tree in trees for entry in tree.values() if isinstance(entry, TreeFile))
        return len(self.start_tar) + sum(len(file.content) for file in files)


class TaskFolders:
    """Cache of task folders by path."""

    def __init__(self, default_image: str, default_workdir: str, capacity_bytes: int) -> None:
        self._defaults = (default_image, default_workdir)
        self._capacity_bytes = capacity_bytes
        self._folders: OrderedDict[Path, TaskFolder] = OrderedDict()
        self._size_bytes = 0

    def get(self, path: Path) -> TaskFolder:
        """The folder at path. Raises TaskFormatError."""
        folder = self._folders.get(path)
        if folder is None:
            folder = self._folders[path] = TaskFolder(path, *self._defaults)
            self._size_bytes += folder.size_bytes
            while self._size_bytes > self._capacity_bytes and len(self._folders) > 1:
                _, dropped = self._folders.popitem(last=False)
                self._size_bytes -= dropped.size_bytes
        else:
            self._folders.move_to_end(path)
        return folder


def read_tree(root: Path) -> Tree:
    """Files and symbolic links below root by relative path; empty when root is missing."""
    tree: Tree = {}
    for directory, subdirectories, names in os.walk(root):
        for name in (*names, *subdirectories):
            path = Path(directory, name)
            relative = path.relative_to(root).as_posix()
            if path.is_symlink():
                tree[relative] = TreeLink(os.readlink(path))
            elif path.is_file():
                tree[relative] = read_file(path)
    return tree


def read_file(path: Path) -> TreeFile:
    """A regular file with its executable bit."""
    executable = 0o111 if path.stat().st_mode & 0o100 else 0
    return TreeFile(path.read_bytes(), 0o644 | executable)
