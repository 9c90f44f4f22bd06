"""Exact figures of overlap and of RL time from spans and turns made by hand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.overlap import DecodedTurn, Timeline, measure


def step(number: int, start: float, lineage: float = 1.0) -> dict[str, Any]:
    """wait 4 s, fetch 1 s, update 2 s, publish 1 s, other 2 s."""
    edges = [start, start + 4, start + 5, start + 5, start + 7, start + 8, start + 10]
    parts = ["wait", "fetch", "logprob", "update", "publish", "other"]
    spans = [[p, edges[i], edges[i + 1]] for i, p in enumerate(parts)]
    return {"step": number, "lineage": lineage, "spans": spans}


STEPS = [step(1, 100.0), step(2, 110.0)]


def test_tokens_are_shared_out_by_time() -> None:
    # 8 s over wait (4), fetch (1), update (2), publish (1): 10 tokens a second.
    got = measure(STEPS, [DecodedTurn(100.0, 108.0, 80)], max_staleness=2)
    assert got == {
        "max_staleness": 2,
        "num_steps": 2,
        "wall_s": 20.0,
        "trainer_wait_s": 8.0,
        "trainer_step_s": 4.0,
        "publish_s": 2.0,
        "outside_s": 14.0,
        "between_steps_s": 0.0,
        "sampled_tokens_in_trainer_steps": 20.0,
        "sampled_tokens_in_publish": 10.0,
        "sampled_tokens_outside": 50.0,
        "sampled_tokens_between_steps": 0.0,
        "engine_tokens_per_s": 4.0,
        "engine_tokens_per_s_in_trainer_steps": 5.0,
        "engine_tokens_per_s_in_publish": 5.0,
        "engine_tokens_per_s_outside": pytest.approx(50 / 14),
        "ratio_in_trainer_steps_to_outside": pytest.approx(1.4),
    }


def test_no_sampling_in_steps_is_a_ratio_of_zero() -> None:
    turns = [DecodedTurn(100.0, 104.0, 40), DecodedTurn(111.0, 113.0, 7)]
    assert measure(STEPS, turns, 0)["ratio_in_trainer_steps_to_outside"] == 0.0


TURNS = [DecodedTurn(90.0, 99.0, 5), DecodedTurn(108.0, 202.0, 94), DecodedTurn(215.0, 216.0, 3)]


def test_a_restart_is_no_part_of_rl() -> None:
    got = measure([step(1, 100.0), step(2, 200.0, lineage=2.0)], TURNS, 4)
    assert (got["wall_s"], got["between_steps_s"]) == (20.0, 0.0)
    assert got["sampled_tokens_outside"] == 4.0  # two seconds of either step, a token a second
    assert got["sampled_tokens_in_trainer_steps"] == got["sampled_tokens_in_publish"] == 0.0


def test_time_between_two_steps_is_told_apart() -> None:
    got = measure([step(2, 200.0), step(1, 100.0)], TURNS, 4)
    assert (got["wall_s"], got["outside_s"], got["between_steps_s"]) == (110.0, 14.0, 90.0)
    assert (got["sampled_tokens_outside"], got["sampled_tokens_between_steps"]) == (4.0, 90.0)


def test_a_turn_without_duration_falls_into_one_segment() -> None:
    assert Timeline(STEPS).tokens([DecodedTurn(106.0, 106.0, 9)])["step"] == 9.0


def test_without_spans_there_is_nothing_to_say() -> None:
    got = measure([{"step": 1}], [DecodedTurn(1.0, 2.0, 3)], 1)
    assert got["num_steps"] == 0 and got["engine_tokens_per_s"] is None
    assert got["ratio_in_trainer_steps_to_outside"] is None


def test_which_moments_are_rl() -> None:
    timeline = Timeline([step(1, 100.0), step(2, 200.0, lineage=2.0)])
    assert [timeline.covers(at) for at in (99.9, 100.0, 104.0, 110.0, 150.0, 205.0, 210.1)] == [
        False,
        True,
        True,
        True,
        False,
        True,
        False,
    ]


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.floats(95, 125), st.floats(0.001, 30), st.integers(0, 100)), max_size=20)
)
def test_no_token_is_counted_twice_or_lost(turns: list[tuple[float, float, int]]) -> None:
    decoded = [DecodedTurn(begin, begin + length, n) for begin, length, n in turns]
    inside = sum(
        t.num_tokens
        * max(0.0, min(t.ended_at, 120.0) - max(t.began_at, 100.0))
        / (t.ended_at - t.began_at)
        for t in decoded
    )
    assert sum(Timeline(STEPS).tokens(decoded).values()) == pytest.approx(inside, abs=1e-6)
