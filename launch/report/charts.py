"""The kinds of charts: lines, stacked columns, stacked rows, intervals, ranges.

Owner: `launch/report`. Each takes plain values and returns a Plot, or None where there is
nothing to draw. Bars start at zero; a line's axis starts at zero too unless it is told a range.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launch.report.svg import (
    CHAR_WIDTH,
    Canvas,
    Scale,
    clip,
    extent,
    log_ticks,
    nice_ticks,
    number,
)

HALF, WHOLE = 556.0, 1140.0
"""Widths of a figure that shares its row, and of one that does not."""
_HEIGHT = 236.0
_TOP, _BOTTOM, _RIGHT = 10.0, 38.0, 14.0
_STRIP = 16.0
_FEW_POINTS = 40
_LOG_ABOVE = 50.0
_WIDE_LEFT = 68.0
_MAX_COLUMN = 90.0
_NOTE_CHARS = 60


@dataclass(frozen=True)
class Key:
    """One entry of a legend."""

    label: str
    color: str
    dashed: bool = False


@dataclass(frozen=True)
class Plot:
    """A drawn chart with its legend."""

    svg: str
    keys: Sequence[Key] = ()


@dataclass(frozen=True)
class Line:
    """A line; `band` holds (x, low, high) around it."""

    label: str
    color: str
    points: Sequence[tuple[float, float]]
    band: Sequence[tuple[float, float, float]] = ()
    dashed: bool = False
    is_dots: bool = False
    """Drawn as intervals at its points, not joined."""


@dataclass(frozen=True)
class Mark:
    """A vertical line at x."""

    x: float
    label: str


@dataclass(frozen=True)
class Span:
    """[begin, end] on the x axis: a stage (in a strip above), or a shaded interval."""

    begin: float
    end: float
    label: str
    color: str = "pale"


@dataclass(frozen=True)
class Axes:
    """How the axes of a chart read. `y_range` fixes the y axis; a None end is the data's."""

    x: str
    y: str
    y_range: tuple[float | None, float | None] = (0.0, None)
    x_range: tuple[float, float] | None = None
    integer_x: bool = False
    may_log: bool = False
    width: float = HALF
    tip_x: str = ""
    """What x is called in tips: `step`."""


class _Frame:
    """Axes, grid and labels of a chart with a numeric x and y."""

    def __init__(
        self,
        axes: Axes,
        label: str,
        xs: tuple[float, float],
        ys: tuple[float, float],
        strip: bool = False,
        log: bool = False,
    ) -> None:
        self.canvas = Canvas(axes.width, _HEIGHT + (_STRIP if strip else 0.0), label)
        ticks = log_ticks(*ys) if log else nice_ticks(*ys)
        if not log and axes.y_range[1] is not None:
            ticks = [t for t in ticks if t <= axes.y_range[1] + 1e-12]
        names = [number(t) for t in ticks]
        # Wide figures share a left edge, so that moments stand above each other.
        least = _WIDE_LEFT if axes.width > HALF else 0.0
        left = max(least, 30.0 + CHAR_WIDTH * max(map(len, names)))
        self.top = _TOP + (_STRIP if strip else 0.0)
        self.bottom = self.canvas.height - _BOTTOM
        self.x = Scale(*xs, left, axes.width - _RIGHT)
        self.y = Scale(ticks[0], ticks[-1], self.bottom, self.top, log)
        for tick, name in zip(ticks, names, strict=True):
            y = self.y(tick)
            self.canvas.line(left, y, axes.width - _RIGHT, y, "zero" if tick == 0 else "grid")
            self.canvas.text(left - 6, y + 4, name, "end")
        self.canvas.line(left, self.bottom, axes.width - _RIGHT, self.bottom, "axis")
        middle = (self.top + self.bottom) / 2
        self.canvas.text(-middle, 12, axes.y + (" (log)" if log else ""), "middle name turned")
        self.canvas.text(
            (left + axes.width - _RIGHT) / 2, self.canvas.height - 5, axes.x, "middle name"
        )

    def x_ticks(self, integer: bool) -> None:
        """Ticks of a numeric x axis, those inside it."""
        about = 8 if self.canvas.width > HALF else 5
        for tick in nice_ticks(self.x.low, self.x.high, about, integer):
            if self.x.low - 1e-9 <= tick <= self.x.high + 1e-9:
                x = self.x(tick)
                self.canvas.line(x, self.bottom, x, self.bottom + 4, "axis")
                self.canvas.text(x, self.bottom + 16, number(tick), "middle")

    def spans(self, strip: Sequence[Span], shaded: Sequence[Span]) -> None:
        """Stages above the plot, shaded intervals behind it."""
        for span in shaded:
            x0, x1 = self.x(max(span.begin, self.x.low)), self.x(min(span.end, self.x.high))
            if x1 >= x0:
                width = max(x1 - x0, 1.0)
                height = self.bottom - self.top
                self.canvas.rect(x0, self.top, width, height, f"shade f-{span.color}", span.label)
        for index, span in enumerate(strip):
            x0, x1 = self.x(max(span.begin, self.x.low)), self.x(min(span.end, self.x.high))
            if x1 <= x0:
                continue
            self.canvas.rect(x0, 4, x1 - x0, _STRIP - 2, f"stage{index % 2}", span.label)
            if len(span.label) * CHAR_WIDTH + 6 <= x1 - x0:
                self.canvas.text((x0 + x1) / 2, _STRIP - 2, span.label, "middle small")

    def marks(self, marks: Sequence[Mark]) -> None:
        """Dashed vertical lines, the label beside the first where there is room."""
        for mark in marks:
            if self.x.low <= mark.x <= self.x.high:
                x = self.x(mark.x)
                self.canvas.line(x, self.top, x, self.bottom, "mark")
                self.canvas.rect(x - 4, self.top, 8, self.bottom - self.top, "hit", mark.label)


def line_chart(
    label: str,
    lines: Sequence[Line],
    axes: Axes,
    *,
    marks: Sequence[Mark] = (),
    strip: Sequence[Span] = (),
    shaded: Sequence[Span] = (),
) -> Plot | None:
    """Lines over a numeric x. A log axis where allowed and values differ more than 50-fold."""
    lines = [line for line in lines if line.points]
    if not lines:
        return None
    values = [y for line in lines for _, y in line.points]
    values += [y for line in lines for _, low, high in line.band for y in (low, high)]
    log = axes.may_log and min(values) > 0 and max(values) > _LOG_ABOVE * min(values)
    ys, xs = extent(values), extent(x for line in lines for x, _ in line.points)
    if ys is None or xs is None:
        return None
    frame = _Frame(
        axes, label, _padded(axes.x_range or xs), _bounds(ys, axes, log), bool(strip), log
    )
    frame.spans(strip, shaded)
    frame.x_ticks(axes.integer_x)
    frame.marks(marks)
    for line in lines:
        _draw_line(frame, line)
    frame.canvas.tips = _tips(frame, lines, axes)
    keys = [Key(line.label, line.color, line.dashed) for line in lines if line.label]
    return Plot(frame.canvas.svg(), keys if len(lines) > 1 else ())


def _padded(xs: tuple[float, float]) -> tuple[float, float]:
    return xs if xs[1] > xs[0] else (xs[0] - 1.0, xs[1] + 1.0)


def _bounds(ys: tuple[float, float], axes: Axes, log: bool) -> tuple[float, float]:
    if log:
        return ys
    low = ys[0] if axes.y_range[0] is None else min(axes.y_range[0], ys[0])
    high = ys[1] if axes.y_range[1] is None else max(axes.y_range[1], ys[1])
    return (low, high) if high > low else (low, low + 1.0)


def _draw_line(frame: _Frame, line: Line) -> None:
    place = [(frame.x(x), frame.y(y)) for x, y in line.points]
    if line.band and not line.is_dots:
        upper = [(frame.x(x), frame.y(high)) for x, _, high in line.band]
        lower = [(frame.x(x), frame.y(low)) for x, low, _ in reversed(line.band)]
        frame.canvas.path(upper + lower, f"band f-{line.color}", closed=True)
    if line.is_dots:
        for x, low, high in line.band:
            frame.canvas.line(
                frame.x(x), frame.y(low), frame.x(x), frame.y(high), f"bar s-{line.color}"
            )
    else:
        dashed = " dashed" if line.dashed else ""
        frame.canvas.path(place, f"line s-{line.color}{dashed}")
    if len(place) <= _FEW_POINTS:
        for x, y in place:
            frame.canvas.circle(x, y, 3.2 if line.is_dots else 2.2, f"f-{line.color}")


def _tips(frame: _Frame, lines: Sequence[Line], axes: Axes) -> list[tuple[float, str]]:
    at: dict[float, list[str]] = {}
    for line in lines:
        for x, y in line.points:
            name = f"{line.label} " if line.label else ""
            at.setdefault(x, []).append(f"{name}{number(y)}")
        for x, low, high in line.band:
            at[x][-1] += f" [{number(low)}, {number(high)}]"
    name = axes.tip_x or axes.x
    return [(frame.x(x), "\n".join([f"{name} {number(x)}", *at[x]])) for x in sorted(at)]


def stacked_columns(
    label: str,
    xs: Sequence[float],
    parts: Sequence[tuple[Key, Sequence[float]]],
    axes: Axes,
    *,
    column_width: float = 1.0,
    marks: Sequence[Mark] = (),
    strip: Sequence[Span] = (),
    shaded: Sequence[Span] = (),
) -> Plot | None:
    """Columns of width `column_width` (in units of x) centred at xs; each part on the one below."""
    parts = [(key, values) for key, values in parts if any(values)]
    if not xs or not parts:
        return None
    totals = [sum(values[i] for _, values in parts) for i in range(len(xs))]
    half = column_width / 2
    x_range = axes.x_range or (min(xs) - half, max(xs) + half)
    frame = _Frame(axes, label, x_range, _bounds((0.0, max(totals)), axes, False), bool(strip))
    frame.spans(strip, shaded)
    frame.x_ticks(axes.integer_x)
    gap = 0.12 if len(xs) <= 60 else 0.0
    for i, x in enumerate(xs):
        x0 = frame.x(max(x - half * (1 - gap), x_range[0]))
        x1 = frame.x(min(x + half * (1 - gap), x_range[1]))
        x0, x1 = max(x0, frame.x(x) - _MAX_COLUMN / 2), min(x1, frame.x(x) + _MAX_COLUMN / 2)
        below = 0.0
        for key, values in parts:
            y0, y1 = frame.y(below), frame.y(below + values[i])
            if y0 - y1 > 0:
                frame.canvas.rect(x0, y1, x1 - x0, y0 - y1, f"f-{key.color}")
            below += values[i]
    frame.marks(marks)
    name = axes.tip_x or axes.x
    frame.canvas.tips = [
        (
            frame.x(x),
            "\n".join(
                [f"{name} {number(x)}: {number(totals[i])} {axes.y}"]
                + [f"{key.label} {number(values[i])}" for key, values in parts if values[i]]
            ),
        )
        for i, x in enumerate(xs)
    ]
    return Plot(frame.canvas.svg(), [key for key, _ in parts] if len(parts) > 1 else ())


@dataclass(frozen=True)
class StackedRow:
    """A bar of parts, in the order of the chart's keys; `note` stands at its right."""

    label: str
    values: Sequence[float]
    note: str = ""


def stacked_rows(
    label: str, keys: Sequence[Key], rows: Sequence[StackedRow], unit: str, *, width: float = HALF,
    as_share: bool = False,
) -> Plot | None:  # fmt: skip
    """Horizontal bars of named parts. `as_share`: each row's parts as shares of its sum, in %."""
    rows = [row for row in rows if sum(row.values) > 0]
    if not rows:
        return None
    used = [i for i, _ in enumerate(keys) if any(row.values[i] for row in rows)]
    label_chars = min(28, max(len(row.label) for row in rows))
    left = 12.0 + CHAR_WIDTH * label_chars
    right = 12.0 + CHAR_WIDTH * max((len(row.note) for row in rows), default=0)
    step, top = 24.0, 6.0
    bottom = top + step * len(rows)
    canvas = Canvas(width, bottom + 36.0, label)
    high = 100.0 if as_share else max(sum(row.values) for row in rows)
    about = 5 if width - left - right > 260 else 3
    ticks = nice_ticks(0.0, high, about)
    x = Scale(0.0, high if as_share else ticks[-1], left, width - right - 6)
    for tick in ticks:
        canvas.line(x(tick), top, x(tick), bottom, "grid")
        canvas.text(x(tick), bottom + 14, number(tick), "middle")
    canvas.text((left + width - right) / 2, bottom + 31, "%" if as_share else unit, "middle name")
    for index, row in enumerate(rows):
        y = top + step * index
        canvas.text(left - 6, y + step / 2 + 4, clip(row.label, 28), "end", row.label)
        canvas.text(width - right + 2, y + step / 2 + 4, row.note, "note")
        total, before = sum(row.values), 0.0
        for i in used:
            value = 100.0 * row.values[i] / total if as_share else row.values[i]
            if not value:
                continue
            x0, x1 = x(before), x(before + value)
            share = f"{100 * row.values[i] / total:.1f} %"
            tip = f"{row.label}: {keys[i].label} {number(row.values[i])} {unit} ({share})"
            canvas.rect(x0, y + 3, x1 - x0, step - 6, f"f-{keys[i].color}", tip)
            before += value
    return Plot(canvas.svg(), [keys[i] for i in used])


@dataclass(frozen=True)
class Interval:
    """A value with its interval, of one category and one kind."""

    category: str
    kind: str
    value: float
    low: float
    high: float


def intervals(label: str, values: Sequence[Interval], y: str, width: float = HALF) -> Plot | None:
    """Points with their intervals, grouped by category on the x axis."""
    if not values:
        return None
    categories = list(dict.fromkeys(v.category for v in values))
    kinds = list(dict.fromkeys(v.kind for v in values))
    colors = dict(zip(kinds, ("blue", "amber", "green", "magenta"), strict=False))
    frame = _Frame(
        Axes("", y, width=width), label, (-0.5, len(categories) - 0.5),
        (0.0, max(v.high for v in values) or 1.0),
    )  # fmt: skip
    room = int((frame.x(1) - frame.x(0)) / CHAR_WIDTH) - 1
    for index, category in enumerate(categories):
        frame.canvas.text(
            frame.x(index), frame.bottom + 16, clip(category, max(room, 4)), "middle", category
        )
    for v in values:
        offset = (kinds.index(v.kind) - (len(kinds) - 1) / 2) * 0.22
        x = frame.x(categories.index(v.category) + offset)
        tip = f"{v.category} {v.kind}: {number(v.value)} [{number(v.low)}, {number(v.high)}]"
        color = colors[v.kind]
        frame.canvas.line(x, frame.y(v.low), x, frame.y(v.high), f"bar s-{color}")
        for end in (v.low, v.high):
            frame.canvas.line(x - 5, frame.y(end), x + 5, frame.y(end), f"bar s-{color}")
        frame.canvas.circle(x, frame.y(v.value), 4.5, f"f-{color}", tip)
        frame.canvas.text(x + 8, frame.y(v.value) + 4, f"{v.value:.0f}", "note")
    return Plot(frame.canvas.svg(), [Key(kind, colors[kind]) for kind in kinds])


@dataclass(frozen=True)
class Range:
    """From the middle of a distribution to its end; `notes` stand in columns at the right."""

    label: str
    p50: float
    p95: float
    top: float
    notes: Sequence[str]


def ranges(
    label: str, rows: Sequence[Range], unit: str, columns: Sequence[str], width: float = WHOLE
) -> Plot | None:
    """One row a distribution: a dot at p50, a bar to p95, a tick at the largest."""
    if not rows:
        return None
    label_chars = min(34, max(len(row.label) for row in rows))
    left = 12.0 + CHAR_WIDTH * label_chars
    chars = [
        min(_NOTE_CHARS, max(map(len, [name, *(row.notes[i] for row in rows)])))
        for i, name in enumerate(columns)
    ]
    offsets = [sum(chars[:i]) * CHAR_WIDTH + 16.0 * i for i in range(len(columns))]
    right = sum(chars) * CHAR_WIDTH + 16.0 * len(columns)
    step, top = 20.0, 22.0
    bottom = top + step * len(rows)
    canvas = Canvas(width, bottom + 36.0, label)
    ticks = nice_ticks(0.0, max(row.top for row in rows), 5)
    x = Scale(0.0, ticks[-1], left, width - right - 12)
    for tick in ticks:
        canvas.line(x(tick), top, x(tick), bottom, "grid")
        canvas.text(x(tick), bottom + 14, number(tick), "middle")
    canvas.text((left + width - right) / 2, bottom + 31, unit, "middle name")
    for name, offset in zip(columns, offsets, strict=True):
        canvas.text(width - right + offset, 13, name, "note")
    for index, row in enumerate(rows):
        y = top + step * (index + 0.5)
        canvas.text(left - 6, y + 4, clip(row.label, 34), "end", row.label)
        tip = f"{row.label}: p50 {number(row.p50)}, p95 {number(row.p95)}, max {number(row.top)} {unit}"
        canvas.line(x(row.p95), y, x(row.top), y, "thin s-slate")
        canvas.rect(x(row.p50), y - 4, max(x(row.p95) - x(row.p50), 1), 8, "band f-blue", tip)
        canvas.line(x(row.top), y - 5, x(row.top), y + 5, "bar s-slate")
        canvas.circle(x(row.p50), y, 3.5, "f-blue", tip)
        for i, (note, offset) in enumerate(zip(row.notes, offsets, strict=True)):
            canvas.text(width - right + offset, y + 4, clip(note, chars[i], at_end=True), "", note)
    return Plot(canvas.svg(), [Key("p50 to p95", "blue"), Key("largest", "slate")])
