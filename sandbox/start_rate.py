"""Token bucket over sandbox starts that backs off when the backend is busy.

Owner: the broker's event loop. Pure: the clock is injected and nothing sleeps here.
"""

from __future__ import annotations

from collections.abc import Callable

_RECOVERY = 1.1
"""Growth of a cut rate with each start that succeeds."""
_FLOOR = 1 / 64
"""A cut rate stays above this share of the configured one."""


class StartRate:
    """At most `burst` starts at once and `rate_per_s` over time; rate 0 means no limit."""

    def __init__(self, rate_per_s: float, burst: int, clock: Callable[[], float]) -> None:
        self._nominal = rate_per_s
        self._rate = rate_per_s
        self._burst = float(burst)
        self._clock = clock
        self._tokens = float(burst)
        self._updated_s = clock()
        self._blocked_until_s = self._updated_s

    def reserve(self) -> float:
        """Takes one start; returns how long to wait before it, in seconds."""
        now = self._clock()
        blocked = max(0.0, self._blocked_until_s - now)
        if self._nominal == 0:
            return blocked
        self._tokens = min(self._burst, self._tokens + (now - self._updated_s) * self._rate)
        self._updated_s = now
        self._tokens -= 1
        return max(blocked, -self._tokens / self._rate if self._tokens < 0 else 0.0)

    def refused(self, retry_after_s: float) -> None:
        """The backend was busy: halves the rate and holds starts for retry_after_s."""
        self._rate = max(self._nominal * _FLOOR, self._rate / 2)
        self._blocked_until_s = max(self._blocked_until_s, self._clock() + retry_after_s)

    def succeeded(self) -> None:
        """A start went well: lets a cut rate grow back."""
        self._rate = min(self._nominal, self._rate * _RECOVERY)
