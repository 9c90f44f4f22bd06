"""Tells an outage of a backend from failures of single attempts, and finds out when it is over.

Owner: rollout.backends, one breaker for each backend. Pure: the clock is injected, no I/O.

    closed --outage--> open --open_s--> half-open --a probe ends well--> closed
                        ^                   |
                        `--a probe fails, the time to the next doubles--'

An outage needs positive evidence: `away_failures` in a row that tell of the whole backend, or
many failures of at least two tasks that are a large share of all outcomes, because a task
that is broken by itself fails with the same cause every time. Failures of an outage
are not the attempts': those before the opening are refunded, those after it are excused.
Nothing here survives a restart of the manager, and nothing must: leased attempts are then
queued again for free, failures of a backend that is away stay free under a closed breaker
too, and `away_failures` of them open it again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from enum import StrEnum

from rollout.config import BreakerConfig


class State(StrEnum):
    """What may start."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class _Outcome:
    at_s: float
    attempt_id: str
    task_id: str
    ok: bool
    away: bool = False
    spent: bool = False


@dataclass(frozen=True, slots=True)
class Failed:
    """What a failure means."""

    excused: bool
    """The outage ended the try, or may have: it spends no retry and ends nothing."""
    refunds: tuple[str, ...] = ()
    """Attempts whose earlier failures turn out to be the outage's, one entry a retry."""


class CircuitBreaker:
    """The breaker of one backend. A try is known by a key that is never used again."""

    def __init__(self, name: str, config: BreakerConfig, clock: Callable[[], float]) -> None:
        """`clock` counts monotonic seconds; `name` is used in words only."""
        self._name = name
        self._config = config
        self._clock = clock
        self._outcomes: deque[_Outcome] = deque()
        self._probes: set[Hashable] = set()
        self._is_open = False
        self._probe_at_s = 0.0
        self._pause_s = config.open_s
        self.opened_at_s = 0.0
        """When the present outage was noticed; it counts until the breaker closes."""
        self.num_opened = 0
        self.detail = ""

    @property
    def state(self) -> State:
        """The state now."""
        if not self._is_open:
            return State.CLOSED
        return State.HALF_OPEN if self._clock() >= self._probe_at_s else State.OPEN

    @property
    def num_recent_failures(self) -> int:
        """Failures in the window."""
        self._trim()
        return sum(not o.ok for o in self._outcomes)

    @property
    def outage_s(self) -> float:
        """Seconds since it opened; 0 while closed."""
        return self._clock() - self.opened_at_s if self._is_open else 0.0

    def room(self) -> int | None:
        """Attempts that may start now; None: any number."""
        state = self.state
        if state is State.CLOSED:
            return None
        return self._config.num_probes - len(self._probes) if state is State.HALF_OPEN else 0

    def started(self, key: Hashable) -> None:
        """A try that needs the backend starts: a probe unless the breaker is closed."""
        if self.state is not State.CLOSED:
            self._probes.add(key)

    def succeeded(self, key: Hashable, attempt_id: str, task_id: str) -> None:
        """A try ended and the backend had done its part. While open only probes count."""
        if not self._is_open:
            self._outcomes.append(_Outcome(self._clock(), attempt_id, task_id, ok=True))
            self._trim()
        elif key in self._probes:
            self.reset()

    def failed(
        self, key: Hashable, attempt_id: str, task_id: str, *, away: bool, has_retries: bool
    ) -> Failed:
        """A try ended because of the backend.

        Args:
            away: the failure tells of the whole backend.
            has_retries: the attempt has a retry to spend. Its last end waits while the backend
                is in doubt.
        """
        if self._is_open:
            if key in self._probes:
                self._probes.discard(key)
                self._pause_s = min(2 * self._pause_s, self._config.max_open_s)
                self._probe_at_s = self._clock() + self._pause_s
            return Failed(excused=True)
        outcome = _Outcome(self._clock(), attempt_id, task_id, ok=False, away=away)
        self._outcomes.append(outcome)
        self._trim()
        if reason := self._outage():
            refunds = tuple(o.attempt_id for o in self._outcomes if o.spent)
            self._open(reason)
            return Failed(excused=True, refunds=refunds)
        if away or (not has_retries and self._is_in_doubt()):
            return Failed(excused=True)
        self._outcomes[-1] = replace(outcome, spent=has_retries)
        return Failed(excused=False)

    def ended(self, key: Hashable) -> None:
        """A try ended and says nothing about the backend: its probe may be tried again."""
        self._probes.discard(key)

    def reset(self) -> None:
        """Closes the breaker and forgets what it saw."""
        self._is_open = False
        self._pause_s = self._config.open_s
        self._outcomes.clear()
        self._probes.clear()

    def _open(self, reason: str) -> None:
        self._is_open = True
        self.opened_at_s = self._clock()
        self._probe_at_s = self.opened_at_s + self._pause_s
        self.num_opened += 1
        self.detail = f"{self._name}: {reason}"
        self._outcomes.clear()

    def _outage(self) -> str:
        """Why this is an outage; empty: it is none."""
        config = self._config
        failures = [o for o in self._outcomes if not o.ok]
        row = self._failures_in_a_row()
        num_away = sum(o.away for o in row)
        if num_away >= config.away_failures:
            return f"{num_away} failures in a row say that it is away"
        ratio = len(failures) / len(self._outcomes)
        num_tasks = len({o.task_id for o in failures})
        if len(failures) >= config.min_failures and ratio >= config.failure_ratio and num_tasks > 1:
            return (
                f"{len(failures)} of {len(self._outcomes)} tries of {num_tasks} tasks failed "
                f"within {config.window_s:g} s"
            )
        return ""

    def _is_in_doubt(self) -> bool:
        row = self._failures_in_a_row()
        return len(row) >= self._config.doubt_failures and len({o.task_id for o in row}) > 1

    def _failures_in_a_row(self) -> list[_Outcome]:
        row: list[_Outcome] = []
        for outcome in reversed(self._outcomes):
            if outcome.ok:
                break
            row.append(outcome)
        return row

    def _trim(self) -> None:
        oldest_s = self._clock() - self._config.window_s
        while self._outcomes and self._outcomes[0].at_s < oldest_s:
            self._outcomes.popleft()
