"""Causes and verdicts."""

from __future__ import annotations

import pytest

from proto import trajectory_pb2 as tpb
from rollout.group_filter import CauseKind, Member, cause_kind, judge_group

GOOD, BAD = Member(tpb.CAUSE_SUBMITTED, 1.0, 5), Member(tpb.CAUSE_TURN_CAP, 0.0, 5)
MASKED = Member(tpb.CAUSE_ENGINE_FAILED, None, 5)
SILENT = Member(tpb.CAUSE_TIME_BUDGET, 0.0, 0)


def test_every_cause_but_unspecified_has_a_kind() -> None:
    kinds = {name: cause_kind(number) for name, number in tpb.Cause.items()}
    assert kinds.pop("CAUSE_UNSPECIFIED") is None
    assert None not in kinds.values()
    assert kinds["CAUSE_INTERRUPTED"] is CauseKind.INFRASTRUCTURE
    assert cause_kind(9999) is None


@pytest.mark.parametrize(
    ("members", "left", "reason"),
    [
        pytest.param([GOOD, BAD], 9, "", id="informative"),
        pytest.param([GOOD, GOOD], 9, "zero_variance", id="zero_variance"),
        pytest.param([GOOD, GOOD], 0, "", id="refill_spent"),
        pytest.param([GOOD, BAD, MASKED], 9, "", id="masked_member"),
        pytest.param([GOOD, GOOD, MASKED], 9, "zero_variance", id="masked_is_not_a_zero"),
        pytest.param([GOOD, MASKED], 9, "too_few_valid_members", id="too_few"),
        pytest.param([GOOD, SILENT], 9, "too_few_valid_members", id="nothing_sampled"),
    ],
)
def test_verdicts(members: list[Member], left: int, reason: str) -> None:
    verdict = judge_group(
        members, min_valid_members=2, drop_zero_variance=True, zero_variance_left=left
    )
    assert verdict.drop_reason == reason
    kept = judge_group(members, min_valid_members=2, drop_zero_variance=False, zero_variance_left=9)
    assert kept.drop_reason in ("", "too_few_valid_members")
