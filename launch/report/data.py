"""Reads what a run left in `metrics/` into plain tables for the report.

Owner: `launch/report`. Reads only; a missing or torn file is an empty table, because a report
of an interrupted run is worth having.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch.intervals import Interval, paired_difference, pass_at_1

Row = dict[str, Any]


@dataclass(frozen=True)
class EvaluationRow:
    """One line of the table of stages."""

    stage: str
    sampling: str
    """`T=1` or `greedy`."""
    weight_version: int
    interval: Interval | None
    num_attempts: int
    causes: Mapping[str, int]
    gain: Interval | None = None
    """Paired difference to the stage before, at the same sampling."""


@dataclass(frozen=True)
class CounterRow:
    """What two or more sides counted of the same thing."""

    what: str
    sides: Mapping[str, int]
    known_reason: str = ""
    """What happened in the run that makes counts differ; empty: nothing known."""

    @property
    def agree(self) -> bool:
        """True when every side counted the same."""
        return len(set(self.sides.values())) <= 1

    @property
    def verdict(self) -> str:
        """`agree`, or `differ` with the reason if one is known."""
        if self.agree:
            return "agree"
        return f"differ: {self.known_reason}" if self.known_reason else "differ"


@dataclass
class RunData:
    """Everything that the report shows."""

    name: str
    config_text: str = ""
    evaluations: list[EvaluationRow] = field(default_factory=list)
    steps: dict[str, list[Row]] = field(default_factory=dict)
    attempts: list[Row] = field(default_factory=list)
    status: list[Row] = field(default_factory=list)
    counters: list[CounterRow] = field(default_factory=list)
    probe: Row = field(default_factory=dict)
    stages: list[Row] = field(default_factory=list)
    resumed_at_steps: list[int] = field(default_factory=list)

    @property
    def causes(self) -> Counter[str]:
        """Causes of the training attempts."""
        return Counter(str(attempt["cause"]) for attempt in self.attempts)

    @property
    def staleness(self) -> Counter[int]:
        """Versions between sampling and consumption -> trajectories that were trained."""
        histogram: Counter[int] = Counter()
        for step in self.steps.get("rl", []):
            for versions, count in step.get("staleness_histogram", {}).items():
                histogram[int(versions)] += int(count)
        return histogram


def load_run(root: Path) -> RunData:
    """Reads the run at root."""
    metrics = root / "metrics"
    state = _json(root / "state.json")
    data = RunData(name=root.name)
    config = root / "config.toml"
    data.config_text = config.read_text() if config.exists() else ""
    data.evaluations = evaluation_rows(_json(metrics / "evaluations.json"))
    for path in sorted(metrics.glob("*.jsonl")):
        if path.stem not in ("attempts", "status"):
            data.steps[path.stem] = _last_per_step(_json_lines(path))
    data.attempts = list(_json_lines(metrics / "attempts.jsonl"))
    data.status = list(_json_lines(metrics / "status.jsonl"))
    reason = why_counts_differ(_json(metrics / "restarts.json"))
    data.counters = [
        CounterRow(what, sides, reason) for what, sides in _json(metrics / "counters.json").items()
    ]
    data.probe = _json(metrics / "probe.json")
    data.stages = list(state.get("stages", []))
    data.resumed_at_steps = list(state.get("resumed_at_steps", []))
    return data


def why_counts_differ(restarts: Mapping[str, Any]) -> str:
    """What metrics/restarts.json says in words; empty when it names nothing."""
    words = [
        f"{name} was started again {times}x and counts from its last start"
        for name, times in restarts.get("processes", {}).items()
    ]
    if again := restarts.get("num_attempts_tried_again"):
        words.append(f"{again} attempts were tried again, and the harness tells their last try")
    return "; ".join(words)


def evaluation_rows(evaluations: Mapping[str, Row]) -> list[EvaluationRow]:
    """Rows in the order of evaluation; gains pair a stage with the one before it."""
    rows: list[EvaluationRow] = []
    before: dict[str, dict[str, list[float]]] = {}
    for evaluation in evaluations.values():
        if evaluation.get("pool", "test") != "test":
            continue  # chose the checkpoint, so it is not held out
        rewards = {task["task_id"]: task["rewards"] for task in evaluation["tasks"]}
        sampling = (
            "greedy" if evaluation["temperature"] == 0 else f"T={evaluation['temperature']:g}"
        )
        previous = before.get(sampling)
        causes: Counter[str] = Counter()
        for task in evaluation["tasks"]:
            causes.update(task["causes"])
        rows.append(
            EvaluationRow(
                stage=evaluation["stage"],
                sampling=sampling,
                weight_version=evaluation["weight_version"],
                interval=pass_at_1(rewards),
                num_attempts=sum(causes.values()),
                causes=causes,
                gain=paired_difference(rewards, previous) if previous else None,
            )
        )
        before[sampling] = rewards
    return rows


def _last_per_step(rows: Iterator[Row]) -> list[Row]:
    """After a resume a step may be there twice; the surviving lineage is the later one."""
    by_step: dict[int, Row] = {}
    for row in rows:
        by_step[int(row["step"])] = row
    return [by_step[step] for step in sorted(by_step)]


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def _json_lines(path: Path) -> Iterator[Row]:
    if not path.exists():
        return
    for line in path.read_text().splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue  # the last line of a run that was killed
        if isinstance(row, dict):
            yield row
