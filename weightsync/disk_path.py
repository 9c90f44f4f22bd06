"""Updates through files: SGLang's `update_weights_from_disk`.

A folder of safetensors, one file a bucket, is written under a temporary name before engines are
paused, and renamed when it is whole; every engine is told to read it, and it is removed when all
have answered. Owner: WeightPublisher. Invariants: those of update_path.py; the directory is this
trainer's own, and folders that a killed trainer left there go when the next one starts (`sweep`).

What is checked: that each engine says it read everything. What cannot be: whether the names and
shapes were those of its model (SGLang skips unknown names and keeps the old values of missing ones),
whether the bytes it read are those written, and whether a call that was delayed reaches an engine
outside the window: SGLang takes this call at any time. An engine that answered anything but success
counts as touched, because a failed load answers as a refused one does.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from weightsync.config import WeightSyncConfig
from weightsync.stock_calls import Answer, EngineCalls, Progress, with_head
from weightsync.update_path import EngineResult, Target, Update

FOLDER_PREFIX = "swe_rl_ws_"


def sweep_folders(directory: Path) -> int:
    """Removes the updates that killed senders left in their directory; returns how many."""
    left = list(directory.glob(f"{FOLDER_PREFIX}*"))
    for folder in left:
        shutil.rmtree(folder, ignore_errors=True)
    return len(left)


class DiskPath:
    """Sends through a folder that every engine sees."""

    def __init__(self, config: WeightSyncConfig) -> None:
        """Nothing is written yet; the directory may not exist."""
        assert config.disk.directory is not None  # the configuration's own check
        self._timeout_s = config.disk.load_timeout_s
        self._directory = config.disk.directory.absolute()
        self._folder: Path | None = None

    async def prepare(self, update: Update) -> None:
        """Writes the folder. Raises OSError when the disk does not take it."""
        name = f"{FOLDER_PREFIX}{update.weight_version}_{secrets.token_hex(8)}"
        self._folder = self._directory / name
        writing = asyncio.create_task(asyncio.to_thread(write_folder, update, self._folder))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            # A thread cannot be cancelled: `finish` must not remove the folder before it is there.
            await asyncio.wait({writing})
            raise

    async def send(
        self,
        update: Update,
        targets: Sequence[Target],
        epoch: int,
        results: list[EngineResult],
    ) -> None:
        """Lets every engine read the folder; see UpdatePath."""
        started_s = time.monotonic()
        rows = [Progress(target) for target in targets]
        calls = EngineCalls()
        try:
            await asyncio.gather(*(self._load(calls, row, started_s) for row in rows))
        finally:
            results[:] = [row.result() for row in rows]
            await calls.close()

    async def finish(self) -> None:
        """Removes the folder."""
        folder, self._folder = self._folder, None
        if folder is not None:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            await asyncio.to_thread(shutil.rmtree, _unfinished(folder), ignore_errors=True)

    async def close(self) -> None:
        """Nothing is kept."""

    async def _load(self, calls: EngineCalls, row: Progress, started_s: float) -> None:
        # From here on the engine may read, whatever becomes of the call.
        row.touched = True
        body = {
            "model_path": str(self._folder),
            "load_format": "safetensors",  # the server's own may be `dummy`
            "flush_cache": False,
            "abort_all_requests": False,
        }
        answer: Answer = await calls.post(
            row.target, "/update_weights_from_disk", body, self._timeout_s
        )
        row.touched = answer.was_sent
        row.complete, row.error = not answer.error, answer.error
        row.seconds = time.monotonic() - started_s


def write_folder(update: Update, folder: Path) -> None:
    """Writes one file a bucket, a tied head too; `folder` exists whole or not at all.

    Raises OSError.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    unfinished = _unfinished(folder)
    unfinished.mkdir(parents=True)
    update = with_head(update)
    plan, tensors = update.plan, update.source.whole()
    for index, bucket in enumerate(plan.buckets):
        path = unfinished / f"bucket-{index:05}.safetensors"
        own = {
            # A file's tensors must not share memory, and a tied head does.
            plan.tensors[place].name: tensors[place].clone()
            for place in range(bucket.first, bucket.first + len(bucket.offsets))
        }
        try:
            save_file(own, path, metadata={"format": "pt"})
        except SafetensorError as error:  # its own class also for a full disk
            raise OSError(f"{path}: {error}") from error
        with path.open("rb") as written:
            os.fsync(written.fileno())
    unfinished.rename(folder)


def _unfinished(folder: Path) -> Path:
    return folder.with_name(folder.name + ".unfinished")
