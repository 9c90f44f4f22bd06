"""Every transition of a breaker, by a clock that the tests move."""

from __future__ import annotations

import itertools

import pytest
from pydantic import ValidationError

from rollout.circuit_breaker import CircuitBreaker, Failed, State
from rollout.config import BreakerConfig

SPENT, EXCUSED = Failed(excused=False), Failed(excused=True)


class Bench:
    """A breaker whose tries are numbered."""

    def __init__(self, **settings: float) -> None:
        defaults = {"window_s": 60.0, "open_s": 10.0, "max_open_s": 40.0, "min_failures": 4}
        self.now_s = 1000.0
        config = BreakerConfig.model_validate({**defaults, **settings})
        self.breaker = CircuitBreaker("sandbox", config, lambda: self.now_s)
        self._keys = itertools.count()

    def state(self) -> State:
        return self.breaker.state

    def start(self) -> int:
        key = next(self._keys)
        self.breaker.started(key)
        return key

    def fail(
        self,
        attempt: str = "a",
        task: str = "t",
        *,
        away: bool = False,
        has_retries: bool = True,
        key: int | None = None,
    ) -> Failed:
        key = self.start() if key is None else key
        failed = self.breaker.failed(key, attempt, task, away=away, has_retries=has_retries)
        self.breaker.ended(key)
        return failed

    def succeed(self, attempt: str = "a", task: str = "t", key: int | None = None) -> None:
        key = self.start() if key is None else key
        self.breaker.succeeded(key, attempt, task)
        self.breaker.ended(key)

    def open(self) -> None:
        for _ in range(3):
            self.fail(away=True)
        assert self.state() is State.OPEN


def test_failures_that_tell_of_the_whole_backend_open_it_and_are_all_excused() -> None:
    bench = Bench()
    assert [bench.fail(away=True) for _ in range(2)] == [EXCUSED, EXCUSED]
    assert bench.state() is State.CLOSED and bench.breaker.room() is None
    assert bench.fail(away=True) == EXCUSED
    assert bench.state() is State.OPEN and bench.breaker.room() == 0
    assert bench.breaker.num_opened == 1
    assert "3 failures in a row" in bench.breaker.detail


def test_a_success_between_breaks_the_row() -> None:
    bench = Bench()
    for _ in range(5):
        bench.fail(away=True)
        bench.fail(away=True)
        bench.succeed()
    assert bench.state() is State.CLOSED


def test_failures_of_several_tasks_open_it_and_refund_what_was_spent() -> None:
    bench = Bench()
    assert bench.fail("a", "t1") == SPENT
    assert bench.fail("b", "t2") == SPENT
    assert bench.fail("a", "t1") == SPENT
    assert bench.fail("c", "t2") == Failed(excused=True, refunds=("a", "b", "a"))
    assert bench.state() is State.OPEN
    assert "4 of 4 tries of 2 tasks" in bench.breaker.detail


def test_a_task_that_always_fails_is_no_outage() -> None:
    bench = Bench()
    assert [bench.fail(f"a{i}", "broken") for i in range(20)] == [SPENT] * 20
    assert bench.state() is State.CLOSED
    assert bench.fail("z", "broken", has_retries=False) == SPENT


def test_failures_among_enough_successes_are_no_outage() -> None:
    bench = Bench(failure_ratio=0.5)
    for i in range(30):
        assert bench.fail(f"a{i}", f"t{i}") == SPENT
        bench.succeed()
        bench.succeed()
    assert bench.state() is State.CLOSED


def test_old_failures_do_not_count() -> None:
    bench = Bench()
    for i in range(12):
        assert bench.fail(f"a{i}", f"t{i}") == SPENT
        bench.now_s += 21.0
    assert bench.state() is State.CLOSED
    assert bench.breaker.num_recent_failures == 2


def test_the_last_retry_is_not_spent_while_the_backend_is_in_doubt() -> None:
    bench = Bench()
    assert bench.fail("a", "t1", has_retries=False) == SPENT, "a failure alone is the attempt's"
    assert bench.fail("b", "t2") == SPENT
    assert bench.fail("c", "t2", has_retries=False) == EXCUSED, "three in a row, of two tasks"
    for _ in range(5):
        bench.succeed()
    assert bench.fail("c", "t2", has_retries=False) == SPENT


def test_probes_go_through_when_the_time_is_over_and_one_success_closes_it() -> None:
    bench = Bench()
    before = bench.start()
    bench.open()
    bench.now_s += 9.9
    assert bench.breaker.room() == 0
    bench.now_s += 0.1
    assert bench.state() is State.HALF_OPEN and bench.breaker.room() == 2
    first, second = bench.start(), bench.start()
    assert bench.breaker.room() == 0
    bench.succeed(key=before)
    assert bench.state() is State.HALF_OPEN, "it started before the outage: no evidence"
    assert bench.breaker.outage_s == 10.0
    bench.breaker.ended(second)
    assert bench.breaker.room() == 1, "a probe that says nothing frees its place"
    bench.succeed(key=first)
    assert bench.state() is State.CLOSED and bench.breaker.room() is None
    assert bench.breaker.outage_s == 0.0
    assert bench.fail() == SPENT, "the outage's failures are forgotten"


def test_a_failed_probe_waits_longer_each_time_up_to_the_setting() -> None:
    bench = Bench()
    bench.open()
    for wait_s in (10.0, 20.0, 40.0, 40.0):
        bench.now_s += wait_s - 0.1
        assert bench.state() is State.OPEN
        bench.now_s += 0.1
        assert bench.state() is State.HALF_OPEN
        assert bench.fail(has_retries=False) == EXCUSED
    assert bench.breaker.num_opened == 1, "it is one outage"
    bench.now_s += 40.0
    bench.succeed()
    bench.open()
    bench.now_s += 10.0
    assert bench.state() is State.HALF_OPEN, "the next outage starts anew"


def test_what_fails_while_it_is_open_is_excused() -> None:
    bench = Bench()
    late = [bench.start() for _ in range(9)]
    bench.open()
    assert [bench.fail(key=key, has_retries=False) for key in late] == [EXCUSED] * 9
    assert bench.state() is State.OPEN


def test_times_are_ordered() -> None:
    with pytest.raises(ValidationError, match="raise max_open_s"):
        BreakerConfig(open_s=90.0)
