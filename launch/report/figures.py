"""Draws the report's figures as SVG text with matplotlib (no display, no JavaScript).

Owner: `launch/report`. Each function takes plain tables of `data` and returns SVG, or an
empty string when there is nothing to draw.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from launch.report.data import EvaluationRow, Row, RunData

_INK, _ACCENT, _MUTED = "#1f2933", "#2563eb", "#9aa5b1"
_PARTS = (
    ("wait", "#9aa5b1"),
    ("fetch", "#cbd2d9"),
    ("logprob", "#f59e0b"),
    ("update", "#2563eb"),
    ("publish", "#10b981"),
    ("other", "#e4e7eb"),
)


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _axes(
    title: str, x: str, y: str, width: float = 5.2, height: float = 2.7
) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, fontsize=10, loc="left", color=_INK)
    axes.set_xlabel(x, fontsize=8)
    axes.set_ylabel(y, fontsize=8)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e4e7eb", linewidth=0.6)
    axes.set_axisbelow(True)
    return figure, axes


def pass_at_1_by_stage(rows: Sequence[EvaluationRow]) -> str:
    """Bars with 95 % intervals, one group a sampling."""
    shown = [row for row in rows if row.interval is not None]
    if not shown:
        return ""
    figure, axes = _axes("pass@1 on held-out tasks", "", "%")
    samplings = sorted({row.sampling for row in shown})
    stages = list(dict.fromkeys(row.stage for row in shown))
    width = 0.8 / len(samplings)
    for k, sampling in enumerate(samplings):
        mine = [row for row in shown if row.sampling == sampling]
        xs = [stages.index(row.stage) + (k - (len(samplings) - 1) / 2) * width for row in mine]
        intervals = [row.interval for row in mine if row.interval is not None]
        means = [100 * i.mean for i in intervals]
        errors = [
            [max(0.0, 100 * (i.mean - i.low)) for i in intervals],
            [max(0.0, 100 * (i.high - i.mean)) for i in intervals],
        ]
        axes.bar(xs, means, width * 0.9, yerr=errors, capsize=3, label=sampling)
    axes.set_xticks(range(len(stages)), stages)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8, frameon=False)
    return _svg(figure)


def curve(
    steps: Sequence[Row], names: Mapping[str, str], title: str, y: str, resumed: Sequence[int]
) -> str:
    """Lines over optimizer steps; `names` maps a scalar's name to its label."""
    figure, axes = _axes(title, "step", y)
    drawn = False
    for name, label in names.items():
        points = [(row["step"], row[name]) for row in steps if row.get(name) is not None]
        if points:
            axes.plot(
                *zip(*points, strict=True), label=label, linewidth=1.4, marker=".", markersize=4
            )
            drawn = True
    for step in resumed:
        axes.axvline(step, color=_MUTED, linestyle=":", linewidth=1)
    if not drawn:
        return ""
    if len(names) > 1:
        axes.legend(fontsize=8, frameon=False)
    return _svg(figure)


def step_breakdown(steps: Sequence[Row]) -> str:
    """Stacked seconds of each step."""
    if not steps:
        return ""
    figure, axes = _axes("Where a step's time goes", "step", "s")
    xs = [row["step"] for row in steps]
    bottom = [0.0] * len(xs)
    for part, colour in _PARTS:
        heights = [float(row.get(f"time_{part}_s", 0.0)) for row in steps]
        if any(heights):
            axes.bar(xs, heights, 0.85, bottom=bottom, color=colour, label=part)
            bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    axes.legend(fontsize=8, frameon=False, ncols=3)
    return _svg(figure)


def bars(counts: Mapping[Any, float], title: str, x: str, y: str) -> str:
    """One bar an entry, in the given order."""
    if not counts:
        return ""
    figure, axes = _axes(title, x, y)
    axes.bar(range(len(counts)), list(counts.values()), 0.7, color=_ACCENT)
    labels = [str(key) for key in counts]
    turned = max(map(len, labels)) > 8
    axes.set_xticks(
        range(len(labels)), labels, rotation=30 if turned else 0, ha="right" if turned else "center"
    )
    return _svg(figure)


def histogram(values: Sequence[float], title: str, x: str, y: str = "trajectories") -> str:
    """Twenty-five equal bins."""
    if not values:
        return ""
    figure, axes = _axes(title, x, y)
    axes.hist(values, bins=25, color=_ACCENT)
    return _svg(figure)


def over_time(
    status: Sequence[Row], read: Callable[[Row], Mapping[str, float]], title: str, y: str
) -> str:
    """Lines over seconds since the first sample; `read` gives the values of one sample."""
    if not status:
        return ""
    start = status[0]["time_s"]
    lines: dict[str, list[tuple[float, float]]] = {}
    for sample in status:
        for label, value in read(sample).items():
            lines.setdefault(label, []).append((sample["time_s"] - start, value))
    if not lines:
        return ""
    figure, axes = _axes(title, "s since start", y)
    for label, points in lines.items():
        axes.plot(*zip(*points, strict=True), label=label, linewidth=1.1)
    axes.legend(fontsize=8, frameon=False)
    return _svg(figure)


def all_figures(data: RunData) -> dict[str, list[str]]:
    """Section title -> figures."""
    rl, resumed = data.steps.get("rl", []), data.resumed_at_steps
    supervised = [
        curve(data.steps.get(stage, []), {"loss": "loss"}, f"{stage}: loss", "nats", [])
        for stage in ("pretrain", "sft")
    ]
    learning = [
        curve(rl, {"reward_mean": "reward"}, "Mean reward of consumed trajectories", "", resumed),
        curve(rl, {"grad_norm": "grad_norm"}, "Gradient norm before clipping", "", resumed),
        curve(rl, {"entropy_mean_nats": "entropy"}, "Entropy of the policy", "nats", resumed),
        curve(
            rl,
            {"trained_tokens_per_trajectory_mean": "trained"},
            "Trained tokens a trajectory",
            "tokens",
            resumed,
        ),
    ]
    trust = [
        curve(
            rl,
            {"gap_engine_mean_nats": "engine only", "gap_total_mean_nats": "total"},
            "Log-prob gap, mean |trainer - rollout|",
            "nats",
            resumed,
        ),
        curve(
            rl,
            {
                "ess_token_raw_rollout_to_trainer": "token",
                "ess_sequence_raw_rollout_to_trainer": "sequence",
            },
            "ESS of the importance weights (raw)",
            "",
            resumed,
        ),
        bars(
            dict(sorted(data.staleness.items())),
            "Staleness of consumed trajectories",
            "versions",
            "trajectories",
        ),
        curve(
            rl,
            {"tis_capped_fraction": "weight capped"},
            "Capped importance weights",
            "fraction",
            resumed,
        ),
    ]
    time_parts = _mean_time_parts(data.attempts)
    speed = [
        step_breakdown(rl),
        bars(time_parts, "Where a trajectory's time goes (mean)", "", "s"),
        histogram([a["duration_s"] for a in data.attempts], "Duration of training attempts", "s"),
        over_time(
            data.status,
            lambda s: {
                "attempts running": s["num_attempts_running"],
                "groups ready": s["num_groups_ready"],
                "groups open": s["num_groups_open"],
            },
            "In flight",
            "",
        ),
        over_time(
            data.status,
            lambda s: {e["name"]: 100 * e["kv_usage"] for e in s["engines"]},
            "KV use of each engine",
            "%",
        ),
    ]
    sections = {
        "Supervised stages": supervised,
        "Learning": learning,
        "Trust": trust,
        "Time": speed,
        "Causes": [
            bars(dict(data.causes.most_common()), "Causes of training attempts", "", "attempts")
        ],
    }
    return {title: [svg for svg in drawn if svg] for title, drawn in sections.items()}


def _mean_time_parts(attempts: Sequence[Row]) -> dict[str, float]:
    parts = ("environment", "model", "tool", "verifier", "overhead")
    if not attempts:
        return {}
    return {
        p: sum(float(a.get(f"{p}_time_s", 0.0)) for a in attempts) / len(attempts) for p in parts
    }
