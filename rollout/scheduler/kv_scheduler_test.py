"""Scheduler properties over random loads: budgets hold, nothing starves, runs repeat."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.scheduler import KvScheduler

WATERMARK, AGEING_S, CAP, GROWTH = 0.75, 5.0, 1000, 60


@dataclass(frozen=True)
class Step:
    """One event of a random load."""

    kind: str
    a: int
    b: int


steps = st.lists(
    st.builds(
        Step,
        st.sampled_from(["submit", "submit", "submit", "finish", "cancel", "end", "lose", "pause"]),
        st.integers(0, 9),
        st.integers(0, 200),
    ),
    max_size=80,
)


class Load:
    """Drives a scheduler and keeps an independent account of what runs where."""

    def __init__(self) -> None:
        self.scheduler = KvScheduler(WATERMARK, AGEING_S, CAP, GROWTH)
        self.budgets = {"e0": 1000, "e1": 600}
        for name, budget in self.budgets.items():
            self.scheduler.add_engine(name, budget)
        self.now_s = 0.0
        self.calls: dict[str, tuple[int, int]] = {}
        self.running: dict[str, str] = {}
        self.pending: set[str] = set()
        self.log: list[tuple[str, str]] = []

    def poll(self) -> int:
        admissions = self.scheduler.poll(self.now_s)
        for admission in admissions:
            assert admission.ticket_id in self.pending
            assert admission.queued_s >= 0
            self.pending.remove(admission.ticket_id)
            self.running[admission.ticket_id] = admission.engine
            self.log.append((admission.ticket_id, admission.engine))
        self.check()
        return len(admissions)

    def check(self) -> None:
        stats = self.scheduler.stats()
        assert stats["queued"] == len(self.pending)
        assert stats["running"] == len(self.running)
        for engine, row in stats["engines"].items():
            here = [self.calls[t] for t, e in self.running.items() if e == engine]
            footprint = sum(prompt + min(new, GROWTH) for prompt, new in here)
            assert row["num_running"] == len(here)
            assert row["tokens_running"] == footprint
            assert row["tokens_reserved"] <= row["token_budget"]
            if len(here) > 1:
                assert footprint <= WATERMARK * row["token_budget"]

    def apply(self, step: Step) -> None:
        self.now_s += 0.5
        tickets = sorted(self.running)
        if step.kind == "submit":
            ticket = f"t{len(self.calls)}"
            prompt, new = step.b * 2 + 1, step.a * 15 + 1
            self.calls[ticket] = (prompt, new)
            self.pending.add(ticket)
            self.scheduler.submit(ticket, f"s{step.a}", prompt, new, step.b % 3, self.now_s)
        elif step.kind == "finish" and tickets:
            self.finish(tickets[step.b % len(tickets)])
        elif step.kind == "cancel" and self.calls:
            ticket = f"t{step.b % len(self.calls)}"
            known = ticket in self.pending or ticket in self.running
            assert self.scheduler.cancel(ticket) == known
            self.pending.discard(ticket)
            self.running.pop(ticket, None)
        elif step.kind == "end":
            self.scheduler.end_session(f"s{step.a}")
        elif step.kind == "lose":
            engine = f"e{step.a % 2}"
            lost = self.scheduler.remove_engine(engine)
            assert set(lost) == {t for t, e in self.running.items() if e == engine}
            for ticket in lost:
                del self.running[ticket]
            self.scheduler.add_engine(engine, self.budgets[engine])
        elif step.kind == "pause":
            self.scheduler.set_paused(step.b % 2 == 0)
        self.poll()

    def finish(self, ticket: str) -> None:
        prompt, new = self.calls[ticket]
        del self.running[ticket]
        assert self.scheduler.finish(ticket, prompt + new // 2, self.now_s)

    def drain(self) -> None:
        self.scheduler.set_paused(False)
        for _ in range(4 * len(self.calls) + 4):
            self.now_s += 1.0
            self.poll()
            if not self.running:
                assert not self.pending, "idle engines and a queue: something starves"
                return
            self.finish(min(self.running))
        raise AssertionError("did not drain")


@given(steps)
@settings(max_examples=150, deadline=None)
def test_budgets_hold_and_everything_is_admitted(load_steps: list[Step]) -> None:
    load = Load()
    for step in load_steps:
        load.apply(step)
    load.drain()


@given(steps)
@settings(max_examples=30, deadline=None)
def test_the_same_load_gives_the_same_admissions(load_steps: list[Step]) -> None:
    logs = []
    for _ in range(2):
        load = Load()
        for step in load_steps:
            load.apply(step)
        logs.append(load.log)
    assert logs[0] == logs[1]


def test_a_low_priority_call_overtakes_a_stream_of_urgent_ones() -> None:
    scheduler = KvScheduler(WATERMARK, AGEING_S, CAP, GROWTH)
    scheduler.add_engine("e0", 100)
    scheduler.submit("u0", "u0", 80, 10, 5, 0.0)
    scheduler.submit("patient", "p", 80, 10, 0, 0.0)
    for second in range(1, 60):
        scheduler.submit(f"u{second}", f"u{second}", 80, 10, 5, float(second))
        for admission in scheduler.poll(float(second)):
            if admission.ticket_id == "patient":
                assert second <= 5 * AGEING_S + 1
                return
            scheduler.finish(admission.ticket_id, 0, float(second))
    raise AssertionError("the patient call starved")


def test_a_refusal_is_a_value_error_that_names_the_ticket() -> None:
    scheduler = KvScheduler(WATERMARK, AGEING_S, CAP, GROWTH)
    with pytest.raises(ValueError, match=r"ticket 't' .*hard_context_cap 1000"):
        scheduler.submit("t", "s", CAP, 1, 0, 0.0)
    with pytest.raises(ValueError, match="high_watermark"):
        KvScheduler(0.0, AGEING_S, CAP, GROWTH)


def test_calls_wait_while_there_is_no_engine() -> None:
    scheduler = KvScheduler(WATERMARK, AGEING_S, CAP, GROWTH)
    scheduler.submit("t", "s", 10, 1, 0, 0.0)
    assert scheduler.poll(100.0) == []
    scheduler.add_engine("e0", 100)
    (admission,) = scheduler.poll(101.0)
    assert (admission.ticket_id, admission.engine, admission.queued_s) == ("t", "e0", 101.0)
