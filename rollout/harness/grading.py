"""How one task is graded: its spec, what the agent may not change, and plain reward files.

Owner: `rollout.harness`; the rules of `tests/grading.json` are those of `rollout.tasks.grading`.
A spec is read on the worker and never enters a sandbox, so nothing in there knows the answer.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from rollout.harness.errors import TaskFormatError
from rollout.tasks.grading import GradingError, GradingSpec

GRADING_FILE = "grading.json"

# Files that steer pytest or Python itself: one that the agent CREATED never reaches a pytest
# verifier, or its author could report any result.
_STEERING = frozenset(
    {
        "conftest.py",
        "pytest.ini",
        ".pytest.ini",
        "pytest.toml",
        ".pytest.toml",
        "tox.ini",
        "sitecustomize.py",
        "usercustomize.py",
    }
)


@dataclass(frozen=True)
class TaskGrading:
    """The grading of one task."""

    spec: GradingSpec | None
    """None: the fresh sandbox's reward file decides, as in plain Harbor."""

    def is_restored(self, path: str, created: bool) -> bool:
        """True when the agent's change to path (relative to the workdir) must not be graded."""
        if self.spec is None:
            return False
        name = path.rsplit("/", 1)[-1]
        if self.spec.kind == "pytest" and created and (name in _STEERING or name.endswith(".pth")):
            return True
        return self.spec.restores(path)


def load_grading(tests_dir: Path) -> TaskGrading:
    """Reads tests/grading.json if there is one. Raises TaskFormatError when it is malformed."""
    path = tests_dir / GRADING_FILE
    if not path.exists():
        return TaskGrading(None)
    try:
        return TaskGrading(GradingSpec.load(path))
    except GradingError as error:
        raise TaskFormatError(str(error)) from error


def reward_from_files(text: bytes | None, as_json: bytes | None) -> float | None:
    """The reward that a verifier wrote (0..1), or None when there is none or it is unreadable."""
    try:
        if as_json is not None:
            value = json.loads(as_json)
            value = value.get("reward") if isinstance(value, dict) else value
        elif text is not None:
            value = float(text)
        else:
            return None
        reward = float(value)
    except (ValueError, TypeError):
        return None
    return reward if 0.0 <= reward <= 1.0 else None
