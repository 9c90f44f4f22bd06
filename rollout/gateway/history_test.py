"""History: what extends, what branches, what is asked again."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.gateway.history import ROOT, History, Message, PlanKind


def said(text: str) -> Message:
    return Message("assistant", text)


def asked(text: str) -> Message:
    return Message("user", text)


def add(history: History, parent: int, new: list[Message], answer: str) -> None:
    number = len(history.turns)
    history.add(
        parent, new, said(answer), array("i", [number]), array("i", [100 + number]), cut=False
    )


def test_a_conversation_extends() -> None:
    history = History()
    plan = history.plan([asked("a")])
    assert (plan.kind, plan.parent, plan.new_messages) == (PlanKind.EXTEND, ROOT, (asked("a"),))
    add(history, ROOT, [asked("a")], "x")
    plan = history.plan([asked("a"), said("x"), asked("b")])
    assert (plan.kind, plan.parent, plan.new_messages) == (PlanKind.EXTEND, 0, (asked("b"),))
    add(history, 0, [asked("b")], "y")
    assert history.ids(1) == [0, 100, 1, 101]
    assert history.length(1) == 4


def test_changed_assistant_text_branches_before_it() -> None:
    history = History()
    add(history, ROOT, [asked("a")], "x")
    add(history, 0, [asked("b")], "y")
    plan = history.plan([asked("a"), said("x"), asked("b"), said("edited"), asked("c")])
    assert (plan.kind, plan.parent) == (PlanKind.BRANCH, 0)
    assert plan.new_messages == (asked("b"), said("edited"), asked("c"))
    plan = history.plan([asked("other")])
    assert (plan.kind, plan.parent) == (PlanKind.BRANCH, ROOT)


def test_a_resend_names_the_turn_that_it_repeats() -> None:
    history = History()
    add(history, ROOT, [asked("a")], "x")
    plan = history.plan([asked("a")])
    assert (plan.kind, plan.parent, plan.resent) == (PlanKind.RESEND, ROOT, 0)
    add(history, ROOT, [asked("a")], "x")
    # Twins with equal text: the client got the newer one.
    assert history.plan([asked("a"), said("x"), asked("b")]).parent == 1
    add(history, 1, [asked("b")], "y")
    assert history.plan([asked("a")]).kind is PlanKind.BRANCH
    assert history.plan([asked("a"), said("x"), asked("b"), said("y"), asked("c")]).parent == 2


@pytest.mark.parametrize("messages", [[], [asked("a"), said("x")]], ids=["none", "assistant last"])
def test_nothing_new_is_refused(messages: list[Message]) -> None:
    with pytest.raises(ValueError, match="last message"):
        History().plan(messages)


@given(st.lists(st.tuples(st.integers(-1, 20), st.sampled_from("ab"), st.sampled_from("xy"))))
@settings(max_examples=200, deadline=None)
def test_a_plan_always_renders_exactly_what_its_parent_lacks(
    moves: list[tuple[int, str, str]],
) -> None:
    """Whatever tree arose, parent chain + new messages are the client's messages."""
    history = History()
    chains: dict[int, list[Message]] = {ROOT: []}
    for start, question, answer in moves:
        origin = min(start, len(history.turns) - 1)
        messages = [*chains[origin], asked(question)]
        plan = history.plan(messages)
        assert [*chains[plan.parent], *plan.new_messages] == messages
        assert len(chains[plan.parent]) >= len(chains[origin])
        add(history, plan.parent, list(plan.new_messages), answer)
        chains[len(history.turns) - 1] = [*messages, said(answer)]
