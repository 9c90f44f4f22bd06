"""PyPI tasks: the committed data, and a whole task built from a small archive made here."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import tomllib
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from bazel.downloads import DownloadError, cached_folder, fetch_sdist
from rollout.tasks.grading import DEFAULT_LOG, GradingSpec, grade
from rollout.tasks.harbor_task import TaskError, read_index
from rollout.tasks.pypi import sdist_files, task_folder, write_tasks
from rollout.tasks.pypi_data import Bug, Package, Suite, TaskData, read_data, write_data
from rollout.tasks.quarantine import read_quarantine
from rollout.tasks.unified_diff import diff_path, make_diff

SOURCE = "def double(x):\n    return x * 2\n\n\ndef same(x):\n    return x\n"
BROKEN = SOURCE.replace("x * 2", "x + 2")
TESTS = (
    "import pytest\nfrom tiny import double, same\n\n\n"
    '@pytest.mark.parametrize("text", ["a b", "a - b"])\n'
    "def test_double(text): assert double(text) == text + text\n\n\n"
    "def test_same(): assert same(1) == 1\n"
)


def test_committed_data_is_what_the_project_promises() -> None:
    data = read_data()
    counts = Counter(bug.package for bug in data.bugs)
    assert len(data.bugs) >= 24 and len(counts) >= 4
    assert min(counts.values()) >= 4
    assert len({bug.task_id for bug in data.bugs}) == len(data.bugs)
    assert len({bug.patch for bug in data.bugs}) == len(data.bugs)
    assert len({bug.strategy for bug in data.bugs}) >= 6
    for package in data.packages.values():
        assert len(package.sha256) == 64 and package.suites
    for bug in data.bugs:
        package = data.packages[bug.package]
        assert data.pass_to_pass(bug), bug.task_id
        assert diff_path(bug.patch).endswith(".py")
        # A bug never hides in what is restored before grading.
        spec = GradingSpec(kind="pytest", restore=package.restore)
        assert not spec.restores(diff_path(bug.patch)), bug.task_id
        for argument in package.suites[bug.suite].arguments:
            assert spec.restores(argument), argument


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TaskData:
    """A package whose archive lies in a cache of its own."""
    monkeypatch.setenv("SWE_RL_CACHE", str(tmp_path / "cache"))
    archive = tmp_path / "cache/sdists/tiny-1.0.tar.gz"
    archive.parent.mkdir(parents=True)
    with tarfile.open(archive, "w:gz") as tar:
        for name, text in (("src/tiny.py", SOURCE), ("tests/test_tiny.py", TESTS), ("README", "")):
            member = tarfile.TarInfo(f"tiny-1.0/{name}")
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
    ids = [
        "tests/test_tiny.py::test_double[a b]",
        "tests/test_tiny.py::test_double[a - b]",
        "tests/test_tiny.py::test_same",
    ]
    package = Package(
        name="tiny",
        version="1.0",
        sdist=archive.name,
        sha256=hashlib.sha256(archive.read_bytes()).hexdigest(),
        python_path="src",
        restore=("tests/**",),
        suites={"all": Suite(("tests/test_tiny.py",), tuple(ids))},
    )
    bug = Bug(
        task_id="pypi-tiny-00",
        package="tiny",
        suite="all",
        function="double",
        strategy="operator_swap",
        seed=1,
        patch=make_diff("src/tiny.py", SOURCE, BROKEN),
        fail_to_pass=tuple(ids[:2]),
    )
    return TaskData({"tiny": package}, (bug,))


def _run_tests(folder: Path, workdir: Path) -> str:
    log = workdir / "log.txt"
    script = (folder / "tests/test.sh").read_text()
    script = script.replace("/app", str(workdir)).replace(DEFAULT_LOG, str(log))
    script = script.replace("python -m pytest", f"{sys.executable} -m pytest")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "TEST"))}
    subprocess.run(["sh", "-c", script], check=True, env=environment)
    return log.read_text()


def test_built_task_fails_and_its_gold_passes(tiny: TaskData, tmp_path: Path) -> None:
    index = write_tasks(tmp_path / "tasks", tiny)
    (entry,) = read_index(index)
    spec = GradingSpec.load(entry.path / "tests/grading.json")
    assert spec.restores("tests/test_tiny.py")
    workdir = entry.path / "environment"
    assert (workdir / "src/tiny.py").read_text() == BROKEN
    verdict = grade(spec, _run_tests(entry.path, workdir))
    assert (verdict.reward, verdict.not_passed) == (0.0, tiny.bugs[0].fail_to_pass)
    assert (entry.path / "solution/solve.sh").read_text().endswith("/app/src/tiny.py\n")
    (workdir / "src/tiny.py").write_bytes((entry.path / "solution/fixed").read_bytes())
    assert grade(spec, _run_tests(entry.path, workdir)).reward == 1.0
    (workdir / "src/tiny.py").write_text("def broken(:\n")
    assert grade(spec, _run_tests(entry.path, workdir)).reward == 0.0
    (workdir / "src/tiny.py").write_text("import os\nos.kill(os.getpid(), 9)\n")
    assert grade(spec, _run_tests(entry.path, workdir)).reward is None


def test_task_toml_names_image_profile_and_origin(tiny: TaskData, tmp_path: Path) -> None:
    (entry,) = read_index(write_tasks(tmp_path / "tasks", tiny))
    task = tomllib.loads((entry.path / "task.toml").read_text())
    assert task["environment"]["docker_image"] == "pypi"
    assert task["environment"]["workdir"] == "/app"
    assert task["metadata"]["profile"] == "mini"
    assert task["metadata"]["strategy"] == "operator_swap"
    instruction = (entry.path / "instruction.md").read_text()
    assert "tests/test_tiny.py::test_double[a b]" in instruction
    assert "double" not in instruction.replace("test_double", "")


def test_quarantined_tasks_are_left_out(tiny: TaskData, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    row = {"task_id": "pypi-tiny-00", "valid": False, "reason": "gold: 0.0"}
    report.write_text(json.dumps({"tasks": [row]}))
    assert read_quarantine(report) == {"pypi-tiny-00": "gold: 0.0"}
    assert read_index(write_tasks(tmp_path / "tasks", tiny, read_quarantine(report))) == []
    with pytest.raises(TaskError, match="cannot be read"):
        read_quarantine(tmp_path / "none")


def test_archive_that_is_not_the_pinned_one(tiny: TaskData) -> None:
    package = tiny.packages["tiny"]
    with pytest.raises(DownloadError, match="sha256"):
        fetch_sdist("tiny", "1.0", package.sdist, "0" * 64)
    assert set(sdist_files(package)) == {"src/tiny.py", "tests/test_tiny.py", "README"}


def test_patch_that_does_not_fit(tiny: TaskData) -> None:
    files = {"src/tiny.py": b"def other(): pass\n"}
    with pytest.raises(TaskError, match="pypi-tiny-00"):
        task_folder(tiny, tiny.bugs[0], files)


def test_data_round_trip_and_contradictions(tiny: TaskData, tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    write_data(tiny, path)
    assert read_data(path) == tiny
    write_data(TaskData(tiny.packages, (replace(tiny.bugs[0], fail_to_pass=("x",)),)), path)
    with pytest.raises(TaskError, match="pypi-tiny-00"):
        read_data(path)


def test_cached_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("")
        raise DownloadError("no network")

    with pytest.raises(DownloadError):
        cached_folder(tmp_path / "layer", fail)
    assert [p.name for p in tmp_path.iterdir()] == ["layer.lock"]
    cached_folder(tmp_path / "layer", lambda folder: (folder / "x").touch())
    assert cached_folder(tmp_path / "layer", fail) == tmp_path / "layer"
    assert (tmp_path / "layer/x").exists()
