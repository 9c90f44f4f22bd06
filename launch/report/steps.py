"""Reads the rows of RL steps: where their time went, and after which the run was resumed. Pure.

A step's parts are what `trainer/step_clock.py` booked: they add up to `time_step_s`. The time
between two steps of one lineage (checkpoint, report, evaluation) is in none of them, and is a
part of its own here.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from launch.report.data import Row

_PART = re.compile(r"time_(.+)_s")
_STEP = "step"
_ORDER = ("wait", "fetch", "logprob", "update", "publish")
UNBOOKED = "not booked"
BETWEEN = "between steps"


@dataclass(frozen=True)
class StepTimes:
    """Seconds of each part of each step; `parts[name][i]` belongs to `steps[i]`."""

    steps: list[int]
    parts: dict[str, list[float]]

    def means(self) -> dict[str, float]:
        """Mean seconds of each part."""
        num = len(self.steps) or 1
        return {name: sum(values) / num for name, values in self.parts.items()}


def step_times(rl: Sequence[Row]) -> StepTimes:
    """Parts in the order of a step; what the parts leave of `time_step_s` is `not booked`."""
    rows = [row for row in rl if "time_step_s" in row]
    names = {m[1] for row in rows for key in row if (m := _PART.fullmatch(key))} - {_STEP, "other"}
    ordered = [n for n in _ORDER if n in names] + sorted(names - set(_ORDER))
    parts = {
        name: [float(row.get(f"time_{name}_s", 0.0)) for row in rows]
        for name in (*ordered, "other")
    }
    booked = [sum(parts[name][i] for name in parts) for i in range(len(rows))]
    parts[UNBOOKED] = [
        max(0.0, float(row["time_step_s"]) - total) for row, total in zip(rows, booked, strict=True)
    ]
    parts[BETWEEN] = _between(rows)
    return StepTimes([int(row["step"]) for row in rows], parts)


def _between(rows: Sequence[Row]) -> list[float]:
    """Seconds from the end of the step before to this one's start; 0 after a resume."""
    gaps = []
    before: Row | None = None
    for row in rows:
        follows = (
            before is not None
            and row["step"] == before["step"] + 1
            and row.get("lineage") == before.get("lineage")
            and "finished_at" in row
        )
        began = float(row.get("finished_at", 0.0)) - float(row["time_step_s"])
        gaps.append(max(0.0, began - before["finished_at"]) if follows and before else 0.0)
        before = row
    return gaps


def resumed_after(rl: Sequence[Row], noted: Sequence[int]) -> list[int]:
    """Steps after which another trainer process went on, in order.

    Args:
        rl: rows; a change of `lineage` between two of them is a resume.
        noted: steps that `swe_rl resume` noted; used where rows carry no lineage.
    """
    if not any("lineage" in row for row in rl):
        return sorted(set(noted))
    return [
        int(a["step"]) for a, b in itertools.pairwise(rl) if a.get("lineage") != b.get("lineage")
    ]


def curve(rl: Sequence[Row], name: str, scale: float = 1.0) -> list[tuple[float, float]]:
    """(step, value) of a scalar where a step has it."""
    return [
        (float(row["step"]), scale * float(row[name])) for row in rl if row.get(name) is not None
    ]


def thinned(
    points: Sequence[tuple[float, float]], num_points: int = 400
) -> list[tuple[float, float]]:
    """Means of consecutive points, so that at most num_points are left."""
    stride = -(-len(points) // num_points)
    if stride <= 1:
        return list(points)
    chunks = [points[i : i + stride] for i in range(0, len(points), stride)]
    return [(sum(x for x, _ in c) / len(c), sum(y for _, y in c) / len(c)) for c in chunks]
