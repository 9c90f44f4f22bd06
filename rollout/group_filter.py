"""Causes, and what becomes of a group whose attempts have all ended.

Owner: rollout.manager. Pure. A member is valid when its cause is scored, it has a reward and
it has ids to train. An infrastructure failure is never a reward of 0: it is retried, then
masked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from proto import trajectory_pb2 as tpb

ZERO_VARIANCE = "zero_variance"
TOO_FEW_VALID = "too_few_valid_members"


class CauseKind(Enum):
    """Who is answerable for an attempt's end, which decides scoring and retrying."""

    SCORED = "scored"
    INFRASTRUCTURE = "infrastructure"
    OURS = "ours"
    UNCLASSIFIED = "unclassified"


_KINDS: dict[int, CauseKind] = {
    tpb.CAUSE_SUBMITTED: CauseKind.SCORED,
    tpb.CAUSE_TURN_CAP: CauseKind.SCORED,
    tpb.CAUSE_TOKEN_CAP: CauseKind.SCORED,
    tpb.CAUSE_TIME_BUDGET: CauseKind.SCORED,
    tpb.CAUSE_LOOP: CauseKind.SCORED,
    tpb.CAUSE_AGENT_OOM: CauseKind.SCORED,
    tpb.CAUSE_TESTS_HUNG: CauseKind.SCORED,
    tpb.CAUSE_TESTS_OOM: CauseKind.SCORED,
    tpb.CAUSE_SANDBOX_FAILED: CauseKind.INFRASTRUCTURE,
    tpb.CAUSE_ENGINE_FAILED: CauseKind.INFRASTRUCTURE,
    tpb.CAUSE_HARNESS_FAILED: CauseKind.INFRASTRUCTURE,
    tpb.CAUSE_VERIFIER_FAILED: CauseKind.INFRASTRUCTURE,
    tpb.CAUSE_INTERRUPTED: CauseKind.INFRASTRUCTURE,
    tpb.CAUSE_CANCELLED: CauseKind.OURS,
    tpb.CAUSE_EARLY_STOPPED: CauseKind.OURS,
    tpb.CAUSE_STALE: CauseKind.OURS,
    tpb.CAUSE_UNCLASSIFIED: CauseKind.UNCLASSIFIED,
}


def cause_kind(cause: int) -> CauseKind | None:
    """The kind of a Cause; None for UNSPECIFIED and unknown numbers, which end nothing."""
    return _KINDS.get(cause)


@dataclass(frozen=True, slots=True)
class Member:
    """What the filter needs of one finished attempt."""

    cause: int
    reward: float | None
    num_trained_tokens: int

    @property
    def valid(self) -> bool:
        """True when the trainer may use it."""
        scored = cause_kind(self.cause) is CauseKind.SCORED
        return scored and self.reward is not None and self.num_trained_tokens > 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """`drop_reason` is empty for a group that is ready."""

    drop_reason: str
    num_valid: int


def judge_group(
    members: Sequence[Member],
    *,
    min_valid_members: int,
    drop_zero_variance: bool,
    zero_variance_left: int,
) -> Verdict:
    """Ready, or dropped and why.

    Args:
        members: every attempt of the group, all finished.
        min_valid_members: fewer valid ones drop the group.
        drop_zero_variance: drop a group whose valid members share one reward.
        zero_variance_left: such drops that the present batch still allows.
    """
    rewards = [m.reward for m in members if m.valid]
    if len(rewards) < min_valid_members:
        return Verdict(TOO_FEW_VALID, len(rewards))
    if drop_zero_variance and zero_variance_left > 0 and len(set(rewards)) == 1:
        return Verdict(ZERO_VARIANCE, len(rewards))
    return Verdict("", len(rewards))
