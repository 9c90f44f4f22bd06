"""The committed bugs fit the real source archives, and their tests name real code."""

from __future__ import annotations

import ast
import json
from pathlib import Path

from rollout.tasks.harbor_task import read_index
from rollout.tasks.pypi import sdist_files, write_tasks
from rollout.tasks.pypi_data import read_data
from rollout.tasks.unified_diff import diff_path


def test_every_task_is_built_from_its_archive(tmp_path: Path) -> None:
    data = read_data()
    entries = read_index(write_tasks(tmp_path, data))
    originals = {name: sdist_files(package) for name, package in data.packages.items()}
    assert len(entries) == len(data.bugs)
    for entry, bug in zip(entries, data.bugs, strict=True):
        path = diff_path(bug.patch)
        broken = (entry.path / "environment" / path).read_bytes()
        fixed = (entry.path / "solution/fixed").read_bytes()
        assert fixed == originals[bug.package][path] != broken
        assert ast.dump(ast.parse(broken)) != ast.dump(ast.parse(fixed))
        test_files = {test.split("::")[0] for test in bug.fail_to_pass}
        assert test_files <= set(originals[bug.package])
        grading = json.loads((entry.path / "tests/grading.json").read_text())
        package = data.packages[bug.package]
        suite = package.suites[bug.suite].tests
        assert sorted(grading["fail_to_pass"] + grading["pass_to_pass"]) == sorted(suite)
