"""What the agent may not change, and plain reward files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollout.harness.errors import TaskFormatError
from rollout.harness.grading import load_grading, reward_from_files


def write(folder: Path, **spec: object) -> Path:
    (folder / "grading.json").write_text(json.dumps(spec))
    return folder


def test_pytest_tasks_never_take_created_steering_files(tmp_path: Path) -> None:
    grading = load_grading(
        write(tmp_path, kind="pytest", fail_to_pass=["t::a"], restore=["tests/**"])
    )
    assert grading.is_restored("conftest.py", True) and grading.is_restored("lib/x.pth", True)
    assert not grading.is_restored("conftest.py", False), "the task's own may be worked on"
    assert grading.is_restored("tests/a/test_x.py", False)
    assert not grading.is_restored("src/a.py", True)


def test_stdout_tasks_take_them(tmp_path: Path) -> None:
    grading = load_grading(write(tmp_path, kind="stdout", expect="1", restore=["t.py"]))
    assert not grading.is_restored("conftest.py", True)
    assert grading.is_restored("t.py", False)


def test_no_spec(tmp_path: Path) -> None:
    grading = load_grading(tmp_path)
    assert grading.spec is None and not grading.is_restored("x", True)


def test_malformed_spec(tmp_path: Path) -> None:
    with pytest.raises(TaskFormatError, match=r"grading\.json"):
        load_grading(write(tmp_path, kind="pytest"))


@pytest.mark.parametrize(
    ("text", "as_json", "want"),
    [
        (b"1\n", None, 1.0),
        (b"0.5", None, 0.5),
        (None, b'{"reward": 0}', 0.0),
        (None, b"1", 1.0),
        (None, None, None),
        (b"", None, None),
        (b"nan", None, None),
        (b"7", None, None),
        (None, b'{"score": 1}', None),
        (None, b"[", None),
    ],
)
def test_reward_files(text: bytes | None, as_json: bytes | None, want: float | None) -> None:
    assert reward_from_files(text, as_json) == want
