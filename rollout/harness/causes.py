"""The one cause that ends an attempt, from evidence: a pure function.

Owner: `rollout.harness`. Invariants: an infrastructure cause has no reward and needs positive
evidence (an exception that crossed a known boundary, or a verifier that failed where the
patch is not to blame); a scored cause has a reward in 0..1; what fits no rule is
`unclassified`, never a 0.
"""

from __future__ import annotations

import builtins
from dataclasses import dataclass
from enum import StrEnum

from harbor.models.trial.error_policy import FailureCause, policy_for

from proto import trajectory_pb2
from rollout.harness import errors

Cause = trajectory_pb2.Cause
EVIDENCE_CAP = 2000
"""Characters of evidence that go to the ledger."""


class AgentEnd(StrEnum):
    """How the agent itself says that it ended."""

    SUBMITTED = "submitted"
    TURN_CAP = "turn_cap"
    TOKEN_CAP = "token_cap"
    TIME_BUDGET = "time_budget"
    LOOP = "loop"
    RETURNED = "returned"
    """An agent without turns (oracle, nop) came back."""


class Verdict(StrEnum):
    """What grading came to."""

    GRADED = "graded"
    TESTS_HUNG = "tests_hung"
    """Hung twice in fresh sandboxes while the gold patch passed."""
    TESTS_OOM = "tests_oom"
    """Ran out of memory twice in fresh sandboxes while the gold patch passed."""
    FAILED = "failed"
    """The verifier failed and the patch is not shown to be the reason."""


@dataclass(frozen=True)
class Evidence:
    """All that the classification may look at."""

    agent_end: AgentEnd | None = None
    exception_type: str | None = None
    """Name of the exception class that ended the trial, as Harbor records it."""
    detail: str = ""
    abandoned: bool = False
    """The worker itself gave the attempt up (drain, lost lease)."""
    failed_phase: str = ""
    """Phase in which a sandbox first failed: setup, agent, verifier or control; empty: none did."""
    sandbox_died: bool = False
    """That failure was the sandbox's own death, as its broker says: not a lease that was lost, and
    not a broker that went away."""
    backend_away: bool = False
    """That failure tells of the whole broker: it could not be reached, refused every start, or lost
    a lease that was being renewed."""
    agent_oom: bool = False
    """The kernel killed something for memory during the agent's last command."""
    verdict: Verdict | None = None
    reward: float | None = None
    agent_wall_s: float = 0.0
    model_s: float = 0.0
    """Waiting for model calls, queues and update windows included."""
    decode_s: float = 0.0
    """Inside the engine, without queues and update windows."""
    tool_s: float = 0.0


@dataclass(frozen=True)
class Classified:
    """A cause, its reward (None unless scored) and the evidence in words."""

    cause: Cause
    reward: float | None
    evidence: str
    backend_away: bool = False
    """An infrastructure cause that tells of the whole backend, or of the worker that gave the attempt
    up, and not of this attempt."""


_SCORED_ENDS = {
    AgentEnd.SUBMITTED: Cause.CAUSE_SUBMITTED,
    AgentEnd.RETURNED: Cause.CAUSE_SUBMITTED,
    AgentEnd.TURN_CAP: Cause.CAUSE_TURN_CAP,
    AgentEnd.TOKEN_CAP: Cause.CAUSE_TOKEN_CAP,
    AgentEnd.TIME_BUDGET: Cause.CAUSE_TIME_BUDGET,
    AgentEnd.LOOP: Cause.CAUSE_LOOP,
}
_OWN_ERRORS = {
    errors.EngineFailedError.__name__: Cause.CAUSE_ENGINE_FAILED,
    errors.EnginesAwayError.__name__: Cause.CAUSE_ENGINE_FAILED,
    errors.SessionFencedError.__name__: Cause.CAUSE_INTERRUPTED,
    errors.AttemptAbandonedError.__name__: Cause.CAUSE_INTERRUPTED,
    errors.GatewayRejectedError.__name__: Cause.CAUSE_HARNESS_FAILED,
    errors.TaskFormatError.__name__: Cause.CAUSE_HARNESS_FAILED,
    errors.TransferTooLargeError.__name__: Cause.CAUSE_HARNESS_FAILED,
}
_HOST_ERRORS = frozenset(
    name
    for name, error in vars(builtins).items()
    if isinstance(error, type) and issubclass(error, OSError) and error is not TimeoutError
)
"""The worker's own machine refused something: a full disk, no more files or processes. What goes
wrong inside a sandbox or on the way to one arrives as another class. A TimeoutError may come from
anywhere and explains nothing."""
_HARBOR_CAUSES = {
    FailureCause.SANDBOX_FAILED: Cause.CAUSE_SANDBOX_FAILED,
    FailureCause.MODEL_PROVIDER_FAILED: Cause.CAUSE_ENGINE_FAILED,
    FailureCause.HARBOR_FAILED: Cause.CAUSE_HARNESS_FAILED,
    FailureCause.VERIFIER_FAILED: Cause.CAUSE_VERIFIER_FAILED,
    FailureCause.CANCELLED: Cause.CAUSE_INTERRUPTED,
}
_AGENT_TIMEOUT = "AgentTimeoutError"


def classify(evidence: Evidence) -> Classified:
    """The attempt's cause and reward.

    Order: what the worker did itself; what ended the trial by an exception; what grading
    came to; how the agent ended.
    """
    words = _words(evidence)
    if evidence.abandoned:
        return Classified(Cause.CAUSE_INTERRUPTED, None, words, backend_away=True)
    name = evidence.exception_type
    if name is not None and name != _AGENT_TIMEOUT:
        return _from_exception(evidence, name, words)
    if name == _AGENT_TIMEOUT and not _is_busy(evidence):
        # The wall clock went to queues, windows and our own slowness: not the policy's doing.
        cause = Cause.CAUSE_ENGINE_FAILED if _waited(evidence) else Cause.CAUSE_HARNESS_FAILED
        return Classified(cause, None, words)
    if evidence.verdict is None and evidence.failed_phase:
        # Grading after a timeout of the agent, whose exception is the one that Harbor kept.
        return Classified(Cause.CAUSE_SANDBOX_FAILED, None, words, evidence.backend_away)
    if evidence.verdict is None or evidence.verdict is Verdict.FAILED:
        return Classified(Cause.CAUSE_VERIFIER_FAILED, None, words)
    if evidence.verdict is Verdict.TESTS_HUNG:
        return Classified(Cause.CAUSE_TESTS_HUNG, 0.0, words)
    if evidence.verdict is Verdict.TESTS_OOM:
        return Classified(Cause.CAUSE_TESTS_OOM, 0.0, words)
    if evidence.reward is None:
        return Classified(Cause.CAUSE_VERIFIER_FAILED, None, words)
    if name == _AGENT_TIMEOUT:
        return Classified(Cause.CAUSE_TIME_BUDGET, evidence.reward, words)
    if evidence.agent_end is None:
        return Classified(Cause.CAUSE_UNCLASSIFIED, None, words)
    return Classified(_SCORED_ENDS[evidence.agent_end], evidence.reward, words)


def is_explained(exception_type: str) -> bool:
    """True for an exception whose name tells the cause; of any other the traceback is wanted."""
    known = exception_type in _OWN_ERRORS or exception_type in _HOST_ERRORS
    return known or policy_for(exception_type).cause in _HARBOR_CAUSES


def _from_exception(evidence: Evidence, name: str, words: str) -> Classified:
    if name in _OWN_ERRORS:
        away = name == errors.EnginesAwayError.__name__
        return Classified(_OWN_ERRORS[name], None, words, away)
    if name in _HOST_ERRORS:
        return Classified(Cause.CAUSE_HARNESS_FAILED, None, words)
    cause = _HARBOR_CAUSES.get(policy_for(name).cause, Cause.CAUSE_UNCLASSIFIED)
    if cause != Cause.CAUSE_SANDBOX_FAILED:
        return Classified(cause, None, words)
    if evidence.failed_phase == "agent" and evidence.agent_oom and evidence.sandbox_died:
        return Classified(Cause.CAUSE_AGENT_OOM, 0.0, words)
    return Classified(cause, None, words, evidence.backend_away)


def _is_busy(evidence: Evidence) -> bool:
    return evidence.decode_s + evidence.tool_s >= 0.5 * evidence.agent_wall_s


def _waited(evidence: Evidence) -> bool:
    """Whether most of the idle time went to model calls that were not being decoded."""
    idle_s = evidence.agent_wall_s - evidence.decode_s - evidence.tool_s
    return evidence.model_s - evidence.decode_s >= 0.5 * idle_s


def _words(evidence: Evidence) -> str:
    parts = [
        f"{key}={value}"
        for key, value in (
            ("agent_end", evidence.agent_end),
            ("exception", evidence.exception_type),
            ("failed_phase", evidence.failed_phase or None),
            ("backend_away", evidence.backend_away or None),
            ("agent_oom", evidence.agent_oom or None),
            ("verdict", evidence.verdict),
            ("detail", evidence.detail or None),
        )
        if value is not None
    ]
    return " ".join(parts)[:EVIDENCE_CAP]
