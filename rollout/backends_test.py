"""What a cause blames, what an end speaks for, and when failures pause the run."""

from __future__ import annotations

import dataclasses

import pytest

from proto import trajectory_pb2 as tpb
from rollout.attempt_table import Attempt
from rollout.backends import Backends
from rollout.config import BreakerConfig, PauseConfig
from rollout.errors import FencedError
from rollout.failure_rates import FailureRates
from rollout.group_filter import cause_kind
from rollout.worker_names import WorkerNames

_TEMPLATE = {f.name: 0 for f in dataclasses.fields(Attempt)}


def attempt(number: int, agent: str = "mini", worker: str = "w0", epoch: int = 1) -> Attempt:
    named = {"attempt_id": f"a{number}", "task_id": f"t{number % 3}", "agent": agent}
    return Attempt(**{**_TEMPLATE, **named, "worker": worker, "epoch": epoch})  # type: ignore[arg-type]


def end(
    backends: Backends, number: int, cause: int, *, away: bool = False, agent: str = "mini"
) -> None:
    kind = cause_kind(cause)
    assert kind is not None
    one = attempt(number, agent)
    backends.started(one)
    backends.ended(one, kind, cause, away=away, has_retries=True)


@pytest.mark.parametrize(
    ("cause", "blamed"),
    [
        (tpb.CAUSE_SANDBOX_FAILED, "sandbox"),
        (tpb.CAUSE_ENGINE_FAILED, "engine"),
        (tpb.CAUSE_VERIFIER_FAILED, "verifier"),
        (tpb.CAUSE_HARNESS_FAILED, "worker w0"),
        (tpb.CAUSE_INTERRUPTED, None),
        (tpb.CAUSE_UNCLASSIFIED, None),
        (tpb.CAUSE_CANCELLED, None),
        (tpb.CAUSE_TOKEN_CAP, None),
    ],
)
def test_a_cause_blames_one_backend(cause: int, blamed: str | None) -> None:
    backends = Backends(BreakerConfig(), lambda: 0.0)
    for number in range(8):
        end(backends, number, cause)
    opened = [name for name, breaker in backends if breaker.num_opened]
    assert opened == ([] if blamed is None else [blamed])
    told = [f"backend {blamed} is open"] if blamed else []
    assert [line.partition(" (")[0] for line in backends.take_changes()] == told
    assert backends.take_changes() == [], "told once"
    assert (backends.room("mini", "w0") == 0) is (blamed is not None)
    assert (backends.room("oracle", "w0") == 0) is (blamed not in (None, "engine"))
    assert (backends.room("mini", "w1") == 0) is (blamed not in (None, "worker w0"))


def test_a_scored_end_speaks_for_what_the_attempt_used() -> None:
    backends = Backends(BreakerConfig(), lambda: 0.0)
    for number in range(20):
        end(backends, number, tpb.CAUSE_SANDBOX_FAILED)
        end(backends, number, tpb.CAUSE_ENGINE_FAILED)
        end(backends, 100 + 2 * number, tpb.CAUSE_TESTS_HUNG, agent="nop")
        end(backends, 101 + 2 * number, tpb.CAUSE_TESTS_HUNG, agent="nop")
        if backends.room("mini", "w0") is not None:
            break
    opened = {name for name, breaker in backends if breaker.num_opened}
    assert opened == {"engine"}, "nop uses no engine, so it cannot vouch for one"


def test_a_worker_that_was_restarted_starts_with_a_clean_slate() -> None:
    backends = Backends(BreakerConfig(), lambda: 0.0)
    for number in range(8):
        end(backends, number, tpb.CAUSE_HARNESS_FAILED)
    assert backends.room("mini", "w0") == 0
    assert backends.longest_outage() == ("", 0.0), "no time has passed"
    backends.worker_restarted("w0")
    assert backends.room("mini", "w0") is None


def test_the_oldest_outage_is_told() -> None:
    now_s = [0.0]
    backends = Backends(BreakerConfig(), lambda: now_s[0])
    for cause in (tpb.CAUSE_SANDBOX_FAILED, tpb.CAUSE_ENGINE_FAILED):
        for number in range(3):
            end(backends, number, cause, away=True)
        now_s[0] += 7.0
    detail, outage_s = backends.longest_outage()
    assert detail.startswith("sandbox: ") and outage_s == 14.0


def test_rates_pause_above_their_settings_only() -> None:
    config = PauseConfig(window=100, min_tries=20, max_unclassified_rate=0.1, max_failure_rate=0.5)
    rates = FailureRates(config)
    for _ in range(2):
        rates.record(tpb.CAUSE_UNCLASSIFIED)
    for _ in range(17):
        rates.record(tpb.CAUSE_SUBMITTED)
    assert rates.verdict() == "", "too few for a rate"
    rates.record(tpb.CAUSE_SUBMITTED)
    assert rates.verdict() == "", "2 of 20 is the setting, not above it"
    rates.record(tpb.CAUSE_UNCLASSIFIED)
    assert "3 of the last 21 tries ended unclassified" in rates.verdict()
    for _ in range(200):
        rates.record(tpb.CAUSE_SUBMITTED)
    assert rates.verdict() == "", "old ones leave the window"
    for cause in [tpb.CAUSE_SANDBOX_FAILED] * 30 + [tpb.CAUSE_ENGINE_FAILED] * 20:
        rates.record(cause)
    assert rates.verdict() == ""
    rates.record(tpb.CAUSE_UNCLASSIFIED)
    told = rates.verdict()
    assert "51 of the last 100 tries failed" in told
    assert "sandbox_failed 30, engine_failed 20, unclassified 1" in told
    rates.reset()
    assert rates.verdict() == ""


def test_the_newest_process_holds_a_name() -> None:
    names = WorkerNames()
    assert names.claim("w0", "one"), "the manager may have been restarted: w0 may hold leases"
    assert not names.claim("w0", "one")
    assert names.claim("w0", "two")
    assert not names.claim("w0", "two")
    assert names.claim("w1", "one"), "another name"
    assert not names.claim("w0", ""), "an older client takes nothing over"
    with pytest.raises(FencedError, match="another process"):
        names.claim("w0", "one")
