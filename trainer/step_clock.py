"""Splits a step's wall time into named parts that add up to it."""

from __future__ import annotations

from collections.abc import Callable

PARTS = ("wait", "fetch", "logprob", "update", "publish", "other")


class StepClock:
    """Accumulates the time since the last lap under the lap's name."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Args: clock returns seconds and never goes back."""
        self._clock = clock
        self._begun = self._last = clock()
        self._parts = dict.fromkeys(PARTS, 0.0)

    def lap(self, part: str) -> None:
        """Books the time since the last lap, or since the start, under `part`."""
        now = self._clock()
        self._parts[part] += now - self._last
        self._last = now

    def scalars(self) -> dict[str, float]:
        """Ends the step: time_<part>_s, with the rest in `other`, and their sum time_step_s."""
        self.lap("other")
        parts = {f"time_{name}_s": seconds for name, seconds in self._parts.items()}
        return parts | {"time_step_s": self._last - self._begun}
