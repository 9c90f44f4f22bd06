"""Reads what a run left in `metrics/` into plain tables for the report.

Owner: `launch/report`. Reads only; a missing or torn file is an empty table, because a report
of an interrupted run is worth having.
"""

from __future__ import annotations

import contextlib
import json
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch.intervals import Interval, paired_difference, pass_at_1

_NOT_STEPS = ("attempts", "status", "selection")
_TEST_POOL, _DEV_POOL = "test", "dev"

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


@dataclass(frozen=True)
class DevPoint:
    """A periodic evaluation on the dev pool."""

    step: int
    sampling: str
    weight_version: int
    interval: Interval


@dataclass
class RunData:
    """Everything that the report shows."""

    name: str
    config_text: str = ""
    settings: Row = field(default_factory=dict)
    """config_text as a tree; empty where it cannot be read."""
    evaluations: list[EvaluationRow] = field(default_factory=list)
    dev_points: list[DevPoint] = field(default_factory=list)
    best: Row = field(default_factory=dict)
    """step, weight_version, pass_at_1 of the checkpoint that was kept."""
    steps: dict[str, list[Row]] = field(default_factory=dict)
    """Stage -> one row a step of the surviving lineage."""
    attempts: list[Row] = field(default_factory=list)
    """Finished training attempts (launch/attempt_rows.py)."""
    status: list[Row] = field(default_factory=list)
    """Samples of the manager's GetStatus."""
    counters: list[CounterRow] = field(default_factory=list)
    probe: Row = field(default_factory=dict)
    overlap: Row = field(default_factory=dict)
    throughput: Row = field(default_factory=dict)
    stages: list[Row] = field(default_factory=list)
    resumed_at_steps: list[int] = field(default_factory=list)
    changed_settings: list[tuple[int, str]] = field(default_factory=list)
    """RL steps done by then, and `--section.field=value`, of settings given to a `resume`."""
    is_finished: bool = False

    @property
    def rl(self) -> list[Row]:
        """Steps of reinforcement learning."""
        return self.steps.get("rl", [])

    @property
    def causes(self) -> Counter[str]:
        """Causes of the training attempts."""
        return Counter(str(attempt["cause"]) for attempt in self.attempts)

    @property
    def staleness(self) -> Counter[int]:
        """Updates between sampling and consumption -> trajectories that were consumed."""
        histogram: Counter[int] = Counter()
        for step in self.rl:
            for updates, count in step.get("staleness_histogram", {}).items():
                histogram[int(updates)] += int(count)
        return histogram


def load_run(root: Path) -> RunData:
    """Reads the run at root."""
    metrics = root / "metrics"
    state = _json(root / "state.json")
    evaluations = _json(metrics / "evaluations.json")
    data = RunData(name=root.name)
    config = root / "config.toml"
    data.config_text = config.read_text(errors="replace") if config.is_file() else ""
    with contextlib.suppress(tomllib.TOMLDecodeError):
        data.settings = tomllib.loads(data.config_text)
    data.evaluations = evaluation_rows(evaluations)
    data.dev_points = dev_points(evaluations) or candidates(
        _json_lines(metrics / "selection.jsonl")
    )
    for path in sorted(metrics.glob("*.jsonl")):
        if path.stem not in _NOT_STEPS:
            data.steps[path.stem] = load_steps(path)
    data.attempts = list(_json_lines(metrics / "attempts.jsonl"))
    data.status = [row for row in _json_lines(metrics / "status.jsonl") if "time_s" in row]
    reason = why_counts_differ(_json(metrics / "restarts.json"))
    data.counters = [
        CounterRow(what, sides, reason) for what, sides in _json(metrics / "counters.json").items()
    ]
    data.best = _json(metrics / "best.json")
    data.probe = _json(metrics / "probe.json")
    data.overlap = _json(metrics / "overlap.json")
    data.throughput = _json(metrics / "throughput.json")
    data.stages = list(state.get("stages", []))
    data.resumed_at_steps = list(state.get("resumed_at_steps", []))
    data.changed_settings = [
        (int(change["after_step"]), override)
        for change in state.get("changed_settings", [])
        for override in change["settings"]
    ]
    data.is_finished = bool(state.get("finished"))
    return data


def load_steps(path: Path) -> list[Row]:
    """Rows of a stage's JSONL, by step, those of the surviving lineage; empty before the first."""
    return _last_per_step(_json_lines(path))


def why_counts_differ(restarts: Mapping[str, Any]) -> str:
    """What metrics/restarts.json says in words; empty when it names nothing."""
    words = [
        f"{name} was started again {times}x and counts from its last start"
        for name, times in restarts.get("processes", {}).items()
    ]
    if again := restarts.get("num_attempts_tried_again"):
        words.append(f"{again} attempts were tried again, and the harness tells their last try")
    return "; ".join(words)


def dev_points(evaluations: Mapping[str, Row]) -> list[DevPoint]:
    """Scored evaluations on the dev pool that name an RL step, in the order of steps; the last of each."""
    points: dict[tuple[int, str], DevPoint] = {}
    for evaluation in evaluations.values():
        if evaluation.get("pool", _TEST_POOL) != _DEV_POOL or evaluation.get("step") is None:
            continue
        interval = pass_at_1({task["task_id"]: task["rewards"] for task in evaluation["tasks"]})
        if interval is not None:
            step, sampling = int(evaluation["step"]), _sampling(evaluation)
            version = int(evaluation["weight_version"])
            points[step, sampling] = DevPoint(step, sampling, version, interval)
    return [points[key] for key in sorted(points)]


def candidates(rows: Iterable[Row]) -> list[DevPoint]:
    """What the trainer knows of its evaluations while RL goes on: no intervals yet."""
    points = {}
    for row in rows:
        if {"step", "weight_version", "pass_at_1", "temperature"} <= set(row):
            mean = float(row["pass_at_1"])
            interval = Interval(mean, mean, mean, int(row.get("num_tasks", 0)))
            points[row["step"]] = DevPoint(
                row["step"], _sampling(row), row["weight_version"], interval
            )
    return [points[step] for step in sorted(points)]


def evaluation_rows(evaluations: Mapping[str, Row]) -> list[EvaluationRow]:
    """Rows of the test pool in the order of evaluation; gains pair a stage with the one before."""
    rows: list[EvaluationRow] = []
    before: dict[str, dict[str, list[float]]] = {}
    for evaluation in evaluations.values():
        if evaluation.get("pool", _TEST_POOL) != _TEST_POOL:
            continue  # chose the checkpoint, so it is not held out
        rewards = {task["task_id"]: task["rewards"] for task in evaluation["tasks"]}
        sampling = _sampling(evaluation)
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


def _sampling(evaluation: Row) -> str:
    temperature = evaluation["temperature"]
    return "greedy" if temperature == 0 else f"T={temperature:g}"


def _last_per_step(rows: Iterator[Row]) -> list[Row]:
    """After a resume a step may be there twice; the surviving lineage is the later one."""
    by_step: dict[int, Row] = {}
    for row in rows:
        if isinstance(row.get("step"), int):
            by_step[row["step"]] = row
    return [by_step[step] for step in sorted(by_step)]


def _json(path: Path) -> Any:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _json_lines(path: Path) -> Iterator[Row]:
    if not path.exists():
        return
    for line in path.read_text(errors="replace").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue  # torn by a crash or a full disk
        if isinstance(row, dict):
            yield row
