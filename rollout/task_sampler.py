"""Order of the training tasks: a seeded shuffle, one epoch after another.

Owner: rollout.manager. Pure; the ledger keeps `SamplerState` and saves it in the transaction
that starts the group, so that a restart goes on with the very next task. Tasks added during
an epoch join at the next one.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class SamplerState:
    """Where the sampler stands. `random_state` is that of random.Random after the shuffle."""

    epoch: int
    position: int  # next index into `order`
    order: tuple[str, ...]  # task ids of this epoch
    random_state: str  # JSON


def initial_state(seed: int) -> SamplerState:
    """Before the first epoch."""
    return SamplerState(0, 0, (), _dump(random.Random(seed)))


def next_task(state: SamplerState, task_ids: Sequence[str]) -> tuple[str, SamplerState]:
    """The next task and the state after it; a new epoch shuffles `task_ids` (not empty)."""
    if state.position >= len(state.order):
        generator = random.Random()
        generator.setstate(_load(state.random_state))
        order = sorted(task_ids)
        generator.shuffle(order)
        state = SamplerState(state.epoch + 1, 0, tuple(order), _dump(generator))
    task = state.order[state.position]
    return task, SamplerState(state.epoch, state.position + 1, state.order, state.random_state)


def _dump(generator: random.Random) -> str:
    return json.dumps(generator.getstate())


def _load(text: str) -> Any:
    version, internal, gauss = json.loads(text)
    return version, tuple(internal), gauss
