"""Several runs in one page: what differs in their settings, their results, their curves.

Owner: `launch/report`. A colour means a run, the same in every figure. Steps stand beside
steps; wall time is compared by means and sums, since runs begin at moments of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from launch.report import failures, masking, steps, trajectories
from launch.report.blocks import Figure, Section, Table
from launch.report.charts import (
    HALF,
    WHOLE,
    Axes,
    Interval,
    Key,
    Line,
    Plot,
    StackedRow,
    intervals,
    line_chart,
    stacked_rows,
)
from launch.report.data import RunData, load_run
from launch.report.page import render_page, write_page
from launch.report.sections import failing, throughput
from launch.report.svg import SERIES, number

_CURVES = (
    ("reward_mean", "Reward", "reward", (0.0, 1.0), False),
    ("trained_tokens_per_trajectory_mean", "Length", "tokens a trajectory", (0.0, None), False),
    ("entropy_mean_nats", "Entropy", "nats a token", (0.0, None), False),
    ("grad_norm", "Gradient norm", "L2 norm", (0.0, None), True),
    ("gap_total_mean_nats", "Log-prob gap, total", "nats, mean", (0.0, None), True),
    (
        "ess_token_raw_rollout_to_trainer",
        "Effective sample size, by token",
        "share",
        (0.0, 1.0),
        False,
    ),
    ("staleness_mean", "Staleness", "updates, mean", (0.0, None), False),
    ("time_wait_s", "Trainer waits", "s a step", (0.0, None), False),
)
_UNTOLD = ("run.name", "run.directory")


def write_comparison(roots: Sequence[Path]) -> Path:
    """Writes compare-A-B.html beside the first run and returns its path. Raises OSError."""
    names = "-".join(root.name for root in roots)
    return write_page(
        roots[0].parent / f"compare-{names}.html", render([load_run(root) for root in roots])
    )


def render(runs: Sequence[RunData]) -> str:
    """The page of at least one run. Runs of one name get numbers."""
    repeated = Counter(run.name for run in runs)
    for index, run in enumerate(runs):
        if repeated[run.name] > 1:
            run.name = f"{run.name} ({index + 1})"
    sections = [_results(runs), _measured(runs), _curves(runs), _failing(runs)]
    return render_page(
        title=f"swe_rl runs: {', '.join(run.name for run in runs)}",
        subtitle="Side by side; each run has a report of its own.",
        sections=sections,
        configurations={run.name: run.config_text for run in runs},
    )


def differing_settings(runs: Sequence[RunData]) -> list[tuple[str, ...]]:
    """(setting, value in each run) of the settings that are not the same in all; unset is empty."""
    flat = [dict(_flat(run.settings)) for run in runs]
    names = sorted({name for settings in flat for name in settings} - set(_UNTOLD))
    rows = [(name, *(settings.get(name, "") for settings in flat)) for name in names]
    return [row for row in rows if len(set(row[1:])) > 1]


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)


def _results(runs: Sequence[RunData]) -> Section:
    names = [run.name for run in runs]
    stages = list(dict.fromkeys((r.stage, r.sampling) for run in runs for r in run.evaluations))
    rows = []
    for stage, sampling in stages:
        cells = []
        for run in runs:
            found = [r for r in run.evaluations if (r.stage, r.sampling) == (stage, sampling)]
            interval = found[-1].interval if found else None
            cells.append(interval.percent() if interval else "")
        rows.append((stage, sampling, *cells))
    values = [
        Interval(
            row.stage,
            run.name,
            *(100 * v for v in (row.interval.mean, row.interval.low, row.interval.high)),
        )
        for run in runs
        for row in run.evaluations
        if row.interval and row.sampling != "greedy"
    ]
    blocks: list[Figure | Table] = [
        Table("settings", "Settings that differ", "Blank: the default.", ("setting", *names), differing_settings(runs)),
        Table(
            "pass-table", "pass@1 on held-out tasks", "95 % intervals over tasks.",
            ("stage", "sampling", *names), rows, wide=len(runs) > 2,
        ),
        Figure(
            "pass-by-stage", "pass@1 by stage, sampled", "95 % intervals over tasks.",
            intervals("pass@1 by stage and run", values, "% of tasks solved"),
        ),
    ]  # fmt: skip
    return Section("results", "Results", "", blocks, "No evaluation has finished in any of them.")


def _measured(runs: Sequence[RunData]) -> Section:
    by_run = [(run.name, steps.step_times(run.rl).means()) for run in runs]
    parts = list(dict.fromkeys(part for _, means in by_run for part in means))
    step_keys = throughput.step_keys(parts)
    step_rows = [
        StackedRow(
            name, [means.get(part, 0.0) for part in parts], f"{number(sum(means.values()))} s"
        )
        for name, means in by_run
    ]
    time_keys = [Key(name, throughput.TIME_COLORS[name]) for name in trajectories.PARTS]
    time_rows = [
        StackedRow(run.name, list(mean.values()), f"{number(sum(mean.values()))} s")
        for run in runs
        if (mean := trajectories.mean_parts(run.attempts))
    ]
    blocks: list[Figure | Table] = [
        throughput.measured_table(runs),
        _key_figures(runs),
        Figure(
            "step-breakdown", "Where a step's time goes", "Mean seconds of an RL step by part.",
            stacked_rows("mean seconds of a step by part", step_keys, step_rows, "s a step", width=WHOLE),
            wide=True,
        ),
        Figure(
            "trajectory-time", "Where a trajectory's time goes",
            "Mean seconds of a training attempt's wall time by part.",
            stacked_rows("mean seconds of a trajectory by part", time_keys, time_rows, "s", width=WHOLE),
            wide=True,
        ),
    ]  # fmt: skip
    return Section("throughput", "Throughput", "", blocks, "No RL step has ended in any of them.")


def _key_figures(runs: Sequence[RunData]) -> Table:
    """Figures that each run's own rows give, a column a run."""
    figures: tuple[tuple[str, str, Callable[[RunData], float | None]], ...] = (
        ("RL steps", "", lambda run: float(len(run.rl)) or None),
        ("RL steps, sum of their time", "s", lambda run: _sum(run, "time_step_s")),
        ("trainer waits, sum", "s", lambda run: _sum(run, "time_wait_s")),
        ("trajectories trained", "", lambda run: _sum(run, "num_trajectories")),
        ("reward, last quarter", "", lambda run: _last_quarter(run, "reward_mean")),
        ("staleness, mean", "updates", lambda run: _mean(run, "staleness_mean")),
        ("ESS by token, least", "", lambda run: _least(run, "ess_token_raw_rollout_to_trainer")),
        ("training attempts", "", lambda run: float(len(run.attempts)) or None),
        ("failed tries", "% of tries", _failed_share),
        ("trained", "% of attempts that were consumed or left out", _trained_share),
    )
    rows = []
    for label, unit, read in figures:
        values = [read(run) for run in runs]
        if any(value is not None for value in values):
            rows.append((label, *("" if v is None else number(v) for v in values), unit))
    return Table(
        "figures", "In figures", "From the steps and attempts of each run.",
        ("", *(run.name for run in runs), "unit"), rows, numeric=tuple(range(1, len(runs) + 1)),
    )  # fmt: skip


def _curves(runs: Sequence[RunData]) -> Section:
    blocks: list[Figure | Table] = []
    for scalar, title, y, y_range, may_log in _CURVES:
        lines = [
            Line(run.name, color, steps.thinned(steps.curve(run.rl, scalar)))
            for run, color in zip(runs, SERIES, strict=False)
        ]
        axes = Axes("RL step", y, y_range, integer_x=True, may_log=may_log, tip_x="step")
        plot = line_chart(title, lines, axes)
        if plot is not None:
            plot = Plot(plot.svg, [Key(line.label, line.color) for line in lines if line.points])
        blocks.append(Figure(f"curve-{scalar.replace('_', '-')}", title, "By RL step.", plot))
    return Section("curves", "By step", "", blocks, "No RL step has ended in any of them.")


def _failing(runs: Sequence[RunData]) -> Section:
    causes = {run.name: Counter(e.cause for e in failures.try_ends(run.attempts)) for run in runs}
    keys = failing.cause_keys(sorted({cause for counts in causes.values() for cause in counts}))
    cause_rows = [
        StackedRow(name, [float(counts[key.label]) for key in keys], f"{counts.total():,}")
        for name, counts in causes.items()
    ]
    fates = {run.name: Counter(masking.fate(a) for a in run.attempts) for run in runs}
    fate_keys = [Key(name, failing.FATE_COLORS[name]) for name in masking.FATES]
    fate_rows = [
        StackedRow(name, [float(counts[fate]) for fate in masking.FATES], f"{counts.total():,}")
        for name, counts in fates.items()
    ]
    staleness_keys, staleness_rows = _staleness(runs)
    blocks: list[Figure | Table] = [
        Figure(
            "causes", "Causes", "Share of tries by cause; at the right all tries.",
            stacked_rows("causes by run", keys, cause_rows, "tries", width=HALF, as_share=True),
        ),
        Figure(
            "fates", "Masking and dropping", "Share of attempts by what became of them.",
            stacked_rows("fates by run", fate_keys, fate_rows, "attempts", width=HALF, as_share=True),
        ),
        Figure(
            "staleness", "Staleness", "Share of consumed trajectories by updates since they were sampled.",
            stacked_rows("staleness by run", staleness_keys, staleness_rows, "trajectories", as_share=True),
        ),
    ]  # fmt: skip
    return Section(
        "failing", "Failures and masking", "", blocks, "No attempt has ended in any of them."
    )


def _staleness(runs: Sequence[RunData]) -> tuple[list[Key], list[StackedRow]]:
    most = max((max(run.staleness, default=0) for run in runs), default=0)
    shown = range(min(most, len(SERIES) - 1) + 1)
    keys = [Key(f"{k}" + ("+" if k == len(SERIES) - 1 else ""), SERIES[k]) for k in shown]
    rows = []
    for run in runs:
        counts = Counter(dict.fromkeys(shown, 0))
        for versions, num in run.staleness.items():
            counts[min(versions, shown[-1])] += num
        rows.append(StackedRow(run.name, [float(counts[k]) for k in shown], f"{counts.total():,}"))
    return keys, rows


def _values(run: RunData, scalar: str) -> list[float]:
    return [y for _, y in steps.curve(run.rl, scalar)]


def _sum(run: RunData, scalar: str) -> float | None:
    values = _values(run, scalar)
    return sum(values) if values else None


def _mean(run: RunData, scalar: str) -> float | None:
    values = _values(run, scalar)
    return sum(values) / len(values) if values else None


def _least(run: RunData, scalar: str) -> float | None:
    return min(_values(run, scalar), default=None)


def _last_quarter(run: RunData, scalar: str) -> float | None:
    values = _values(run, scalar)
    last = values[-max(1, len(values) // 4) :]
    return sum(last) / len(last) if last else None


def _failed_share(run: RunData) -> float | None:
    ends = failures.try_ends(run.attempts)
    failed = sum(failures.kind_of(end.cause) != "scored" for end in ends)
    return 100.0 * failed / len(ends) if ends else None


def _trained_share(run: RunData) -> float | None:
    share = masking.trained_share(run.attempts)
    return None if share is None else 100.0 * share
