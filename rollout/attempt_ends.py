"""What becomes of a try that ended: requeued, for free or for one of its retries, or finished.

Owner: rollout.manager. Invariants: an infrastructure failure is never a reward; a retry is
spent only on a failure that no outage explains; free retries have a bound of their own
(`max_free_retries`), so that an attempt which breaks a backend by itself ends all the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from proto import trajectory_pb2 as tpb
from rollout.attempt_table import Attempt, AttemptTable
from rollout.backends import Backends
from rollout.config import RolloutConfig
from rollout.failure_rates import FailureRates
from rollout.group_filter import CauseKind
from rollout.sessions import Sessions
from rollout.token_store import TokenStore
from rollout.turn_admission import TurnAdmission
from rollout.turn_times import WindowLog

_LOG = logging.getLogger(__name__)


class AttemptEnds:
    """Ends tries; keeps the breakers, the failure rates and when windows were open."""

    def __init__(
        self,
        config: RolloutConfig,
        attempts: AttemptTable,
        sessions: Sessions,
        tokens: TokenStore,
        admission: TurnAdmission,
        clock: Callable[[], float],
        monotonic: Callable[[], float],
    ) -> None:
        """`clock` gives Unix seconds, `monotonic` seconds for the breakers."""
        self._config = config
        self._attempts = attempts
        self._sessions = sessions
        self._tokens = tokens
        self._admission = admission
        self._clock = clock
        self.backends = Backends(config.breaker, monotonic)
        self.rates = FailureRates(config.pause)
        self.windows = WindowLog()

    def end(
        self,
        attempt: Attempt,
        kind: CauseKind,
        cause: int,
        reward: float | None = None,
        report: bytes = b"",
        evidence: str = "",
        *,
        away: bool = False,
    ) -> bool:
        """Ends a try; True when the attempt was requeued.

        Args:
            away: the failure tells of the whole backend that the cause names, or of a worker that
                gave the attempt up.
        """
        has_retries = attempt.num_retries < self._config.max_attempt_retries
        failed = self.backends.ended(attempt, kind, cause, away=away, has_retries=has_retries)
        for refunded in failed.refunds:
            self._attempts.refund_retry(refunded)
        is_free = (failed.excused or away) and _num_free(attempt) < self._config.max_free_retries
        retry = kind is CauseKind.INFRASTRUCTURE and (is_free or has_retries)
        if retry:
            self._attempts.requeue(attempt, cause, evidence, self._clock(), spend_retry=not is_free)
        else:
            totals, times = self._sessions.totals(attempt, self.windows)
            verdict = self._attempts.finish(
                attempt,
                cause,
                reward,
                report,
                evidence,
                totals,
                self._clock(),
                times.SerializeToString(),
            )
            self._tokens.close_attempt(attempt.attempt_id)
            if verdict is not None and verdict.drop_reason:
                _LOG.info("group %s dropped: %s", attempt.group_id, verdict.drop_reason)
        self._admission.end_session(session_id(attempt))
        if attempt.group_id and not is_free:
            self.rates.record(cause)
        return retry

    def take_back(self, attempt: Attempt, why: str) -> None:
        """Requeues an attempt whose worker is gone; free, and no evidence against any backend."""
        self._attempts.requeue(
            attempt, tpb.CAUSE_INTERRUPTED, why, self._clock(), spend_retry=False
        )
        self.forget(attempt)

    def forget(self, attempt: Attempt) -> None:
        """A try that was ended elsewhere: its tickets go, and it says nothing about any backend."""
        self.backends.interrupted(attempt)
        self._admission.end_session(session_id(attempt))

    def expire(self) -> int:
        """Ends tries whose lease ran out; returns how many."""
        expired = self._attempts.expired(self._clock())
        for attempt in expired:
            _LOG.warning("attempt %s: lease expired", attempt.attempt_id)
            self.end(
                attempt,
                CauseKind.INFRASTRUCTURE,
                tpb.CAUSE_HARNESS_FAILED,
                evidence="the worker's lease expired",
            )
        return len(expired)


def session_id(attempt: Attempt) -> str:
    """The scheduler's name for a try."""
    return f"{attempt.attempt_id}/{attempt.epoch}"


def _num_free(attempt: Attempt) -> int:
    return attempt.num_leases - 1 - attempt.num_retries
