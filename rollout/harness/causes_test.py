"""Every rule of the classification, and that the scored causes alone carry a reward."""

from __future__ import annotations

from typing import Any

import pytest

from proto.trajectory_pb2 import Cause
from rollout.harness.causes import (
    EVIDENCE_CAP,
    AgentEnd,
    Evidence,
    Verdict,
    classify,
    is_explained,
)

GRADED: dict[str, Any] = {"verdict": Verdict.GRADED, "reward": 1.0}

CASES = {
    "submitted": (Evidence(agent_end=AgentEnd.SUBMITTED, **GRADED), "CAUSE_SUBMITTED", 1.0),
    "oracle_or_nop": (Evidence(agent_end=AgentEnd.RETURNED, **GRADED), "CAUSE_SUBMITTED", 1.0),
    "turn_cap": (Evidence(agent_end=AgentEnd.TURN_CAP, **GRADED), "CAUSE_TURN_CAP", 1.0),
    "token_cap": (Evidence(agent_end=AgentEnd.TOKEN_CAP, **GRADED), "CAUSE_TOKEN_CAP", 1.0),
    "time_budget": (Evidence(agent_end=AgentEnd.TIME_BUDGET, **GRADED), "CAUSE_TIME_BUDGET", 1.0),
    "loop": (Evidence(agent_end=AgentEnd.LOOP, **GRADED), "CAUSE_LOOP", 1.0),
    "tests_hung": (
        Evidence(agent_end=AgentEnd.SUBMITTED, verdict=Verdict.TESTS_HUNG, reward=0.0),
        "CAUSE_TESTS_HUNG",
        0.0,
    ),
    "tests_oom": (
        Evidence(agent_end=AgentEnd.SUBMITTED, verdict=Verdict.TESTS_OOM, reward=0.0),
        "CAUSE_TESTS_OOM",
        0.0,
    ),
    "agent_oom": (
        Evidence(
            exception_type="HealthcheckError",
            failed_phase="agent",
            sandbox_died=True,
            agent_oom=True,
        ),
        "CAUSE_AGENT_OOM",
        0.0,
    ),
    "a_lost_lease_after_the_agents_oom_is_ours": (
        Evidence(exception_type="HealthcheckError", failed_phase="agent", agent_oom=True),
        "CAUSE_SANDBOX_FAILED",
        None,
    ),
    "a_broker_that_goes_away_after_the_agents_oom": (
        Evidence(
            exception_type="HealthcheckError",
            failed_phase="agent",
            backend_away=True,
            agent_oom=True,
        ),
        "CAUSE_SANDBOX_FAILED",
        None,
    ),
    "agents_oom_does_not_excuse_the_verifiers_sandbox": (
        Evidence(
            exception_type="HealthcheckError",
            failed_phase="verifier",
            sandbox_died=True,
            agent_oom=True,
        ),
        "CAUSE_SANDBOX_FAILED",
        None,
    ),
    "sandbox_failed": (
        Evidence(exception_type="HealthcheckError", failed_phase="agent"),
        "CAUSE_SANDBOX_FAILED",
        None,
    ),
    "sandbox_start": (
        Evidence(exception_type="EnvironmentStartTimeoutError"),
        "CAUSE_SANDBOX_FAILED",
        None,
    ),
    "engine_failed": (Evidence(exception_type="EngineFailedError"), "CAUSE_ENGINE_FAILED", None),
    "engines_away": (Evidence(exception_type="EnginesAwayError"), "CAUSE_ENGINE_FAILED", None),
    "no_room_on_the_workers_disk": (
        Evidence(exception_type="OSError"),
        "CAUSE_HARNESS_FAILED",
        None,
    ),
    "too_many_files_on_the_workers_host": (
        Evidence(exception_type="BlockingIOError"),
        "CAUSE_HARNESS_FAILED",
        None,
    ),
    "a_time_out_of_nobody_knows_what": (
        Evidence(exception_type="TimeoutError"),
        "CAUSE_UNCLASSIFIED",
        None,
    ),
    "task_folder_too_large": (
        Evidence(exception_type="TransferTooLargeError"),
        "CAUSE_HARNESS_FAILED",
        None,
    ),
    "fenced": (Evidence(exception_type="SessionFencedError"), "CAUSE_INTERRUPTED", None),
    "cancelled_trial": (Evidence(exception_type="CancelledError"), "CAUSE_INTERRUPTED", None),
    "abandoned_wins": (
        Evidence(agent_end=AgentEnd.SUBMITTED, abandoned=True, **GRADED),
        "CAUSE_INTERRUPTED",
        None,
    ),
    "gateway_rejects": (
        Evidence(exception_type="GatewayRejectedError"),
        "CAUSE_HARNESS_FAILED",
        None,
    ),
    "task_format": (Evidence(exception_type="TaskFormatError"), "CAUSE_HARNESS_FAILED", None),
    "harbor_failed": (Evidence(exception_type="MissingExtraError"), "CAUSE_HARNESS_FAILED", None),
    "verifier_raised": (
        Evidence(exception_type="VerifierTimeoutError", agent_end=AgentEnd.SUBMITTED),
        "CAUSE_VERIFIER_FAILED",
        None,
    ),
    "no_verdict": (Evidence(agent_end=AgentEnd.SUBMITTED), "CAUSE_VERIFIER_FAILED", None),
    "verdict_without_reward": (
        Evidence(agent_end=AgentEnd.SUBMITTED, verdict=Verdict.GRADED),
        "CAUSE_VERIFIER_FAILED",
        None,
    ),
    "wall_clock_spent_working": (
        Evidence(
            exception_type="AgentTimeoutError", agent_wall_s=100, decode_s=40, tool_s=30, **GRADED
        ),
        "CAUSE_TIME_BUDGET",
        1.0,
    ),
    "wall_clock_spent_queueing": (
        Evidence(
            exception_type="AgentTimeoutError",
            agent_wall_s=100,
            model_s=94,
            decode_s=4,
            tool_s=3,
            **GRADED,
        ),
        "CAUSE_ENGINE_FAILED",
        None,
    ),
    "wall_clock_spent_by_the_worker_itself": (
        Evidence(
            exception_type="AgentTimeoutError",
            agent_wall_s=100,
            model_s=10,
            decode_s=4,
            tool_s=3,
            **GRADED,
        ),
        "CAUSE_HARNESS_FAILED",
        None,
    ),
    "sandbox_of_the_verifier_dies_after_the_wall_clock_ran_out": (
        Evidence(
            exception_type="AgentTimeoutError",
            agent_wall_s=100,
            decode_s=40,
            tool_s=30,
            failed_phase="verifier",
        ),
        "CAUSE_SANDBOX_FAILED",
        None,
    ),
    "no_end": (Evidence(**GRADED), "CAUSE_UNCLASSIFIED", None),
    "unknown_exception": (Evidence(exception_type="KeyError"), "CAUSE_UNCLASSIFIED", None),
}


@pytest.mark.parametrize("name", CASES)
def test_cause(name: str) -> None:
    evidence, cause, reward = CASES[name]
    got = classify(evidence)
    assert (Cause.Name(got.cause), got.reward) == (cause, reward)
    # The contract: causes below 20 are scored, all others are masked.
    assert (got.reward is not None) == (got.cause < Cause.CAUSE_SANDBOX_FAILED)


AWAY = {
    "broker_unreachable": (
        Evidence(exception_type="HealthcheckError", failed_phase="setup", backend_away=True),
        True,
    ),
    "broker_unreachable_while_grading_after_a_timeout": (
        Evidence(
            exception_type="AgentTimeoutError",
            agent_wall_s=100,
            decode_s=40,
            tool_s=30,
            failed_phase="verifier",
            backend_away=True,
        ),
        True,
    ),
    "engines_away": (Evidence(exception_type="EnginesAwayError"), True),
    "sandbox_died": (
        Evidence(exception_type="HealthcheckError", failed_phase="agent", sandbox_died=True),
        False,
    ),
    "engine_failed": (Evidence(exception_type="EngineFailedError"), False),
    "abandoned": (Evidence(abandoned=True, agent_end=AgentEnd.SUBMITTED, **GRADED), True),
    "fenced": (Evidence(exception_type="SessionFencedError"), False),
    "another_cause": (Evidence(exception_type="TaskFormatError", backend_away=True), False),
}


@pytest.mark.parametrize("name", AWAY)
def test_only_a_failure_of_the_whole_backend_says_so(name: str) -> None:
    evidence, away = AWAY[name]
    assert classify(evidence).backend_away is away


def test_every_cause_that_a_worker_can_give_is_tested() -> None:
    others = {"CAUSE_UNSPECIFIED", "CAUSE_CANCELLED", "CAUSE_EARLY_STOPPED", "CAUSE_STALE"}
    assert {cause for _, cause, _ in CASES.values()} == set(Cause.keys()) - others


def test_evidence_is_capped() -> None:
    assert len(classify(Evidence(detail="x" * 9000)).evidence) == EVIDENCE_CAP


def test_only_what_nobody_knows_wants_its_traceback():
    explained = ("SessionFencedError", "EnginesAwayError", "BlockingIOError", "CancelledError")
    assert all(is_explained(name) for name in explained)
    assert not is_explained("ZeroDivisionError")
    assert not is_explained("TimeoutError")
