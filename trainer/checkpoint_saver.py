"""Saves checkpoints beside training.

    main thread                          a thread, on each rank
    begin   plan and snapshot -------->  write   this rank's file
            (training stands still)      gather  what each rank wrote, at the first
    steps                                seal    manifest, rename, delete the oldest: first rank
    poll, wait  <--- Saved or error ---  tell    every rank how it ended

Owner: the trainer's main thread, which makes the same calls on every rank. At most one save is in
flight. Invariants: a thread touches no tensor that an optimizer changes; a checkpoint exists once
every rank's file is on disk, and a save that fails leaves nothing behind.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import threading
import time
from collections.abc import Callable
from pathlib import Path

from trainer import ranks, snapshot
from trainer.checkpoint import CheckpointStore, Progress
from trainer.device import Device
from trainer.errors import CheckpointWriteError
from trainer.snapshot import HostBuffers, Snapshot, Written
from trainer.step import Learner


@dataclasses.dataclass(frozen=True)
class Saved:
    """A checkpoint that is durable."""

    path: Path
    progress: Progress
    num_bytes: int  # of the ranks' files
    blocked_s: float  # how long training stood still for it
    write_s: float  # from the snapshot to the sealed checkpoint


@dataclasses.dataclass(frozen=True)
class _InFlight:
    name: str
    begun_s: float
    future: concurrent.futures.Future[Saved]


def in_thread(work: Callable[[], None]) -> None:
    """Runs `work` in a thread that a process need not wait for."""
    threading.Thread(target=work, name="checkpoint", daemon=True).start()


class CheckpointSaver:
    """Writes a learner's state to a store."""

    def __init__(
        self,
        store: CheckpointStore,
        device: Device,
        timeout_s: float = 600.0,
        *,
        hold: Callable[[Snapshot], Snapshot] | None = None,
        start: Callable[[Callable[[], None]], None] = in_thread,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Every rank makes one at the same time.

        Args:
          timeout_s: how long `wait` waits from a save's beginning, and ranks for one another.
          hold: gives a snapshot memory of its own; HostBuffers unless a test shows the need.
          start: runs the writing of `begin` elsewhere.
        """
        self._store = store
        self._device = device
        self._timeout_s = timeout_s
        self._hold = hold or HostBuffers(device).hold
        self._start = start
        self._clock = clock
        self._group = device.host_group(timeout_s)
        self._is_group_broken = False
        self._running: _InFlight | None = None

    @property
    def in_flight(self) -> bool:
        """True from `begin` until `poll` or `wait` told how it ended."""
        return self._running is not None

    def save(self, learner: Learner, progress: Progress) -> Saved:
        """Writes a checkpoint; it is durable when this returns. Nothing is copied for it.

        Raises:
          CheckpointWriteError: there is none.
        """
        begun_s = self._clock()
        folder, taken = self._take(learner, progress)
        try:
            saved = self._write(taken, folder, progress, 0.0)
        finally:
            self._renew_group()
        return dataclasses.replace(saved, blocked_s=self._clock() - begun_s)

    def begin(self, learner: Learner, progress: Progress) -> None:
        """Takes a snapshot and begins to write it; training may go on when this returns.

        Raises:
          CheckpointWriteError: it could not begin.
        """
        begun_s = self._clock()
        folder, taken = self._take(learner, progress)
        held = self._hold(taken)
        del taken
        blocked_s = self._clock() - begun_s
        future: concurrent.futures.Future[Saved] = concurrent.futures.Future()

        def work() -> None:
            try:
                future.set_result(self._write(held, folder, progress, blocked_s))
            except BaseException as error:  # noqa: BLE001 - raised by poll or wait
                future.set_exception(error)

        self._running = _InFlight(folder.name, begun_s, future)
        self._start(work)

    def poll(self) -> Saved | None:
        """The save in flight, if it ended on every rank.

        Raises:
          CheckpointWriteError: it failed.
        """
        return self._ended(0.0)

    def wait(self) -> Saved | None:
        """Waits for the save in flight, if there is one.

        Raises:
          CheckpointWriteError: it failed, or has not ended in time; then it is still in flight.
        """
        if self._running is None:
            return None
        name = self._running.name
        saved = self._ended(max(0.0, self._running.begun_s + self._timeout_s - self._clock()))
        if saved is None:
            raise CheckpointWriteError(
                f"{name} has not been written for {self._timeout_s:.0f} s and still is: is the disk "
                "hung? If it is only slow, raise trainer.checkpoint.timeout_s"
            )
        return saved

    def _ended(self, timeout_s: float) -> Saved | None:
        if self._running is None:
            return None
        future = self._running.future
        concurrent.futures.wait([future], timeout_s)
        if not ranks.all_true(future.done(), self._device.torch_device):
            return None
        self._running = None
        self._renew_group()
        return future.result()

    def _renew_group(self) -> None:
        """A group in which one rank came too late once lets nobody through any more."""
        if self._group is None or ranks.all_true(
            not self._is_group_broken, self._device.torch_device
        ):
            return
        self._group = self._device.host_group(self._timeout_s)
        self._is_group_broken = False

    def _take(self, learner: Learner, progress: Progress) -> tuple[Path, Snapshot]:
        if self._running is not None:
            raise CheckpointWriteError(f"{self._running.name} is still being written")

        def opened() -> Path:
            try:
                return self._store.open(progress)
            except OSError as error:
                raise CheckpointWriteError(f"no checkpoint can be begun: {error}") from error

        folder = ranks.from_first(opened)
        return folder, snapshot.take(learner, folder)

    def _write(self, taken: Snapshot, folder: Path, progress: Progress, blocked_s: float) -> Saved:
        begun_s = self._clock()
        part: Written | str
        try:
            part = snapshot.write(taken, folder)
        except Exception as error:  # noqa: BLE001 - told to every rank
            part = f"{type(error).__name__}: {error}"
        try:
            parts = ranks.to_first(part, self._group)
            path, num_bytes = ranks.from_first(
                lambda: self._seal(taken, folder, progress, parts), self._group
            )
        except CheckpointWriteError:
            raise
        except Exception as error:
            self._is_group_broken = True
            if ranks.is_first():
                self._store.discard(folder)
            raise CheckpointWriteError(
                f"{folder.name}: another rank was lost or late: {error}"
            ) from error
        return Saved(path, progress, num_bytes, blocked_s, self._clock() - begun_s)

    def _seal(
        self, taken: Snapshot, folder: Path, progress: Progress, parts: list[Written | str]
    ) -> tuple[Path, int]:
        try:
            written = [part for part in parts if isinstance(part, Written)]
            if len(written) < len(parts):
                told = (f"rank {r}: {p}" for r, p in enumerate(parts) if isinstance(p, str))
                raise CheckpointWriteError("; ".join(told))
            assert taken.metadata is not None
            snapshot.finish(taken.metadata, written, folder)
            digests = {part.file_name: part.sha256 for part in written if part.file_name}
            path = self._store.seal(folder, progress, taken.has_optimizer, digests)
        except Exception as error:
            self._store.discard(folder)
            left = self._store.paths()
            raise CheckpointWriteError(
                f"{folder.name} was not written and is removed: {error}; the newest checkpoint is "
                f"{left[-1] if left else 'none'}: make room there, or lower trainer.checkpoints_kept"
            ) from error
        return path, sum(part.num_bytes for part in written)
