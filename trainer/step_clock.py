"""Splits a step's wall time into named parts that add up to it, and says when each was."""

from __future__ import annotations

import time
from collections.abc import Callable

PARTS = ("wait", "fetch", "logprob", "update", "publish", "other")
Span = tuple[str, float, float]
"""A part, and when it began and ended, in Unix seconds."""


class StepClock:
    """Accumulates the time since the last lap under the lap's name."""

    def __init__(
        self, clock: Callable[[], float], wall_clock: Callable[[], float] = time.time
    ) -> None:
        """Args: clock returns seconds and never goes back; wall_clock, read once, Unix seconds."""
        self._clock = clock
        self._begun = self._last = clock()
        self._to_unix = wall_clock() - self._begun
        self._parts = dict.fromkeys(PARTS, 0.0)
        self._spans: list[Span] = []

    def lap(self, part: str) -> None:
        """Books the time since the last lap, or since the start, under `part`."""
        now = self._clock()
        self._parts[part] += now - self._last
        self._spans.append((part, self._last + self._to_unix, now + self._to_unix))
        self._last = now

    def scalars(self) -> dict[str, float]:
        """Ends the step: time_<part>_s, with the rest in `other`, and their sum time_step_s."""
        self.lap("other")
        parts = {f"time_{name}_s": seconds for name, seconds in self._parts.items()}
        return parts | {"time_step_s": self._last - self._begun}

    @property
    def spans(self) -> list[Span]:
        """Every lap in order: they follow one another without a gap."""
        return list(self._spans)
