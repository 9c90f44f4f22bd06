"""SVG as text: scales, ticks, numbers, and a canvas that the charts draw on.

Owner: `launch/report`. No library draws here, so that text stays text, colours follow the
page's light or dark theme, and a figure costs a few kilobytes. Units: user units of the
viewBox, which is one CSS pixel where a figure has its natural width.

Colours are names: `f-NAME` fills and `s-NAME` strokes, and `PALETTE` gives each its value in
the light and in the dark theme.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

PALETTE: dict[str, tuple[str, str]] = {
    "blue": ("#2563eb", "#7aa2f7"),
    "amber": ("#b45309", "#f0b45a"),
    "green": ("#047857", "#4fd1a5"),
    "magenta": ("#a21caf", "#e58bf0"),
    "cyan": ("#0e7490", "#56c8de"),
    "red": ("#c81e1e", "#f58a8a"),
    "violet": ("#6d28d9", "#b79cf9"),
    "olive": ("#4d7c0f", "#a8d15f"),
    "slate": ("#64748b", "#94a3b8"),
    "pink": ("#be185d", "#fb9bc0"),
    "brown": ("#7c5a33", "#c9a67c"),
    "pale": ("#cbd5e1", "#4b5666"),
    "ink": ("#1b2028", "#e5e8ed"),
}
"""Name -> (light, dark). Light ones have 4.5:1 on white where they carry text."""

SERIES = ("blue", "amber", "green", "magenta", "cyan", "red", "violet", "olive")
"""Colours of lines that have no meaning of their own, in order."""

CHAR_WIDTH = 6.3
"""Of a character at the charts' 11 px, on the generous side: fonts differ."""


@dataclass(frozen=True)
class Scale:
    """Maps [low, high] to [start, end] in user units; `log` maps the logarithm."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Where a value lies."""
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log10(low), math.log10(high), math.log10(max(value, low))
        span = (high - low) or 1.0
        return self.start + (value - low) / span * (self.end - self.start)


def nice_ticks(low: float, high: float, about: int = 5, integer: bool = False) -> list[float]:
    """Round values that cover [low, high]: the first is <= low, the last >= high."""
    if not (math.isfinite(low) and math.isfinite(high)):
        return [0.0, 1.0]
    if high <= low:
        high = low + (abs(low) or 1.0)
    raw = (high - low) / about
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(s * magnitude for s in (1, 2, 2.5, 5, 10) if s * magnitude >= raw * 0.999)
    if integer:
        step = max(1.0, round(step))
    first = math.floor(low / step + 1e-9) * step
    count = math.ceil((high - first) / step - 1e-9)
    return [round(first + k * step, 12) for k in range(count + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten that cover [low, high], both above 0; thinned to seven at most."""
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    last = max(last, first + 1)
    stride = max(1, math.ceil((last - first) / 6))
    return [10.0**k for k in range(first, last + stride, stride)]


def number(value: float) -> str:
    """A figure for people: 12,345; 0.0123; 1.2e-7."""
    size = abs(value)
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    if size >= 1e7 or size < 1e-3:
        return f"{value:.2g}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")
    if size >= 100:
        return f"{value:,.0f}"
    text = f"{value:.3g}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def clip(text: str, num_chars: int, at_end: bool = False) -> str:
    """At most num_chars; the middle is left out, as names differ at both ends, or the end."""
    if len(text) <= num_chars:
        return text
    tail = 0 if at_end else (num_chars - 1) // 2
    return text[: num_chars - 1 - tail] + "…" + text[len(text) - tail :]


@dataclass
class Canvas:
    """Collects elements of one figure."""

    width: float
    height: float
    label: str
    """What a screen reader says."""
    tips: list[tuple[float, str]] = field(default_factory=list)
    """(x in user units, text): what the pointer finds nearest shows."""
    _parts: list[str] = field(default_factory=list)

    def line(self, x1: float, y1: float, x2: float, y2: float, classes: str) -> None:
        """A straight line."""
        self._parts.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{classes}"/>'
        )

    def rect(
        self, x: float, y: float, width: float, height: float, classes: str, tip: str = ""
    ) -> None:
        """A filled rectangle; `tip` shows when the pointer rests on it."""
        title = f"<title>{html.escape(tip)}</title>" if tip else ""
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.2f}" '
            f'height="{max(height, 0):.2f}" class="{classes}">{title}</rect>'
        )

    def circle(self, x: float, y: float, radius: float, classes: str, tip: str = "") -> None:
        """A filled circle."""
        title = f"<title>{html.escape(tip)}</title>" if tip else ""
        self._parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" class="{classes}">{title}</circle>'
        )

    def path(
        self, points: Sequence[tuple[float, float]], classes: str, closed: bool = False
    ) -> None:
        """A polyline, or a filled area."""
        if not points:
            return
        steps = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._parts.append(f'<path d="M{steps}{"Z" if closed else ""}" class="{classes}"/>')

    def text(self, x: float, y: float, text: str, classes: str = "", tip: str = "") -> None:
        """Text whose baseline is at y; class `end` or `middle` anchors it elsewhere than left."""
        title = f"<title>{html.escape(tip)}</title>" if tip else ""
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" class="{classes}">{html.escape(text)}{title}</text>'
        )

    def svg(self) -> str:
        """The whole element."""
        tips = ""
        if self.tips:
            xs = " ".join(f"{x:.1f}" for x, _ in self.tips)
            texts = html.escape("\x1f".join(text for _, text in self.tips))
            tips = f' data-xs="{xs}" data-tips="{texts}"'
        return (
            f'<svg viewBox="0 0 {self.width:g} {self.height:g}" role="img" '
            f'aria-label="{html.escape(self.label)}"{tips}>{"".join(self._parts)}</svg>'
        )


def extent(values: Iterable[float]) -> tuple[float, float] | None:
    """Least and largest finite value, or None."""
    finite = [v for v in values if math.isfinite(v)]
    return (min(finite), max(finite)) if finite else None
