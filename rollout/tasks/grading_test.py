"""Grading rules: what counts as passed, and when there is no verdict."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollout.tasks.grading import GradingError, GradingSpec, grade, outcomes

SPEC = GradingSpec.parse(
    {
        "kind": "pytest",
        "fail_to_pass": ["t.py::a[x y]", "t.py::b - c"],
        "pass_to_pass": ["t.py::d"],
        "restore": ["tests/**", "**/conftest.py", "*.cfg"],
    }
)
GOOD = """\
PASSED t.py::a[x y]
noise
=========== short test summary info ===========
PASSED t.py::a[x y]
PASSED t.py::b - c
PASSED t.py::d
3 passed in 0.01s
tests exited with status 0
"""


def _log(*lines: str, status: int | None = 1) -> str:
    head = ["=== short test summary info ==="]
    tail = [] if status is None else [f"tests exited with status {status}"]
    return "\n".join([*head, *lines, *tail]) + "\n"


PASSED = ("PASSED t.py::a[x y]", "PASSED t.py::b - c", "PASSED t.py::d")


def test_all_passed() -> None:
    verdict = grade(SPEC, GOOD)
    assert verdict.reward == 1.0 and not verdict.missing and not verdict.not_passed


@pytest.mark.parametrize(
    ("name", "lines", "missing", "not_passed"),
    [
        ("missing id", PASSED[:2], ("t.py::d",), ()),
        ("failed, with a message", (*PASSED[:2], "FAILED t.py::d - assert 1 - 2"), (), ("t.py::d",)),
        ("id that holds the separator", ("FAILED t.py::b - c - boom", PASSED[0], PASSED[2]), (), ("t.py::b - c",)),
        ("xfail", (*PASSED[:2], "XFAIL t.py::d - why"), (), ("t.py::d",)),
        ("skipped hides its id", (*PASSED[:2], "SKIPPED [1] t.py:3: why"), ("t.py::d",), ()),
        ("duplicate that disagrees", (*PASSED, "ERROR t.py::d - teardown"), (), ("t.py::d",)),
        ("blank in an id does not match its prefix", ("PASSED t.py::a[x z]", *PASSED[1:]), ("t.py::a[x y]",), ()),
        ("collection error", ("ERROR t.py - SyntaxError",), ("t.py::a[x y]", "t.py::b - c", "t.py::d"), ()),
    ],
)  # fmt: skip
def test_not_passed(
    name: str, lines: tuple[str, ...], missing: tuple[str, ...], not_passed: tuple[str, ...]
) -> None:
    verdict = grade(SPEC, _log(*lines))
    assert verdict.reward == 0.0, name
    assert (verdict.missing, verdict.not_passed) == (missing, not_passed), name


def test_duplicate_that_agrees_passes() -> None:
    assert grade(SPEC, _log(*PASSED, *PASSED, status=0)).reward == 1.0


def test_text_before_the_summary_does_not_count() -> None:
    log = "PASSED t.py::d\n" + _log(*PASSED[:2])
    assert grade(SPEC, log).missing == ("t.py::d",)


@pytest.mark.parametrize(
    ("name", "log", "truncated"),
    [
        ("cut before the end", _log(*PASSED, status=None), False),
        ("cut on the way", GOOD, True),
        ("empty", "", False),
        ("killed", _log(status=137), False),
    ],
)
def test_no_verdict_without_an_end(name: str, log: str, truncated: bool) -> None:
    assert grade(SPEC, log, truncated=truncated).reward is None, name


def test_stdout() -> None:
    spec = GradingSpec.parse({"kind": "stdout", "expect": "1 2\n3\n"})
    assert grade(spec, "\n1 2\n3").reward == 1.0
    assert grade(spec, "1 2\n4\n").reward == 0.0
    assert grade(spec, "").reward == 0.0
    assert grade(spec, "1 2\n3", truncated=True).reward is None


def test_restore_globs() -> None:
    assert SPEC.restores("tests/a/b.py") and SPEC.restores("conftest.py")
    assert SPEC.restores("a/b/conftest.py") and SPEC.restores("setup.cfg")
    assert not SPEC.restores("a/setup.cfg") and not SPEC.restores("src/tests.py")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"kind": "magic"}, "kind"),
        ({"kind": "stdout", "expect": " "}, "expect is empty"),
        ({"kind": "stdout", "expect": "x", "log": "/x"}, "unknown keys"),
        ({"kind": "pytest", "fail_to_pass": []}, "fail_to_pass is empty"),
        ({"kind": "pytest", "fail_to_pass": ["a", "a"]}, "twice"),
        ({"kind": "pytest", "fail_to_pass": "a"}, "list"),
        ({"kind": "pytest", "fail_to_pass": ["a"], "log": 3}, "no string"),
    ],
    ids=["kind", "empty expect", "unknown key", "no bug", "duplicate", "no list", "log"],
)
def test_bad_spec(data: dict[str, object], message: str, tmp_path: Path) -> None:
    path = tmp_path / "grading.json"
    path.write_text(json.dumps(data))
    with pytest.raises(GradingError, match=message):
        GradingSpec.load(path)


def test_outcomes_reads_windows_line_ends() -> None:
    assert outcomes("PASSED a\r\n", ["a"]) == {"a": {"PASSED"}}
