"""PyPI tasks: real packages with one injected bug, as Harbor task folders graded by pytest.

Owner: rollout/tasks.
  python -m rollout.tasks.pypi --out DIR         folders and index.json (pool test)
  python -m rollout.tasks.pypi --fetch-only      fills the cache: source archives and layer

Flow: pypi_tasks.json -> source archive from the cache (pip with hashes when absent) -> bug
patch applied -> environment/ with the whole archive; solution/ holds the repaired file.
Invariant: what is written depends on the committed data alone.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import tarfile
from collections.abc import Collection
from pathlib import Path, PurePosixPath

from bazel.downloads import DownloadError, fetch_sdist
from rollout.tasks.grading import DEFAULT_LOG
from rollout.tasks.harbor_task import (
    INDEX_NAME,
    WORKDIR,
    IndexEntry,
    TaskError,
    TaskFolder,
    write_folder,
    write_index,
)
from rollout.tasks.layers import pypi_layer
from rollout.tasks.pypi_data import DATA, Bug, Package, Suite, TaskData, read_data
from rollout.tasks.quarantine import read_quarantine
from rollout.tasks.unified_diff import DiffError, apply_diff, diff_path

PYTEST_FLAGS = ("-rA", "-q", "--tb=no", "-p", "no:cacheprovider")
# Held out: real tasks are evaluated, never trained.
POOL = "test"
_MAX_NAMED_TESTS = 5


def sdist_files(package: Package) -> dict[str, bytes]:
    """Files of the source archive by path below its top folder. Raises DownloadError."""
    path = fetch_sdist(package.name, package.version, package.sdist, package.sha256)
    files = {}
    with tarfile.open(path) as archive:
        for member in archive:
            parts = PurePosixPath(member.name).parts
            if not member.isfile() or len(parts) < 2 or ".." in parts:
                continue
            content = archive.extractfile(member)
            assert content is not None
            files[str(PurePosixPath(*parts[1:]))] = content.read()
    return files


def test_environment(package: Package) -> dict[str, str]:
    """Variables that make a test run repeatable, whatever the base image has installed."""
    environment = {
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
    }
    if package.python_path:
        environment["PYTHONPATH"] = package.python_path
    return environment


def test_script(package: Package, suite: Suite) -> str:
    """test.sh: runs the suite, leaves the log that grading.py reads."""
    exports = [f"export {k}={shlex.quote(v)}" for k, v in test_environment(package).items()]
    command = shlex.join(["python", "-m", "pytest", *PYTEST_FLAGS, *suite.arguments])
    lines = [
        "#!/bin/sh",
        f"cd {WORKDIR} || exit 1",
        *exports,
        f"{command} > {DEFAULT_LOG} 2>&1",
        f'echo "tests exited with status $?" >> {DEFAULT_LOG}',
    ]
    return "\n".join(lines) + "\n"


def task_folder(data: TaskData, bug: Bug, files: dict[str, bytes]) -> TaskFolder:
    """The Harbor folder of `bug`; `files` are its package's. Raises TaskError."""
    package = data.packages[bug.package]
    suite = package.suites[bug.suite]
    path = diff_path(bug.patch)
    try:
        broken = apply_diff(files[path].decode(), bug.patch).encode()
    except (KeyError, UnicodeDecodeError, DiffError) as error:
        raise TaskError(
            f"the patch of {bug.task_id} does not fit {package.sdist}: {error}"
        ) from error
    grading = {
        "kind": "pytest",
        "fail_to_pass": list(bug.fail_to_pass),
        "pass_to_pass": data.pass_to_pass(bug),
        "log": DEFAULT_LOG,
        "restore": list(package.restore),
    }
    return TaskFolder(
        task_id=bug.task_id,
        instruction=_instruction(package, suite, bug),
        image="pypi",
        profile="mini",
        environment={**files, path: broken},
        grading=grading,
        test_sh=test_script(package, suite),
        solve_sh=f"#!/bin/sh\nexec cp /solution/fixed {shlex.quote(f'{WORKDIR}/{path}')}\n",
        tests={},
        solution={"fixed": files[path]},
        metadata={
            "family": "pypi",
            "package": package.name,
            "version": package.version,
            "file": path,
            "function": bug.function,
            "strategy": bug.strategy,
            "seed": bug.seed,
        },
        agent_timeout_s=600.0,
        verifier_timeout_s=120.0,
        memory_mb=512,
    )


def write_tasks(out: Path, data: TaskData, skip: Collection[str] = ()) -> Path:
    """Writes folders and index.json below `out`, without the ids of `skip`."""
    entries = []
    contents = {name: sdist_files(package) for name, package in data.packages.items()}
    for bug in data.bugs:
        if bug.task_id not in skip:
            folder = write_folder(out, task_folder(data, bug, contents[bug.package]))
            entries.append(IndexEntry(bug.task_id, folder, POOL))
    write_index(out / INDEX_NAME, entries)
    return out / INDEX_NAME


def _instruction(package: Package, suite: Suite, bug: Bug) -> str:
    tests = list(bug.fail_to_pass[:_MAX_NAMED_TESTS])
    more = len(bug.fail_to_pass) - len(tests)
    variables = f"PYTHONPATH={package.python_path} " if package.python_path else ""
    command = variables + shlex.join(["python", "-m", "pytest", *suite.arguments])
    opening = (
        f"{WORKDIR} holds the source of {package.name} {package.version}. A bug was put into one "
        "of its functions, and these tests fail:"
    )
    lines = [
        opening,
        "",
        *(f"- {test}" for test in tests),
        *([f"- and {more} more"] if more > 0 else []),
        "",
        f"Run them with `{command}`. Find the bug and fix the source; leave the tests as they are.",
    ]
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Command line; prints the index's path."""
    parser = argparse.ArgumentParser(prog="python -m rollout.tasks.pypi", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, help="folder to write")
    parser.add_argument("--fetch-only", action="store_true", help="fill the cache, write nothing")
    parser.add_argument("--data", type=Path, default=DATA, help="default: the committed data")
    parser.add_argument("--quarantine", type=Path, help="report of rollout.tasks.validate")
    args = parser.parse_args(argv)
    if not args.fetch_only and args.out is None:
        parser.error("--out is missing (or --fetch-only)")
    try:
        data = read_data(args.data)
        skip = read_quarantine(args.quarantine) if args.quarantine else {}
        if args.fetch_only:
            for package in data.packages.values():
                print(fetch_sdist(package.name, package.version, package.sdist, package.sha256))
            print(pypi_layer())
            return 0
        print(write_tasks(args.out, data, skip))
    except (TaskError, DownloadError, OSError, subprocess.SubprocessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
