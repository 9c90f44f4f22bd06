"""Is it learning? pass@1 by stage and by step, and the curves of RL."""

from __future__ import annotations

from collections.abc import Sequence

from launch.report.blocks import Figure, Section, Table
from launch.report.charts import Axes, Interval, Line, Mark, intervals, line_chart
from launch.report.data import EvaluationRow, RunData
from launch.report.steps import curve, resumed_after, thinned
from launch.report.svg import number

RESUME_NOTE = "Dashed lines: the run was resumed after that step."


def resume_marks(data: RunData) -> list[Mark]:
    """A mark between the last step before a resume and the first after it."""
    return [
        Mark(step + 0.5, f"resumed after step {step}")
        for step in resumed_after(data.rl, data.resumed_at_steps)
    ]


def step_figure(
    data: RunData,
    name: str,
    title: str,
    caption: str,
    scalars: Sequence[tuple[str, str]],
    y: str,
    *,
    y_range: tuple[float | None, float | None] = (0.0, None),
    may_log: bool = False,
) -> Figure:
    """Scalars of RL steps; scalars holds (name in rl.jsonl, label)."""
    colors = ("blue", "amber", "green", "magenta")
    lines = [
        Line(label, color, thinned(curve(data.rl, scalar)))
        for (scalar, label), color in zip(scalars, colors, strict=False)
    ]
    axes = Axes("RL step", y, y_range, integer_x=True, may_log=may_log, tip_x="step")
    plot = line_chart(title, lines, axes, marks=resume_marks(data))
    return Figure(name, title, caption, plot)


def evaluation_table(rows: Sequence[EvaluationRow]) -> Table:
    """pass@1 of each stage."""
    return Table(
        "pass-table",
        "pass@1 on held-out tasks",
        "Mean over tasks of the mean reward, with 95 % intervals over tasks. A gain is the paired "
        "difference to the stage before at the same sampling.",
        ("stage", "sampling", "weight_version", "pass@1", "gain", "tasks", "attempts", "causes"),
        [
            (
                row.stage,
                row.sampling,
                str(row.weight_version),
                row.interval.percent() if row.interval else "not scored",
                row.gain.percent() if row.gain else "",
                str(row.interval.num_tasks if row.interval else 0),
                f"{row.num_attempts:,}",
                ", ".join(f"{cause} {count}" for cause, count in row.causes.items()),
            )
            for row in rows
        ],
        numeric=(2, 5, 6),
    )


def pass_figure(rows: Sequence[EvaluationRow]) -> Figure:
    """pass@1 by stage with intervals."""
    values = [
        Interval(
            row.stage,
            row.sampling,
            *(100 * v for v in (row.interval.mean, row.interval.low, row.interval.high)),
        )
        for row in rows
        if row.interval
    ]
    return Figure(
        "pass-by-stage",
        "pass@1 by stage",
        "Points with 95 % intervals over held-out tasks. Whether a gain is real is told by the "
        "paired interval in the table, not by two intervals that overlap.",
        intervals("pass@1 by stage", values, "% of tasks solved"),
    )


def dev_figure(data: RunData) -> Figure:
    """pass@1 on the dev pool by RL step."""
    samplings = list(dict.fromkeys(point.sampling for point in data.dev_points))
    lines = []
    for sampling, color in zip(samplings, ("blue", "amber", "green"), strict=False):
        mine = [p for p in data.dev_points if p.sampling == sampling]
        lines.append(
            Line(
                f"dev, {sampling}",
                color,
                [(p.step, 100 * p.interval.mean) for p in mine],
                [(p.step, 100 * p.interval.low, 100 * p.interval.high) for p in mine],
            )
        )
    best = data.best
    marks = [Mark(best["step"], f"best: step {best['step']}")] if "step" in best else []
    kept = ""
    if marks:
        score = f", pass@1 {100 * best['pass_at_1']:.1f} %" if "pass_at_1" in best else ""
        kept = f" The dashed line is the checkpoint that was kept: step {best['step']}{score}."
    axes = Axes("RL step", "% of dev tasks solved", integer_x=True, tip_x="step")
    return Figure(
        "pass-by-step",
        "pass@1 on the dev pool during RL",
        "Evaluations pinned to one version, with 95 % intervals over tasks. The best step is "
        "chosen here, so its own figure is too high: judge it on the held-out tasks." + kept,
        line_chart("pass@1 on dev by step", lines, axes, marks=marks),
    )


def section(data: RunData) -> Section:
    """The section."""
    supervised = [
        Figure(
            f"loss-{stage}",
            f"Loss: {stage}",
            "Mean over trained tokens. It should fall and level off.",
            line_chart(
                f"loss of {stage}",
                [Line("", "blue", thinned(curve(data.steps.get(stage, []), "loss")))],
                Axes("step", "nats a token", integer_x=True),
            ),
        )
        for stage in ("pretrain", "sft")
    ]
    blocks: list[Figure | Table] = [
        evaluation_table(data.evaluations),
        pass_figure(data.evaluations),
        dev_figure(data),
        step_figure(
            data, "reward", "Reward",
            "Mean over the valid members of the step's groups, before zero-variance groups are "
            "taken out by the trainer. It rises if RL works; it lags dev pass@1, as tasks differ.",
            [("reward_mean", "mean"), ("reward_std", "standard deviation")], "reward", y_range=(0.0, 1.0),
        ),
        step_figure(
            data, "length", "Length",
            "Trained tokens of a trajectory. Growth without reward is padding; a fall to nothing "
            "is collapse.",
            [("trained_tokens_per_trajectory_mean", "")], "tokens a trajectory",
        ),
        step_figure(
            data, "entropy", "Entropy",
            "Of the policy over trained tokens, at their sampling temperature. A fast fall to 0 "
            "leaves groups without variance, so nothing to learn from.",
            [("entropy_mean_nats", "")], "nats a token",
        ),
        step_figure(
            data, "grad-norm", "Gradient norm",
            "Before clipping. Spikes point to a few extreme weights or a broken batch.",
            [("grad_norm", "")], "L2 norm", may_log=True,
        ),
        step_figure(
            data, "rl-loss", "RL objective",
            "The surrogate's value. It is not a measure of progress: only its jumps matter.",
            [("loss", "")], "loss", y_range=(None, None),
        ),
        step_figure(
            data, "groups", "What a step trains",
            "Trajectories in the loss, and groups that were dropped at the trainer.",
            [("num_trajectories", "trajectories trained"), ("num_groups_dropped", "groups dropped")],
            "count",
        ),
        *supervised,
        guard_table(data),
    ]  # fmt: skip
    return Section(
        "learning",
        "Is it learning?",
        RESUME_NOTE if resume_marks(data) else "",
        blocks,
        "No step and no evaluation has ended yet.",
    )


def guard_table(data: RunData) -> Table:
    """Steps at which a guard saw a figure leave its band."""
    rows = []
    for row in data.rl:
        left = [key for key, value in row.items() if key.startswith("guard_") and value]
        if left:
            names = ", ".join(
                f"{key.removeprefix('guard_').removeprefix('left_')} {number(row[key])}"
                for key in left
            )
            rows.append((str(row["step"]), names))
    return Table(
        "guards",
        "Guards",
        "Steps whose figures left the band that the recipe sets, and which.",
        ("step", "guard and count"),
        rows[-30:],
        numeric=(0,),
        wide=False,
    )
