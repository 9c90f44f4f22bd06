"""Causes and evidence of small sets of attempts."""

from __future__ import annotations

from collections import Counter

from launch.report.failures import causes_by_task, evidence, kind_of, try_ends
from proto import trajectory_pb2


def _attempt(name: str, task: str, cause: str, evidence: str = "", earlier: tuple = ()) -> dict:
    tries = [{"cause": c, "evidence": e, "ended_at_s": 1.0} for c, e in earlier]
    return {
        "attempt_id": name, "task_id": task, "cause": cause, "evidence": evidence,
        "finished_at_s": 2.0, "earlier_tries": tries,
    }  # fmt: skip


ATTEMPTS = [
    _attempt("a", "fine", "submitted"),
    _attempt("b", "capped", "turn_cap"),
    _attempt("c", "capped", "token_cap"),
    _attempt("d", "broken", "submitted", "", (("sandbox_failed", "lease 17 died of 9"),)),
    _attempt("e", "broken", "sandbox_failed", "lease 4 died of 9"),
    _attempt("f", "worse", "engine_failed", "no engine", (("engine_failed", "no engine"),) * 2),
]


def test_every_cause_of_the_contract_has_its_kind():
    kinds = {
        name.removeprefix("CAUSE_").lower(): number
        for name, number in trajectory_pb2.Cause.items()
        if number
    }
    for cause, number in kinds.items():
        want = (
            "scored" if number < 20 else "infrastructure" if number < 40
            else "ours" if number < 60 else "unclassified"
        )  # fmt: skip
        assert kind_of(cause) == want, cause


def test_tries_that_were_started_again_count():
    counts = Counter(end.cause for end in try_ends(ATTEMPTS))
    assert counts == {
        "submitted": 2, "turn_cap": 1, "token_cap": 1, "sandbox_failed": 2, "engine_failed": 3,
    }  # fmt: skip
    assert sum(end.is_last for end in try_ends(ATTEMPTS)) == 6


def test_tasks_with_most_failures_come_first():
    tasks = causes_by_task(ATTEMPTS, 10)
    assert list(tasks) == ["worse", "broken", "capped"], (
        "a task whose every try submitted is left out"
    )
    assert tasks["broken"] == {"submitted": 1, "sandbox_failed": 2}
    assert list(causes_by_task(ATTEMPTS, 1)) == ["worse"]


def test_evidence_alike_but_for_numbers_is_one_row():
    first, second = evidence(ATTEMPTS, 10)
    assert (first.cause, first.num, first.num_tried_again) == ("engine_failed", 3, 2)
    assert (second.cause, second.num, second.num_tried_again) == ("sandbox_failed", 2, 1)
    assert (second.text, second.attempt_id) == ("lease 17 died of 9", "d")
    assert evidence(ATTEMPTS[:3], 10) == [], "caps are the policy's doing"
