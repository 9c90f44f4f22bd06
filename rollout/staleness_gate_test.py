"""The bound on groups under way, and what it promises about staleness."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.staleness_gate import StalenessGate


@pytest.mark.parametrize(
    ("max_staleness", "unconsumed", "startable"),
    [
        pytest.param(0, 0, 4, id="synchronous"),
        pytest.param(0, 4, 0, id="synchronous_batch_in_training"),
        pytest.param(1, 3, 5, id="one_ahead"),
        pytest.param(1, 8, 0, id="full"),
        pytest.param(1, 99, 0, id="after_a_rewind"),
    ],
)
def test_what_may_start(max_staleness: int, unconsumed: int, startable: int) -> None:
    assert StalenessGate(max_staleness, batch_groups=4).num_startable(unconsumed) == startable


def simulate(
    gate: StalenessGate, seed: int, num_events: int, *, in_order: bool
) -> tuple[list[int], int]:
    """A run in which groups start, end and are trained in random turns.

    Returns each trained group's updates between its start and its batch, and the most groups that
    were ever under way. The trainer takes the oldest ready groups, in whole batches.
    """
    source = random.Random(seed)
    updates, most = 0, 0
    open_, ready, staleness = list[int](), list[int](), list[int]()  # version at the start
    for _ in range(num_events):
        event = source.choice(("start", "end", "end", "train"))
        if event == "start":
            startable = gate.num_startable(len(open_) + len(ready))
            open_ += [updates] * source.randint(0, startable)
        elif event == "end" and open_:
            ready.append(open_.pop(0 if in_order else source.randrange(len(open_))))
        elif event == "train" and len(ready) >= gate.batch_groups:
            ready.sort()
            batch, ready = ready[: gate.batch_groups], ready[gate.batch_groups :]
            staleness += [updates - version for version in batch]
            updates += 1
        most = max(most, len(open_) + len(ready))
    return staleness, most


@settings(deadline=None)
@given(st.integers(0, 4), st.integers(1, 5), st.integers(0, 2**32))
def test_groups_that_end_in_order_are_never_staler_than_max_staleness(
    max_staleness: int, batch_groups: int, seed: int
) -> None:
    gate = StalenessGate(max_staleness, batch_groups)
    staleness, most = simulate(gate, seed, 300, in_order=True)
    assert max(staleness, default=0) <= max_staleness
    assert most <= (max_staleness + 1) * batch_groups


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(0, 2**32))
def test_synchronous_is_never_stale_whatever_the_order_of_ends(
    batch_groups: int, seed: int
) -> None:
    staleness, _ = simulate(StalenessGate(0, batch_groups), seed, 300, in_order=False)
    assert set(staleness) <= {0}


def test_the_bound_is_used_to_the_full() -> None:
    gate = StalenessGate(max_staleness=2, batch_groups=3)
    staleness, most = simulate(gate, 1, 3000, in_order=True)
    assert max(staleness) == 2 and most == gate.limit == 9
