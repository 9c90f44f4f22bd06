"""How many of the newest tries failed, and whether that is reason to pause the run.

Owner: rollout.manager. Pure. A try that an outage excuses is not recorded: the breaker
deals with it. In memory only: a restart of the manager starts the count anew, and the pause
that came of it is in the ledger.
"""

from __future__ import annotations

from collections import Counter, deque

from proto import trajectory_pb2 as tpb
from rollout.config import PauseConfig
from rollout.group_filter import CauseKind, cause_kind

_FAILED = (CauseKind.INFRASTRUCTURE, CauseKind.UNCLASSIFIED)


class FailureRates:
    """The causes of the newest `window` ended tries of training attempts."""

    def __init__(self, config: PauseConfig) -> None:
        self._config = config
        self._causes: deque[int] = deque(maxlen=config.window)

    def record(self, cause: int) -> None:
        """A try ended."""
        self._causes.append(cause)

    def reset(self) -> None:
        """Starts anew."""
        self._causes.clear()

    def verdict(self) -> str:
        """Why the run should pause; empty: it should go on."""
        config, total = self._config, len(self._causes)
        if total < config.min_tries:
            return ""
        unclassified = self._causes.count(tpb.CAUSE_UNCLASSIFIED)
        if unclassified > config.max_unclassified_rate * total:
            return (
                f"{unclassified} of the last {total} tries ended unclassified, more than "
                f"rollout.pause.max_unclassified_rate = {config.max_unclassified_rate:g}: see the "
                "workers' logs for `unclassified failure`"
            )
        failed = Counter(c for c in self._causes if cause_kind(c) in _FAILED)
        if failed.total() > config.max_failure_rate * total:
            told = ", ".join(f"{_name(cause)} {n}" for cause, n in failed.most_common())
            return (
                f"{failed.total()} of the last {total} tries failed ({told}), more than "
                f"rollout.pause.max_failure_rate = {config.max_failure_rate:g}: see the evidence "
                "in the ledger's table `tries` and the logs of what failed most"
            )
        return ""


def _name(cause: int) -> str:
    return tpb.Cause.Name(tpb.Cause.ValueType(cause)).removeprefix("CAUSE_").lower()
