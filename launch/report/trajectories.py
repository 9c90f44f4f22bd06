"""Where a trajectory's wall time goes, and which tasks have the long ones. Pure.

The wall time of an attempt runs from its first lease to the moment that its cause was recorded.
Three clocks split it. The worker's parts (sandboxes, model, tools, grading, its own work) add
up to the time of its last try; the gateway's and the manager's split the model part; and what
is left of the wall is `other`: handing the attempt out and its result in, or, when it was tried
more than once, `earlier tries`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from launch.report.data import Row

PARTS = (
    "sandbox start",
    "admission queue",
    "engine queue",
    "update window",
    "decode",
    "rest of model calls",
    "tools",
    "grading sandbox",
    "grading",
    "harness",
    "earlier tries",
    "other",
)


def time_parts(attempt: Row) -> dict[str, float]:
    """Seconds of each of PARTS; they add up to `duration_s`."""
    wall = max(0.0, float(attempt.get("duration_s", 0.0)))
    environment, grading_box = _s(attempt, "environment"), _s(attempt, "grading_environment")
    parts = {
        "sandbox start": max(0.0, environment - grading_box),
        **_model_parts(attempt),
        "tools": _s(attempt, "tool"),
        "grading sandbox": min(grading_box, environment),
        "grading": _s(attempt, "verifier"),
        "harness": _s(attempt, "overhead"),
    }
    known = sum(parts.values())
    if known > wall:  # the worker rounds to milliseconds
        parts = {name: value * wall / known for name, value in parts.items()}
        known = wall
    rest = "earlier tries" if int(attempt.get("num_tries", 1)) > 1 else "other"
    parts[rest] = wall - known
    return {name: parts.get(name, 0.0) for name in PARTS}


def _model_parts(attempt: Row) -> dict[str, float]:
    """Splits the worker's wait for model calls; a resend may be counted twice, so parts are bounded."""
    model = _s(attempt, "model")
    queued = _s(attempt, "queued")
    generating = _s(attempt, "generating")
    window = min(_s(attempt, "window_paused"), generating)
    engine_queue = min(_s(attempt, "engine_queued"), generating - window)
    parts = {
        "admission queue": queued,
        "engine queue": engine_queue,
        "update window": window,
        "decode": generating - window - engine_queue,
    }
    inside = queued + generating
    if inside > model:
        parts = {name: value * model / inside for name, value in parts.items()}
    return {**parts, "rest of model calls": max(0.0, model - inside)}


def mean_parts(attempts: Iterable[Row]) -> dict[str, float]:
    """Mean seconds of each part; empty without attempts."""
    rows = [time_parts(attempt) for attempt in attempts]
    if not rows:
        return {}
    return {name: sum(row[name] for row in rows) / len(rows) for name in PARTS}


@dataclass(frozen=True)
class Tail:
    """Wall times of some attempts, in seconds."""

    name: str
    num: int
    p50_s: float
    p95_s: float
    max_s: float
    reward_mean: float | None
    causes: Counter[str]


def tail(name: str, attempts: Sequence[Row]) -> Tail:
    """The distribution of at least one attempt; quantiles interpolate linearly."""
    walls = np.array([float(a.get("duration_s", 0.0)) for a in attempts])
    rewards = [a["reward"] for a in attempts if a.get("reward") is not None]
    p50, p95 = np.quantile(walls, [0.5, 0.95])
    return Tail(
        name=name,
        num=len(attempts),
        p50_s=float(p50),
        p95_s=float(p95),
        max_s=float(walls.max()),
        reward_mean=float(np.mean(rewards)) if rewards else None,
        causes=Counter(str(a["cause"]) for a in attempts),
    )


def by_task(attempts: Iterable[Row]) -> dict[str, list[Row]]:
    """Attempts of each task."""
    tasks: dict[str, list[Row]] = {}
    for attempt in attempts:
        tasks.setdefault(str(attempt.get("task_id", "?")), []).append(attempt)
    return tasks


def slowest_tasks(attempts: Sequence[Row], num_tasks: int) -> list[Tail]:
    """The tasks with the largest p95 wall time, slowest first."""
    tails = [tail(task, rows) for task, rows in by_task(attempts).items()]
    return sorted(tails, key=lambda t: (-t.p95_s, -t.max_s, t.name))[:num_tasks]


def _s(attempt: Row, part: str) -> float:
    return max(0.0, float(attempt.get(f"{part}_time_s") or 0.0))
