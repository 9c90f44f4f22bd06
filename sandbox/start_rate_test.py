"""StartRate: burst, rate over time, and backing off."""

from __future__ import annotations

import pytest

from sandbox.start_rate import StartRate


class FakeClock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_burst_passes_and_the_rate_holds_after_it() -> None:
    rate = StartRate(rate_per_s=2, burst=3, clock=FakeClock())
    assert [rate.reserve() for _ in range(5)] == [0, 0, 0, 0.5, 1.0]


def test_tokens_come_back_with_time_up_to_the_burst() -> None:
    clock = FakeClock()
    rate = StartRate(rate_per_s=2, burst=2, clock=clock)
    rate.reserve(), rate.reserve()
    clock.now_s = 100
    assert [rate.reserve() for _ in range(3)] == [0, 0, 0.5]


def test_zero_means_no_limit() -> None:
    rate = StartRate(rate_per_s=0, burst=1, clock=FakeClock())
    assert {rate.reserve() for _ in range(100)} == {0}


def test_a_refusal_halves_the_rate_and_holds_starts() -> None:
    clock = FakeClock()
    rate = StartRate(rate_per_s=4, burst=1, clock=clock)
    rate.reserve()
    rate.refused(retry_after_s=3)
    assert rate.reserve() == pytest.approx(3)
    clock.now_s = 3.5
    rate.reserve()
    assert rate.reserve() == pytest.approx(0.5)  # 2 a second
    for _ in range(20):
        rate.succeeded()
    clock.now_s = 100
    rate.reserve()
    assert rate.reserve() == pytest.approx(0.25)  # 4 a second again


def test_a_refusal_holds_an_unlimited_rate_too() -> None:
    rate = StartRate(rate_per_s=0, burst=1, clock=FakeClock())
    rate.refused(retry_after_s=2)
    assert rate.reserve() == 2
