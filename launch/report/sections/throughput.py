"""What limits throughput? Step parts, a trajectory's time, the long tail, what was measured."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from launch.report import steps, trajectories
from launch.report.blocks import Figure, Section, Table
from launch.report.charts import (
    WHOLE,
    Axes,
    Key,
    Mark,
    Range,
    StackedRow,
    ranges,
    stacked_columns,
    stacked_rows,
)
from launch.report.data import Row, RunData
from launch.report.sections.learning import resume_marks
from launch.report.sections.over_time import TimeAxis, in_flight, kv_over_time, tokens_over_time
from launch.report.svg import number

STEP_COLORS = {
    "wait": "slate",
    "fetch": "cyan",
    "logprob": "amber",
    "update": "blue",
    "publish": "green",
    "other": "pale",
    steps.UNBOOKED: "red",
    steps.BETWEEN: "magenta",
}
TIME_COLORS = {
    "sandbox start": "cyan",
    "admission queue": "amber",
    "engine queue": "olive",
    "update window": "red",
    "decode": "blue",
    "rest of model calls": "violet",
    "tools": "green",
    "grading sandbox": "brown",
    "grading": "magenta",
    "harness": "slate",
    "earlier tries": "pink",
    "other": "pale",
}
_MAX_COLUMNS = 120
_NUM_TASKS = 15
_NUM_BINS = 30


def step_keys(names: Sequence[str]) -> list[Key]:
    """Legend of step parts; parts that this file does not know get a colour too."""
    return [Key(name, STEP_COLORS.get(name, "violet")) for name in names]


def step_breakdown(data: RunData) -> Figure:
    """Seconds of each step by part; many steps are averaged into fewer columns."""
    times = steps.step_times(data.rl)
    stride = max(1, -(-len(times.steps) // _MAX_COLUMNS))
    xs = [float(np.mean(times.steps[i : i + stride])) for i in range(0, len(times.steps), stride)]
    parts = [
        (key, [float(np.mean(values[i : i + stride])) for i in range(0, len(values), stride)])
        for key, values in zip(step_keys(list(times.parts)), times.parts.values(), strict=True)
    ]
    averaged = f" A column is the mean of {stride} steps." if stride > 1 else ""
    return Figure(
        "step-breakdown",
        "Where a step's time goes",
        "The trainer's parts add up to the step. Wait: no batch was ready, so rollouts limit. "
        "Between steps: checkpoints and evaluations, outside the step's own time." + averaged,
        stacked_columns(
            "seconds of each step by part",
            xs,
            parts,
            Axes("RL step", "s", integer_x=True, tip_x="step"),
            column_width=float(stride),
            marks=resume_marks(data),
        ),
    )


def step_table(data: RunData) -> Table:
    """Mean, median and worst of each part."""
    times = steps.step_times(data.rl)
    total = sum(sum(values) for values in times.parts.values())
    rows = []
    for name, values in times.parts.items():
        if any(values):
            middle, worst = float(np.median(values)), max(values)
            mean = sum(values) / len(values)
            share = f"{100 * sum(values) / total:.1f} %"
            rows.append((name, *(f"{v:.2f}" for v in (mean, middle, worst)), share))
    if rows:
        count = len(times.steps)
        whole = [sum(values[i] for values in times.parts.values()) for i in range(count)]
        rows.append(
            (
                "all",
                f"{total / count:.2f}",
                f"{np.median(whole):.2f}",
                f"{max(whole):.2f}",
                "100.0 %",
            )
        )
    delays = [row[_FIRST_TOKEN] for row in data.rl if _FIRST_TOKEN in row]
    if delays:
        figures = (float(np.mean(delays)), float(np.median(delays)), max(delays))
        rows.append(("update to first token", *(f"{v:.2f}" for v in figures), ""))
    return Table(
        "step-parts", "Parts of a step, s",
        "Update to first token: from an update's end until a turn begins to be sampled with it; no "
        "part of the step." if delays else "", ("part", "mean", "median", "worst", "share"), rows,
        numeric=(1, 2, 3, 4), wide=False,
    )  # fmt: skip


def trajectory_time(attempts: Sequence[Row]) -> Figure:
    """Mean seconds of a trajectory's parts, by how it ended up."""
    groups: dict[str, list[Row]] = {"all": list(attempts)}
    slow = np.quantile([a["duration_s"] for a in attempts], 0.95) if attempts else 0.0
    groups["slowest 5 %"] = [a for a in attempts if a["duration_s"] >= slow]
    groups["solved"] = [a for a in attempts if (a.get("reward") or 0) >= 1]
    groups["not solved"] = [a for a in attempts if a.get("reward") is not None and a["reward"] < 1]
    groups["no reward"] = [a for a in attempts if a.get("reward") is None]
    rows = []
    for name, members in groups.items():
        parts = trajectories.mean_parts(members)
        if parts:
            note = f"{number(sum(parts.values()))} s, n {len(members):,}"
            rows.append(StackedRow(name, list(parts.values()), note))
    keys = [Key(name, TIME_COLORS[name]) for name in trajectories.PARTS]
    return Figure(
        "trajectory-time",
        "Where a trajectory's time goes",
        "Mean seconds of each part of the wall time; they add up to it. Rest of model calls: HTTP, "
        "rendering, durable writes, and calls that failed. Other: handing out and taking in.",
        stacked_rows("mean seconds by part", keys, rows, "s", width=WHOLE),
        wide=True,
    )


def durations(attempts: Sequence[Row]) -> Figure:
    """Histogram of wall times, up to p99."""
    walls = np.array([a["duration_s"] for a in attempts])
    plot = None
    note = ""
    if walls.size:
        quantiles = np.quantile(walls, [0.5, 0.95, 0.99])
        end = float(quantiles[-1]) or 1.0
        counts, edges = np.histogram(np.minimum(walls, end), bins=_NUM_BINS, range=(0.0, end))
        names = ("p50", "p95", "p99")
        marks = [
            Mark(float(q), f"{n}: {number(q)} s") for q, n in zip(quantiles, names, strict=True)
        ]
        plot = stacked_columns(
            "wall time of attempts",
            [float(x) for x in (edges[:-1] + edges[1:]) / 2],
            [(Key("attempts", "blue"), [float(c) for c in counts])],
            Axes("s", "attempts", x_range=(0.0, end), tip_x="about s"),
            column_width=float(edges[1] - edges[0]),
            marks=marks,
        )
        told = ", ".join(f"{n} {number(q)} s" for q, n in zip(quantiles, names, strict=True))
        note = f" {told}, largest {number(walls.max())} s; dashed lines; what is above p99 is in the last column."
    return Figure(
        "durations",
        "Wall time of an attempt",
        "Training attempts, first lease to cause. A step waits for whole groups, so the tail "
        "counts." + note,
        plot,
    )


def long_tail(attempts: Sequence[Row]) -> Figure:
    """The slowest tasks beside all of them."""
    shown = trajectories.slowest_tasks(attempts, _NUM_TASKS)
    if attempts:
        shown = [trajectories.tail("all tasks", attempts), *shown]
    rows = [
        Range(
            tail.name, tail.p50_s, tail.p95_s, tail.max_s,
            (
                f"{tail.num:,}",
                "" if tail.reward_mean is None else f"{tail.reward_mean:.2f}",
                ", ".join(f"{cause} {count:,}" for cause, count in tail.causes.most_common()),
            ),
        )
        for tail in shown
    ]  # fmt: skip
    return Figure(
        "long-tail",
        "Long tail by task",
        f"Wall time of the {_NUM_TASKS} tasks with the largest p95, and the causes of their "
        "attempts. Few tasks with caps or failures: look at those; all alike: look at the machine.",
        ranges("wall time by task", rows, "s", ("attempts", "reward", "causes")),
        wide=True,
    )


_FIRST_TOKEN = "publish_to_first_token_s"

OVERLAP_ROWS = {
    "max_staleness": ("max_staleness", "versions"),
    "num_steps": ("RL steps", ""),
    "wall_s": ("RL wall", "s"),
    "trainer_wait_s": ("trainer waits", "s"),
    "trainer_step_s": ("trainer computes", "s"),
    "publish_s": ("publishing", "s"),
    "outside_s": ("the rest of the steps", "s"),
    "between_steps_s": ("between steps", "s"),
    "engine_tokens_per_s": ("engines, all of RL", "tokens/s"),
    "engine_tokens_per_s_in_trainer_steps": ("engines while the trainer computes", "tokens/s"),
    "engine_tokens_per_s_in_publish": ("engines while it publishes", "tokens/s"),
    "engine_tokens_per_s_outside": ("engines in the rest of the steps", "tokens/s"),
    "ratio_in_trainer_steps_to_outside": ("ratio, computing / rest", ""),
    "sampled_tokens_in_trainer_steps": ("sampled while the trainer computes", "tokens"),
    "sampled_tokens_in_publish": ("sampled while it publishes", "tokens"),
    "sampled_tokens_outside": ("sampled in the rest of the steps", "tokens"),
    "sampled_tokens_between_steps": ("sampled between steps", "tokens"),
}
THROUGHPUT_ROWS = {
    "rl_trajectories_per_s": ("valid trajectories in RL", "1/s"),
    "generate_only_trajectories_per_s": ("the same from the engines alone", "1/s"),
    "ratio": ("ratio, RL / engines alone", ""),
    "rl_num_trajectories": ("valid trajectories of RL", ""),
    "rl_wall_s": ("in", "s"),
    "concurrency": ("at a time, engines alone", ""),
}


def measured_table(runs: Sequence[RunData]) -> Table:
    """Overlap of sampling and training, and RL's rate beside the engines alone; a column a run."""
    rows = []
    for where in ("overlap", "throughput"):
        known = OVERLAP_ROWS if where == "overlap" else THROUGHPUT_ROWS
        found = dict.fromkeys(key for run in runs for key in getattr(run, where))
        for key in [*(k for k in known if k in found), *(k for k in found if k not in known)]:
            label, unit = known.get(key, (key.replace("_", " "), ""))
            values = [getattr(run, where).get(key) for run in runs]
            if all(isinstance(v, (int, float)) or v is None for v in values):
                rows.append((label, *("" if v is None else number(v) for v in values), unit))
    columns = ("", *(run.name if len(runs) > 1 else "value" for run in runs), "unit")
    return Table(
        "measured",
        "Overlap and throughput",
        "Sampled tokens/s of the engines while the trainer computes and in the rest of its steps, and RL's rate "
        "of valid trajectories beside the same engines sampling the same tokens alone.",
        columns,
        rows,
        numeric=tuple(range(1, len(runs) + 1)),
        wide=len(runs) > 1,
    )


def section(data: RunData) -> Section:
    """The section."""
    axis = TimeAxis(data)
    blocks: list[Figure | Table] = [
        step_breakdown(data),
        step_table(data),
        durations(data.attempts),
        measured_table([data]),
        trajectory_time(data.attempts),
        tokens_over_time(data, axis),
        kv_over_time(data, axis),
        in_flight(data, axis),
        long_tail(data.attempts),
    ]
    return Section(
        "throughput",
        "What limits throughput?",
        "",
        blocks,
        "No RL step and no attempt has ended yet.",
    )
