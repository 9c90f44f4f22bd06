"""Keys of sessions against a model of what engines would hold under them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.kv_keys import KvKey, KvKeys


@dataclass
class FakeEngine:
    """Its version, and the oldest version that wrote anything under each key."""

    name: str
    weight_version: int = 1
    incarnation: int = 1


def test_a_session_keeps_the_key_of_its_first_version_and_shares_with_no_older_one():
    keys, one, two = KvKeys("keep"), FakeEngine("one", 3), FakeEngine("two", 3)
    assert keys.grant("a", one) == KvKey("v3", 3)
    assert keys.grant("b", one) == KvKey("v3", 3)
    one.weight_version = two.weight_version = 5
    assert keys.grant("a", one) == KvKey("v3", 3)
    assert keys.grant("c", one) == KvKey("v5", 5)
    # Elsewhere, or in a new process, there is nothing of its own to read.
    assert keys.grant("a", two) == KvKey("v5", 5)
    assert keys.grant("a", one) == KvKey("v5", 5)
    assert keys.grant("b", one) == KvKey("v3", 3)
    one.incarnation, one.weight_version = 2, 6
    assert keys.grant("b", one) == KvKey("v6", 6)
    keys.end_session("c")
    assert keys.grant("c", one) == KvKey("v6", 6)


def test_flushed_caches_need_no_keys():
    keys, engine = KvKeys("flush"), FakeEngine("one", 3)
    assert keys.grant("a", engine) == KvKey("", 3)
    engine.weight_version = 4
    assert keys.grant("a", engine) == KvKey("", 4)


@pytest.mark.parametrize("policy", ["flush", "keep"])
@settings(deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["call", "call", "call", "update", "restart", "end"]),
            st.integers(0, 3),
            st.integers(0, 2),
        ),
        max_size=60,
    )
)
def test_nothing_older_than_the_bound_is_ever_under_a_key(policy, steps):
    keys = KvKeys(policy)
    engines = [FakeEngine(f"engine{i}") for i in range(3)]
    oldest: dict[tuple[str, str], int] = {}
    newest = 1

    def empty(engine: FakeEngine) -> None:
        for place in [place for place in oldest if place[0] == engine.name]:
            del oldest[place]

    for action, session, index in steps:
        engine = engines[index]
        if action == "call":
            key = keys.grant(f"session{session}", engine)
            place = (engine.name, key.extra_key)
            read = oldest.setdefault(place, engine.weight_version)
            assert key.version_lower_bound <= read <= engine.weight_version
        elif action == "update":  # an engine may miss some
            newest += 1
            engine.weight_version = newest
            if policy == "flush":
                empty(engine)
        elif action == "restart":
            engine.incarnation += 1
            engine.weight_version = newest
            empty(engine)
        else:
            keys.end_session(f"session{session}")
