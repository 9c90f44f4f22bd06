"""The run over time: engine tokens, KV use, what is in flight; one time axis for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from launch.report import steps, timeline
from launch.report.blocks import Figure
from launch.report.charts import WHOLE, Axes, Line, Mark, Span, line_chart
from launch.report.data import Row, RunData
from launch.report.svg import SERIES, number

_MAX_SHADED_STEPS = 200
_BUSY = ("logprob", "update", "publish")
_MINUTE, _HOUR = 60.0, 3600.0


class TimeAxis:
    """The run's clock with its unit, stages, cuts and outages as a chart wants them."""

    def __init__(self, data: RunData) -> None:
        self.clock = timeline.RunClock(data.status)
        end = self.clock.end_s
        self.unit_s, self.unit = (
            (1.0, "s")
            if end < 3 * _MINUTE
            else (_MINUTE, "min")
            if end < 3 * _HOUR
            else (_HOUR, "h")
        )
        self.x_range = (0.0, max(end, 1.0) / self.unit_s)
        self.strip = self._spans(timeline.stages(data.status, self.clock), "pale")
        self.outages = self._spans(timeline.outages(data.status, self.clock), "red")
        self.marks = [
            Mark(cut.at_s / self.unit_s, f"no samples for {number(cut.length_s)} s")
            for cut in self.clock.cuts
        ]
        self.busy = self._busy(data.rl)

    def _spans(self, found: Sequence[timeline.Interval], color: str) -> list[Span]:
        return [Span(i.begin_s / self.unit_s, i.end_s / self.unit_s, i.label, color) for i in found]

    def _busy(self, rl: Sequence[Row]) -> list[Span]:
        if len(rl) > _MAX_SHADED_STEPS:
            return []
        return [
            Span(self.at(began), self.at(ended), f"step {row['step']}: {part}", "amber")
            for row in rl
            for part, began, ended in row.get("spans", ())
            if part in _BUSY
        ]

    def at(self, unix_s: float) -> float:
        """A moment in the axis' unit."""
        return self.clock(unix_s) / self.unit_s

    def axes(self, y: str, y_range: tuple[float | None, float | None] = (0.0, None)) -> Axes:
        """Axes of a figure over the whole run."""
        return Axes(
            f"{self.unit} of the run", y, y_range, self.x_range, width=WHOLE, tip_x=self.unit
        )

    def lines(
        self, series: Mapping[str, Sequence[tuple[float, float]]], dashed: str = ""
    ) -> list[Line]:
        """Lines of named series in run seconds; those whose name ends with `dashed` are dashed."""
        lines: list[Line] = []
        names = list(dict.fromkeys(name.removesuffix(dashed) for name in series))
        for name, points in series.items():
            color = SERIES[names.index(name.removesuffix(dashed)) % len(SERIES)]
            scaled = [(x / self.unit_s, y) for x, y in steps.thinned(points)]
            lines.append(Line(name, color, scaled, dashed=bool(dashed) and name.endswith(dashed)))
        return lines


def tokens_over_time(data: RunData, axis: TimeAxis) -> Figure:
    """Sampled tokens a second of each engine."""
    totals = timeline.series(data.status, axis.clock, _generated_tokens)
    lines = axis.lines({name: timeline.rates(points) for name, points in totals.items()})
    return Figure(
        "tokens-over-time",
        "Engine tokens/s over time",
        "Each engine's own counter. Amber: the trainer computes or publishes; red: a breaker is open "
        "or the run is paused. Dips under amber mean that the two do not overlap.",
        line_chart(
            "engine tokens a second", lines, axis.axes("sampled tokens/s"),
            marks=axis.marks, strip=axis.strip, shaded=[*axis.busy, *axis.outages],
        ),
        wide=True,
    )  # fmt: skip


def kv_over_time(data: RunData, axis: TimeAxis) -> Figure:
    """KV use of each engine: what it reports, and what the scheduler has promised."""
    series = timeline.series(data.status, axis.clock, _kv_use)
    return Figure(
        "kv-over-time",
        "KV use of each engine",
        "Share of the token budget: full lines are the engine's own figure, dashed ones what the "
        "scheduler reserved. Reserved near 100 % with calls waiting: KV limits. Low: it does not.",
        line_chart(
            "KV use", axis.lines(series, " reserved"), axis.axes("% of the token budget"),
            marks=axis.marks, strip=axis.strip, shaded=axis.outages,
        ),
        wide=True,
    )  # fmt: skip


def in_flight(data: RunData, axis: TimeAxis) -> Figure:
    """Attempts and groups under way."""
    names = {
        "attempts running": "num_attempts_running",
        "attempts queued": "num_attempts_queued",
        "model calls queued": "num_turns_queued",
        "groups open": "num_groups_open",
        "groups ready": "num_groups_ready",
    }
    series = timeline.series(
        data.status,
        axis.clock,
        lambda s: {n: float(s[key]) for n, key in names.items() if key in s},
    )
    return Figure(
        "in-flight",
        "In flight",
        "Groups ready that grow: the trainer limits. None ready while it waits: rollouts do. "
        "Running attempts below the slots with none queued: the staleness gate holds them.",
        line_chart(
            "in flight", axis.lines(series), axis.axes("count"),
            marks=axis.marks, strip=axis.strip, shaded=axis.outages,
        ),
        wide=True,
    )  # fmt: skip


def _generated_tokens(sample: Row) -> dict[str, float]:
    return {e["name"]: float(e.get("num_generated_tokens", 0)) for e in sample.get("engines", ())}


def _kv_use(sample: Row) -> dict[str, float]:
    use = {}
    for engine in sample.get("engines", ()):
        use[engine["name"]] = 100.0 * float(engine.get("kv_usage", 0.0))
        budget = float(engine.get("token_budget", 0))
        if budget:
            reserved = float(engine.get("tokens_reserved", 0))
            use[f"{engine['name']} reserved"] = 100.0 * reserved / budget
    return use
