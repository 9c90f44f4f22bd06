"""What failed, and why? Causes, evidence, dropped groups, and whom masking leaves out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from launch.report import failures, masking, timeline
from launch.report.blocks import Figure, Section, Table
from launch.report.charts import WHOLE, Key, StackedRow, stacked_columns, stacked_rows
from launch.report.data import Row, RunData
from launch.report.sections.over_time import TimeAxis
from launch.report.svg import number

_CAUSE_COLORS = {
    "submitted": "pale",
    "turn_cap": "blue",
    "token_cap": "cyan",
    "time_budget": "violet",
    "loop": "olive",
    "agent_oom": "green",
    "tests_hung": "slate",
    "tests_oom": "brown",
    "sandbox_failed": "red",
    "engine_failed": "amber",
    "harness_failed": "magenta",
    "verifier_failed": "pink",
    "interrupted": "slate",
    "unclassified": "ink",
}
KIND_COLORS = {
    "scored": "pale", "infrastructure": "red", "ours": "amber", "unclassified": "ink",
}  # fmt: skip
FATE_COLORS = {
    masking.TRAINED: "blue",
    masking.PENDING: "pale",
    masking.ZERO_VARIANCE: "slate",
    masking.TOO_FEW: "olive",
    masking.STALE: "amber",
    masking.OVERLONG: "pink",
    "rejected or empty": "violet",
    "infrastructure": "red",
    "ours": "cyan",
    "unclassified": "ink",
}
_NUM_TASKS = 15
_NUM_EVIDENCE = 12
_NUM_BINS = 80


def cause_keys(causes: Sequence[str]) -> list[Key]:
    """Legend of causes, the policy's own first."""
    order = [*failures.SCORED, *failures.INFRASTRUCTURE, *failures.OURS]
    ranked = sorted(causes, key=lambda c: order.index(c) if c in order else len(order))
    return [Key(cause, _CAUSE_COLORS.get(cause, "slate")) for cause in ranked]


def causes_by_task(attempts: Sequence[Row]) -> Figure:
    """Causes of every try: all tasks, then those with most that was not submitted."""
    shown: dict[str, Counter[str]] = failures.causes_by_task(attempts, _NUM_TASKS)
    if attempts:
        everything = Counter(end.cause for end in failures.try_ends(attempts))
        shown = {"all tasks": everything, **shown}
    keys = cause_keys(sorted({cause for causes in shown.values() for cause in causes}))
    rows = [
        StackedRow(task, [float(causes[key.label]) for key in keys], _cause_note(causes))
        for task, causes in shown.items()
    ]
    return Figure(
        "causes-by-task",
        "Causes by task",
        "Share of tries by cause, tries that were started again included: first all tasks, then "
        "those with most failures of the infrastructure, then most caps.",
        stacked_rows("causes by task", keys, rows, "tries", width=WHOLE, as_share=True),
        wide=True,
    )


def _cause_note(causes: Counter[str]) -> str:
    failed = sum(n for cause, n in causes.items() if failures.kind_of(cause) != "scored")
    return f"{causes.total():,} tries" + (f", {failed:,} failed" if failed else "")


def cause_table(attempts: Sequence[Row]) -> Table:
    """Counts of each cause, final and tried again."""
    ends = failures.try_ends(attempts)
    final = Counter(end.cause for end in ends if end.is_last)
    again = Counter(end.cause for end in ends if not end.is_last)
    keys = cause_keys(sorted({end.cause for end in ends}))
    rows = [
        (
            key.label,
            failures.kind_of(key.label),
            f"{final[key.label]:,}",
            f"{100 * final[key.label] / max(final.total(), 1):.1f} %",
            f"{again[key.label]:,}",
        )
        for key in keys
    ]
    return Table(
        "causes", "Causes of training attempts", "",
        ("cause", "kind", "attempts", "share", "tries started again"), rows,
        numeric=(2, 3, 4), wide=False,
    )  # fmt: skip


def over_time(data: RunData) -> Figure:
    """Ends of tries by kind over the run, with outages shaded."""
    axis = TimeAxis(data)
    ends = [e for e in failures.try_ends(data.attempts) if e.ended_at_s] if data.status else []
    width = axis.x_range[1] / _NUM_BINS
    parts = []
    for kind in failures.KINDS:
        times = [axis.at(e.ended_at_s) for e in ends if failures.kind_of(e.cause) == kind]
        counts = timeline.binned(times, axis.x_range[1], _NUM_BINS)
        parts.append((Key(kind, KIND_COLORS[kind]), [float(n) for n in counts]))
    return Figure(
        "ends-over-time",
        "Tries that ended, over time",
        "By who is answerable. Red shading: a breaker is open or the run is paused. A burst of one "
        "colour is an outage; a constant share is a defect of some tasks.",
        stacked_columns(
            "ends of tries over time",
            [(i + 0.5) * width for i in range(_NUM_BINS)],
            parts,
            axis.axes("tries"),
            column_width=width,
            marks=axis.marks,
            strip=axis.strip,
            shaded=axis.outages,
        ),
        wide=True,
    )


def evidence_table(attempts: Sequence[Row]) -> Table:
    """The most frequent evidence of failures."""
    return Table(
        "evidence",
        "Evidence",
        "Failures that are not the policy's doing, alike but for numbers and ids, most frequent first. "
        "The attempt names a file in trajectories/ and lines in logs/.",
        ("cause", "tries", "started again", "evidence", "for example"),
        [
            (row.cause, f"{row.num:,}", f"{row.num_tried_again:,}", row.text, row.attempt_id)
            for row in failures.evidence(attempts, _NUM_EVIDENCE)
        ],
        numeric=(1, 2),
    )


def outage_table(data: RunData) -> Table:
    """Breakers and pauses with their times."""
    clock = timeline.RunClock(data.status)
    return Table(
        "outages",
        "Outages, and pauses of the rollouts",
        "While a breaker is open nothing that needs its backend starts, and no retry is spent.",
        ("what", "from, s of the run", "for, s"),
        [
            (o.label, f"{o.begin_s:.0f}", f"{o.end_s - o.begin_s:.0f}")
            for o in timeline.outages(data.status, clock)
        ],
        numeric=(1, 2),
        wide=False,
    )


def dropped_table(data: RunData) -> Table:
    """Groups by what became of them."""
    groups: dict[str, str] = {}
    for attempt in data.attempts:
        if attempt.get("group_id") and attempt.get("group_state"):
            reason = attempt.get("group_reason")
            state = attempt["group_state"]
            groups[attempt["group_id"]] = f"{state}: {reason}" if reason else state
    counts = Counter(groups.values())
    return Table(
        "groups-ended", "Groups", "",
        ("state", "groups", "share"),
        [
            (name, f"{num:,}", f"{100 * num / counts.total():.1f} %")
            for name, num in counts.most_common()
        ],
        numeric=(1, 2), wide=False,
    )  # fmt: skip


def fate_figures(attempts: Sequence[Row]) -> list[Figure]:
    """Shares trained, masked and dropped, of trajectories and of tokens, by outcome and length."""
    keys = [Key(name, FATE_COLORS[name]) for name in masking.FATES]
    figures = []
    for by, rows in (
        ("outcome", masking.by_outcome(attempts)),
        ("length", masking.by_length(attempts)),
    ):
        for unit in ("trajectories", "tokens"):
            drawn = [
                StackedRow(
                    row.bucket + (" tokens" if by == "length" else ""),
                    [float(getattr(row, unit).get(name, 0)) for name in masking.FATES],
                    f"{sum(getattr(row, unit).values()):,}",
                )
                for row in rows
            ]
            caption = (
                "Each row is a reward; "
                if by == "outcome"
                else "Each row is a fifth of the attempts, from the shortest to the longest; "
            )
            counted = (
                "at the right its attempts." if unit == "trajectories"
                else "at the right its tokens that a loss could have covered."
            )  # fmt: skip
            figures.append(
                Figure(
                    f"fate-{by}-{unit}",
                    f"Masking by {by}: {unit}",
                    caption + counted + " Rows that differ in blue are a bias.",
                    stacked_rows(f"{unit} by {by}", keys, drawn, unit, as_share=True),
                )
            )
    return figures


def bias_table(attempts: Sequence[Row]) -> Table:
    """What is trained beside what was scored, in two means."""
    rows = []
    for field, label in (("reward", "reward"), ("num_tokens", "tokens")):
        found = masking.bias(attempts, field)
        if found is not None:
            ratio = f"{found.trained / found.scored:.2f}" if found.scored else ""
            rows.append((label, number(found.scored), number(found.trained), ratio))
    return Table(
        "bias",
        "Masking bias",
        "Means over scored trajectories that were decided on, and over those of them that were trained. "
        "A ratio far from 1 is a bias; dropping zero-variance groups moves the reward by design.",
        ("mean", "scored", "trained", "ratio"),
        rows,
        numeric=(1, 2, 3),
        wide=False,
    )


def section(data: RunData) -> Section:
    """The section."""
    blocks: list[Figure | Table] = [
        cause_table(data.attempts),
        dropped_table(data),
        outage_table(data),
        bias_table(data.attempts),
        over_time(data),
        evidence_table(data.attempts),
        causes_by_task(data.attempts),
        *fate_figures(data.attempts),
    ]
    return Section(
        "failing", "What failed, and why?", "", blocks,
        "No training attempt has ended yet.",
    )  # fmt: skip
