"""When a run saves, what it tells of it, and what a save that fails does to it.

Owner: the trainer's main thread, through StageRunner; on several ranks all make the same calls. A
step is safe once the checkpoint after it is sealed, not when its save began: only then the manager is
told, and `saved` says so. A process that ends before goes on from the checkpoint before, as the
manager's ledger then does.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from trainer.checkpoint import Checkpoint, CheckpointStore, Progress
from trainer.checkpoint_saver import CheckpointSaver, Saved
from trainer.config import CheckpointConfig
from trainer.errors import CheckpointWriteError
from trainer.step import Learner

_log = logging.getLogger(__name__)


class RunCheckpoints:
    """The checkpoints of a run that goes on."""

    def __init__(
        self,
        store: CheckpointStore,
        saver: CheckpointSaver,
        config: CheckpointConfig,
        loaded: Checkpoint | None,
        on_saved: Callable[[Saved], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args: on_saved is told of each checkpoint once it is durable, on every rank."""
        self.saved = loaded.progress if loaded else Progress()  # of the newest checkpoint
        # None for a checkpoint of the run that this one replays.
        self._newest = loaded.path if loaded and loaded.path in store.paths() else None
        self._saver = saver
        self._config = config
        self._on_saved = on_saved
        self._clock = clock
        self._scalars: dict[str, float] = {}

    def periodic(self, learner: Learner, progress: Progress) -> None:
        """Begins a save that is due; without `asynchronous`, it is durable when this returns.

        One still in flight is waited for. One that fails is told and counted, and the run goes on
        to the next that is due, unless `on_failure` is "stop".

        Raises:
          CheckpointWriteError: on_failure is "stop".
        """
        with self._blocking(), self._tolerating():
            self._settle(self._saver.wait())
        if self._saver.in_flight:
            return
        with self._blocking(), self._tolerating():
            if self._config.asynchronous:
                self._saver.begin(learner, progress)
            else:
                self._settle(self._saver.save(learner, progress))

    def now(self, learner: Learner, progress: Progress) -> Path:
        """Saves, durably.

        Raises:
          CheckpointWriteError: there is no new checkpoint.
        """
        with self._blocking():
            self.settle()
            saved = self._saver.save(learner, progress)
            self._settle(saved)
        return saved.path

    def of_the_moment(self, learner: Learner, progress: Progress) -> Path | None:
        """The checkpoint that holds `progress`, after a save if there is none yet.

        Returns None when that failed and the run goes on.

        Raises:
          CheckpointWriteError: it failed and on_failure is "stop".
        """
        self.settle()
        if progress == self.saved and self._newest is not None:
            return self._newest
        with self._tolerating():
            return self.now(learner, progress)
        return None

    def settle(self) -> None:
        """Waits for the save in flight, and tells how it ended; raises nothing about it."""
        try:
            self._settle(self._saver.wait())
        except CheckpointWriteError as error:
            self._note(error)

    def poll(self) -> None:
        """Tells of the save in flight if it has ended.

        Raises:
          CheckpointWriteError: it failed and on_failure is "stop".
        """
        with self._tolerating():
            self._settle(self._saver.poll())

    def take_scalars(self) -> dict[str, float]:
        """Metrics of the saves since the last call; empty when there was none."""
        scalars, self._scalars = self._scalars, {}
        return scalars

    def _settle(self, saved: Saved | None) -> None:
        if saved is None:
            return
        self.saved, self._newest = saved.progress, saved.path
        self._scalars["checkpoint_write_s"] = saved.write_s
        self._scalars["checkpoint_bytes"] = float(saved.num_bytes)
        self._on_saved(saved)

    def _note(self, error: CheckpointWriteError) -> None:
        self._add("checkpoint_failed", 1.0)
        _log.warning("a checkpoint failed: %s", error)

    def _add(self, name: str, value: float) -> None:
        self._scalars[name] = self._scalars.get(name, 0.0) + value

    @contextlib.contextmanager
    def _blocking(self) -> Iterator[None]:
        begun_s = self._clock()
        try:
            yield
        finally:
            self._add("checkpoint_blocked_s", self._clock() - begun_s)

    @contextlib.contextmanager
    def _tolerating(self) -> Iterator[None]:
        try:
            yield
        except CheckpointWriteError as error:
            self._note(error)
            if self._config.on_failure == "stop":
                raise
