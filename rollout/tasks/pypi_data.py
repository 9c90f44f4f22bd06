"""The committed data of the PyPI tasks: packages, their test suites, and injected bugs.

Owner: rollout/tasks; written by pypi_make.py into pypi_tasks.json, read by pypi.py.

Each bug is a unified diff that CREATES it, as in SWE-smith; the gold fix is its reverse. A
suite lists every test that passes without a bug, each time it was run; a task's
fail_to_pass are those that its bug makes fail, its pass_to_pass all others of the suite.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rollout.tasks.harbor_task import TaskError

DATA = Path(__file__).with_name("pypi_tasks.json")


@dataclass(frozen=True)
class Suite:
    """Some tests of a package."""

    arguments: tuple[str, ...]
    """What pytest is called with."""
    tests: tuple[str, ...]
    """Ids that pass without a bug."""


@dataclass(frozen=True)
class Package:
    """A source archive of PyPI."""

    name: str
    version: str
    sdist: str
    """File name."""
    sha256: str
    python_path: str
    """Folder of the archive that tests import from; empty: its root."""
    restore: tuple[str, ...]
    """Globs of test files, which an agent's changes do not reach."""
    suites: dict[str, Suite]


@dataclass(frozen=True)
class Bug:
    """One task."""

    task_id: str
    package: str
    suite: str
    function: str
    strategy: str
    seed: int
    patch: str
    """Unified diff of one file that creates the bug."""
    fail_to_pass: tuple[str, ...]


@dataclass(frozen=True)
class TaskData:
    """All of pypi_tasks.json."""

    packages: dict[str, Package]
    bugs: tuple[Bug, ...]

    def pass_to_pass(self, bug: Bug) -> list[str]:
        """Ids of the suite that pass with the bug too."""
        broken = set(bug.fail_to_pass)
        suite = self.packages[bug.package].suites[bug.suite]
        return [test for test in suite.tests if test not in broken]


def read_data(path: Path = DATA) -> TaskData:
    """Reads the data. Raises TaskError when it is missing, malformed or contradicts itself."""
    try:
        raw = json.loads(path.read_text("utf-8"))
        packages = {row["name"]: _package(row) for row in raw["packages"]}
        bugs = tuple(
            Bug(**{**row, "fail_to_pass": tuple(row["fail_to_pass"])}) for row in raw["tasks"]
        )
        for bug in bugs:
            tests = packages[bug.package].suites[bug.suite].tests
            if not bug.fail_to_pass or not set(bug.fail_to_pass) <= set(tests):
                raise ValueError(f"fail_to_pass of {bug.task_id} is empty or not of its suite")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TaskError(f"task data {path} cannot be used: {error!r}") from error
    return TaskData(packages, bugs)


def write_data(data: TaskData, path: Path) -> None:
    """Writes the data, one task after the other, in a form that diffs well."""
    raw = {
        "packages": [asdict(package) for package in data.packages.values()],
        "tasks": [asdict(bug) for bug in data.bugs],
    }
    path.write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")


def _package(row: dict[str, Any]) -> Package:
    suites = {
        name: Suite(tuple(suite["arguments"]), tuple(suite["tests"]))
        for name, suite in row["suites"].items()
    }
    return Package(**{**row, "restore": tuple(row["restore"]), "suites": suites})
