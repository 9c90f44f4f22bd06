"""What carries an update from the trainer to the engines that wait for it: one interface.

Purpose: the publisher knows windows and results; a path knows how bytes reach an engine. Owner:
WeightPublisher opens one path by its setting and closes it. Invariants, which each path keeps:

* An engine's `touched` is True as soon as its weights may have changed, and it is False only where
  they cannot have: the manager lets that engine go on serving its old version.
* An engine's `complete` is True only after it said that it has everything.
* One engine's failure never stops the others; every wait has a deadline.
* The version is never set: the manager does that when the window closes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from weightsync.plan import Plan
    from weightsync.tensor_source import TensorSource


@dataclass(frozen=True, slots=True)
class Update:
    """One update, as every engine gets it."""

    plan: Plan
    source: TensorSource
    """They do not change while the update runs."""
    weight_version: int


@dataclass(frozen=True, slots=True)
class Target:
    """An engine that is paused and waits."""

    engine: str
    url: str
    weight_version: int
    """What it serves until now; 0: nothing yet."""
    tensor_parallel: int = 1
    """Ranks that hold a share of the weights each."""


@dataclass(frozen=True, slots=True)
class EngineResult:
    """What became of one engine."""

    engine: str
    complete: bool
    touched: bool
    """Whether its weights may have changed."""
    error: str
    duration_s: float
    digest: int = 0
    """Stands for every byte that it holds, as it found its parameters; equal for equal weights.
    0: they were not read back."""


class UpdatePath(Protocol):
    """Carries updates, one at a time."""

    async def prepare(self, update: Update) -> None:
        """Does what needs no engine, before any is paused. Raises OSError."""

    async def send(
        self,
        update: Update,
        targets: Sequence[Target],
        epoch: int,
        results: list[EngineResult],
    ) -> None:
        """Sends to all targets at once, in the window of `epoch`.

        `results` comes with one untouched row a target, and says of each how far it came when this
        ends, however it ends: also by an error, or cancelled.
        """

    async def finish(self) -> None:
        """Removes what `prepare` and `send` made for one update; called after each, always."""

    async def close(self) -> None:
        """Removes what is kept between updates. Safe to repeat."""
