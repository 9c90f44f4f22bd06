"""Which backend an attempt needs, which one a failed try blames, and what may start now.

Owner: rollout.manager. Pure but for the breakers' clock. Backends: `sandbox`, `engine`,
`verifier`, and `worker NAME` (the harness process: one that fails everything it leases must
not drain the queue). A scored end speaks for every backend that the attempt used; a failure
speaks against the one that its cause names, and says nothing about the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from proto import trajectory_pb2 as tpb
from rollout.attempt_table import Attempt
from rollout.circuit_breaker import CircuitBreaker, Failed, State
from rollout.config import BreakerConfig
from rollout.group_filter import CauseKind

SANDBOX, ENGINE, VERIFIER = "sandbox", "engine", "verifier"
_BLAMED: dict[int, str] = {
    tpb.CAUSE_SANDBOX_FAILED: SANDBOX,
    tpb.CAUSE_ENGINE_FAILED: ENGINE,
    tpb.CAUSE_VERIFIER_FAILED: VERIFIER,
}


class Backends:
    """The breakers of one manager."""

    def __init__(self, config: BreakerConfig, clock: Callable[[], float]) -> None:
        """`clock` counts monotonic seconds."""
        self._config = config
        self._clock = clock
        self._breakers: dict[str, CircuitBreaker] = {}
        self._seen: dict[str, State] = {}

    def __iter__(self) -> Iterator[tuple[str, CircuitBreaker]]:
        """Every backend that was used, by name."""
        return iter(sorted(self._breakers.items()))

    def room(self, agent: str, worker: str) -> int | None:
        """Attempts of an agent that `worker` may start now; None: any number."""
        rooms = [breaker.room() for breaker in self._needed(agent, worker)]
        return min((room for room in rooms if room is not None), default=None)

    def started(self, attempt: Attempt) -> None:
        """A try was leased."""
        for breaker in self._needed(attempt.agent, attempt.worker):
            breaker.started(_key(attempt))

    def ended(
        self, attempt: Attempt, kind: CauseKind, cause: int, *, away: bool, has_retries: bool
    ) -> Failed:
        """A try ended; see CircuitBreaker.failed for the arguments and the answer."""
        key, blamed = _key(attempt), self._blamed(attempt, cause)
        result = Failed(excused=False)
        for breaker in self._needed(attempt.agent, attempt.worker):
            if breaker is blamed:
                result = breaker.failed(
                    key, attempt.attempt_id, attempt.task_id, away=away, has_retries=has_retries
                )
            elif kind is CauseKind.SCORED:
                breaker.succeeded(key, attempt.attempt_id, attempt.task_id)
            breaker.ended(key)
        return result

    def interrupted(self, attempt: Attempt) -> None:
        """A try was taken back; it says nothing about any backend."""
        for breaker in self._needed(attempt.agent, attempt.worker):
            breaker.ended(_key(attempt))

    def worker_restarted(self, worker: str) -> None:
        """A new process under the name: what the old one did is no evidence against it."""
        self._breaker(_worker(worker)).reset()

    def take_changes(self) -> list[str]:
        """A line for each breaker whose state is another than at the last call."""
        lines = []
        for name, breaker in self:
            state, before = breaker.state, self._seen.get(name, State.CLOSED)
            self._seen[name] = state
            if state is not before:
                why = f" ({breaker.detail})" if state is State.OPEN else ""
                lines.append(f"backend {name} is {state.replace('_', '-')}{why}")
        return lines

    def longest_outage(self) -> tuple[str, float]:
        """The detail of the oldest outage under way and its seconds; empty and 0: none."""
        outages = [(breaker.outage_s, breaker.detail) for _, breaker in self]
        seconds, detail = max(outages, default=(0.0, ""))
        return (detail, seconds) if seconds > 0 else ("", 0.0)

    def _needed(self, agent: str, worker: str) -> list[CircuitBreaker]:
        names = [SANDBOX, VERIFIER, _worker(worker)] + ([ENGINE] if agent == "mini" else [])
        return [self._breaker(name) for name in names]

    def _blamed(self, attempt: Attempt, cause: int) -> CircuitBreaker | None:
        if cause == tpb.CAUSE_HARNESS_FAILED:
            return self._breaker(_worker(attempt.worker))
        name = _BLAMED.get(cause)
        return None if name is None else self._breaker(name)

    def _breaker(self, name: str) -> CircuitBreaker:
        if name not in self._breakers:
            self._breakers[name] = CircuitBreaker(name, self._config, self._clock)
        return self._breakers[name]


def _worker(name: str) -> str:
    return f"worker {name}"


def _key(attempt: Attempt) -> tuple[str, int]:
    return attempt.attempt_id, attempt.epoch
