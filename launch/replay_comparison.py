"""Compares the steps of a replay with those of the run that it replays. Pure.

Owner: `launch`. A step is a row of metrics/rl.jsonl. Two numbers are equal when their bits are;
a metric that only one side has is a difference. What cannot repeat is left out: times, what other
processes did meanwhile, and the names under which the same weights went out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_NOT_COMPARED = (
    "stage",
    "finished_at",
    "weight_version",
    "num_groups_ready_left",
    "lineage",
    "publish_to_first_token_s",
    "mfu_",
    "tokens_per_s",
    "spans",
    "time_",
    "guard_",
    "checkpoint_",
)
"""Beginnings of names that tell of the moment and not of the training."""

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Difference:
    """One metric of one step that is not the same; None: that side lacks it."""

    step: int
    metric: str
    recorded: Any
    replayed: Any


@dataclass(frozen=True)
class Comparison:
    """What came of a replay."""

    steps: tuple[int, ...]
    """Compared, in order."""
    num_values: int
    differences: tuple[Difference, ...]
    """In order of steps; those of one step begin with the loss."""

    @property
    def equal(self) -> bool:
        """True when every value of every step has the same bits."""
        return not self.differences


def read_steps(path: Path) -> list[Row]:
    """Whole rows of a metrics file from step 1 on without a gap; a torn last line is left out."""
    rows: dict[int, Row] = {}
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
            rows[int(row["step"])] = row
        except (ValueError, TypeError, KeyError):
            continue
    steps: list[Row] = []
    while (step := len(steps) + 1) in rows:
        steps.append(rows[step])
    return steps


def compare(recorded: Sequence[Row], replayed: Sequence[Row]) -> Comparison:
    """Compares row by row; both begin with step 1, and a step that one side lacks is not compared."""
    differences: list[Difference] = []
    steps: list[int] = []
    num_values = 0
    for left, right in zip(recorded, replayed, strict=False):
        step = int(left["step"])
        steps.append(step)
        names = [name for name in {**left, **right} if not name.startswith(_NOT_COMPARED)]
        for name in sorted(names, key=lambda name: (name != "loss", name)):
            num_values += 1
            one, other = left.get(name), right.get(name)
            if _bits(one) != _bits(other):
                differences.append(Difference(step, name, one, other))
    return Comparison(tuple(steps), num_values, tuple(differences))


def _bits(value: Any) -> Any:
    """Something that is equal only for the same bits: 0.0 and -0.0 differ."""
    return value.hex() if isinstance(value, float) else value
