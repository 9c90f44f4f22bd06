"""Grading: from what a test run left behind to a reward. Pure, standard library only.

Owner: rollout/tasks; the harness imports it too, in another Python (3.11 and newer load it).

tests/grading.json of a task stays on the worker and names what must come out:
  kind "stdout": `expect`, compared with the stdout of tests/test.sh, both stripped.
  kind "pytest": `fail_to_pass`, `pass_to_pass`, and `log`, the file inside the sandbox that
    test.sh writes (`pytest -rA --tb=no`, then the line `tests exited with status N`).
  both: `restore`, globs below the workdir whose changes by the agent are dropped.

Invariants:
  * A test counts only when it is reported as PASSED. Absent, skipped, xfailed (code under
    test may call pytest.xfail itself) or reported twice with different outcomes: not passed.
  * No verdict without the end: a log that stops before its last line, or whose test process
    died by a signal, gives reward None. The caller decides whose doing that was.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

DEFAULT_LOG = "/logs/verifier/pytest.txt"
_STATUS_LINE = re.compile(
    r"(PASSED|FAILED|ERROR|XFAIL|XPASS|SKIPPED|SUBFAILED\S*|SUBPASSED\S*) (.*)"
)
_EXIT_LINE = re.compile(r"tests exited with status (\d+)")
_SUMMARY_HEADER = "short test summary info"
# Exit statuses above it mean death by a signal (128 + n).
_MAX_OWN_STATUS = 128


class GradingError(ValueError):
    """grading.json is missing something or malformed; the message says what."""


@dataclass(frozen=True)
class GradingSpec:
    """What must come out of a task's tests."""

    kind: str
    """stdout or pytest."""
    expect: str = ""
    """stdout: the text to come out."""
    fail_to_pass: tuple[str, ...] = ()
    """pytest: ids that the bug makes fail."""
    pass_to_pass: tuple[str, ...] = ()
    """pytest: ids that pass all along."""
    log: str = DEFAULT_LOG
    """pytest: absolute path of the log inside the sandbox."""
    restore: tuple[str, ...] = ()
    """Globs of paths whose changes by the agent are dropped; `**` crosses folders."""

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> GradingSpec:
        """Checks and converts the content of grading.json. Raises GradingError."""
        allowed = {
            "stdout": {"kind", "expect", "restore"},
            "pytest": {"kind", "fail_to_pass", "pass_to_pass", "log", "restore"},
        }
        kind = data.get("kind")
        if not isinstance(kind, str) or kind not in allowed:
            raise GradingError(f"grading kind is {kind!r}; wanted one of {sorted(allowed)}")
        unknown = sorted(set(data) - allowed[kind])
        if unknown:
            raise GradingError(
                f"grading of kind {kind} has unknown keys {unknown}; known are {sorted(allowed[kind])}"
            )
        for key in ("expect", "log"):
            if not isinstance(data.get(key, ""), str):
                raise GradingError(f"grading key {key} is no string: {data[key]!r}")
        lists = {k: _strings(data, k) for k in ("fail_to_pass", "pass_to_pass", "restore")}
        if kind == "pytest" and not lists["fail_to_pass"]:
            raise GradingError("grading key fail_to_pass is empty; the task would have no bug")
        if kind == "stdout" and not data.get("expect", "").strip():
            raise GradingError("grading key expect is empty; an empty output would pass")
        return cls(
            kind=kind,
            expect=data.get("expect", ""),
            log=data.get("log", DEFAULT_LOG),
            **lists,
        )

    @classmethod
    def load(cls, path: Path) -> GradingSpec:
        """Reads a grading.json. Raises GradingError, naming the file."""
        try:
            data = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise GradingError(f"{path} cannot be read: {error}") from error
        if not isinstance(data, dict):
            raise GradingError(f"{path} holds no JSON object")
        try:
            return cls.parse(data)
        except GradingError as error:
            raise GradingError(f"{path}: {error}") from error

    def restores(self, path: str) -> bool:
        """Whether the agent's change to `path` (relative to the workdir) is dropped."""
        return any(_glob(pattern).fullmatch(path) for pattern in self.restore)


@dataclass(frozen=True)
class Grade:
    """The verdict."""

    reward: float | None
    """1.0, 0.0, or None: the run did not come to its end, so there is no verdict."""
    detail: str
    """One line for people: why."""
    not_passed: tuple[str, ...] = ()
    """pytest: required ids that were reported, but not only as PASSED."""
    missing: tuple[str, ...] = ()
    """pytest: required ids that were not reported."""


def grade(spec: GradingSpec, output: str, *, truncated: bool = False) -> Grade:
    """The verdict on `output`: stdout of test.sh, or the text of `spec.log`.

    `truncated` says that bytes of it were dropped on the way.
    """
    if truncated:
        return Grade(None, "the tests' output was truncated on its way; raise its cap")
    if spec.kind == "stdout":
        if output.strip() == spec.expect.strip():
            return Grade(1.0, "output as expected")
        return Grade(0.0, f"output differs from what was expected: {output.strip()[-120:]!r}")
    return _grade_pytest(spec, output)


def outcomes(log: str, ids: Iterable[str]) -> dict[str, set[str]]:
    """Statuses that a `pytest -rA` summary reports for each of `ids`.

    Only whole ids match: an id may hold blanks, and `id - message` is how failures read.
    """
    wanted = {i: i for i in ids}
    found: dict[str, set[str]] = {i: set() for i in wanted}
    _, header, summary = log.rpartition(_SUMMARY_HEADER)
    for line in (summary if header else log).splitlines():
        match = _STATUS_LINE.fullmatch(line.rstrip("\r"))
        if not match:
            continue
        status, rest = match.groups()
        # The longest prefix that is a wanted id: the id itself may contain " - ".
        candidate = rest
        while candidate and candidate not in wanted:
            candidate = candidate.rpartition(" - ")[0]
        if candidate:
            found[candidate].add(status)
    return found


def _grade_pytest(spec: GradingSpec, log: str) -> Grade:
    last = log.rstrip().rpartition("\n")[2].strip()
    ended = _EXIT_LINE.fullmatch(last)
    if not ended:
        return Grade(
            None, f"the test log does not end with its exit status; it ends {last[-80:]!r}"
        )
    if int(ended[1]) > _MAX_OWN_STATUS:
        return Grade(None, f"the test process died by signal {int(ended[1]) - _MAX_OWN_STATUS}")
    required = [*spec.fail_to_pass, *spec.pass_to_pass]
    found = outcomes(log, required)
    missing = tuple(i for i in required if not found[i])
    not_passed = tuple(i for i in required if found[i] and found[i] != {"PASSED"})
    if not missing and not not_passed:
        return Grade(1.0, f"all {len(required)} tests passed")
    first = (not_passed or missing)[0]
    detail = f"{len(not_passed)} tests did not pass, {len(missing)} are missing; first: {first}"
    return Grade(0.0, detail, not_passed, missing)


def _strings(data: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = data.get(key, [])
    if not isinstance(value, list) or not all(isinstance(v, str) and v for v in value):
        raise GradingError(f"grading key {key} is no list of non-empty strings")
    if len(set(value)) != len(value):
        raise GradingError(f"grading key {key} names something twice")
    return tuple(value)


@lru_cache(maxsize=256)
def _glob(pattern: str) -> re.Pattern[str]:
    parts = []
    for piece in re.split(r"(\*\*/?|\*|\?)", pattern):
        if piece == "**/":
            parts.append("(?:.*/)?")
        elif piece == "**":
            parts.append(".*")
        elif piece == "*":
            parts.append("[^/]*")
        elif piece == "?":
            parts.append("[^/]")
        else:
            parts.append(re.escape(piece))
    return re.compile("".join(parts))
