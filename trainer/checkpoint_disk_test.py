"""Checkpoints on a small file system that fills up: nothing that was saved is lost."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout.client import write_sequences
from trainer import testbed
from trainer.checkpoint import CheckpointStore, Progress
from trainer.checkpoint_saver import CheckpointSaver
from trainer.checkpoint_saver_test import step
from trainer.checkpoint_test import make_learner
from trainer.config import CheckpointConfig, SftConfig, TrainerConfig
from trainer.device import Device
from trainer.errors import CheckpointWriteError
from trainer.sft_test import run
from trainer.stage_runner import StageRequest, StageRunner

_NUM_STEPS = 8


class Disk:
    """A file system of its own, and a file that leaves as little room as is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._filler = folder / "filler"
        self.page = os.statvfs(folder).f_frsize

    @property
    def num_free(self) -> int:
        """Free pages."""
        return os.statvfs(self.folder).f_bavail

    def fill(self, leaving: int = 0) -> None:
        self.empty()
        with self._filler.open("wb") as file:
            file.write(b"x" * (self.num_free - leaving) * self.page)
        assert self.num_free == leaving

    def empty(self) -> None:
        self._filler.unlink(missing_ok=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)], check=True, timeout=10
    )
    try:
        yield Disk(folder)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, timeout=10)


@pytest.mark.parametrize("asynchronous", [True, False], ids=["asynchronous", "synchronous"])
def test_a_save_without_room_leaves_what_was_there(
    disk: Disk, model_dir: Path, device: Device, asynchronous: bool
) -> None:
    folder = disk.folder / "checkpoints"
    store = CheckpointStore(folder, kept=3)
    learner, saver = make_learner(model_dir, device), CheckpointSaver(store, device)
    step(learner, 1)
    room = disk.num_free
    good = saver.save(learner, Progress("sft", 1)).path
    needed = room - disk.num_free
    assert needed > 20
    # From no room at all up to all but the last file, which is the manifest.
    for leaving in (0, 1, needed // 3, needed - 6, *range(needed - 4, needed)):
        disk.fill(leaving)
        with pytest.raises(CheckpointWriteError, match="No space left on device"):
            if asynchronous:
                saver.begin(learner, Progress("sft", 2))
                saver.wait()
            else:
                saver.save(learner, Progress("sft", 2))
        assert list(folder.iterdir()) == [good]
        assert disk.num_free == leaving
        latest = store.latest()
        assert latest is not None
        assert latest.path == good
    disk.fill(needed)
    assert saver.save(learner, Progress("sft", 2)).path.name == "000002-sft-2"


def make_runner(disk: Disk, model: Path, device: Device, **checkpoint: Any) -> StageRunner:
    config = TrainerConfig(
        model_dir=model,
        run_dir=disk.folder / "run",
        checkpoint=CheckpointConfig(**checkpoint),
        sft=SftConfig(batch_rows=8, checkpoint_every_steps=2),
    )
    return StageRunner(config, device, None)


def run_sft(
    runner: StageRunner, disk: Disk, data: Path, fill_at: int, empty_at: int, num_steps: int
) -> None:
    """Runs the stage on a disk that fills up and is emptied as these steps end."""
    write_sequences(data, testbed.copy_rows(40))
    folder = runner.config.run_dir / "checkpoints"

    def writing() -> bool:
        return any(path.name.startswith(".partial") for path in folder.iterdir())

    def watch() -> None:
        num_done = len(runner.metrics.since("sft", 1))
        if num_done in {fill_at, empty_at}:
            # What is being written has ended, one way or the other.
            deadline = time.monotonic() + 60
            while writing():
                assert time.monotonic() < deadline
                time.sleep(0.005)
        if num_done == fill_at:
            disk.fill()
        elif num_done == empty_at:
            disk.empty()

    runner.metrics.add_listener(watch)
    runner.run_stage(StageRequest("sft", "sft", str(data), num_steps))
    run(runner)


@pytest.mark.parametrize("asynchronous", [True, False], ids=["asynchronous", "synchronous"])
def test_the_run_goes_on_and_saves_again_once_there_is_room(
    tmp_path: Path,
    disk: Disk,
    model_dir: Path,
    device: Device,
    asynchronous: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    runner = make_runner(disk, model_dir, device, asynchronous=asynchronous)
    run_sft(runner, disk, tmp_path / "data", 3, 6, _NUM_STEPS)
    status = runner.status()
    assert (status.state, status.error) == ("finished", "")
    records = runner.metrics.since("sft", 1)
    assert [r.step for r in records] == list(range(1, _NUM_STEPS + 1))
    assert sum(r.scalars.get("checkpoint_failed", 0.0) for r in records) == 1.0
    assert "a checkpoint failed: .partial-000002-sft-4 was not written and is removed" in (
        caplog.text
    )
    names = [p.name for p in (disk.folder / "run" / "checkpoints").iterdir()]
    assert sorted(names) == ["000001-sft-2", "000002-sft-6", "000003-sft-8"]
    # The lines that did not fit are there.
    text = (disk.folder / "run" / "metrics" / "sft.jsonl").read_text()
    assert len(text.splitlines()) == _NUM_STEPS
    again = make_runner(disk, model_dir, device)
    assert again.run_stage(StageRequest("sft", "sft", "", _NUM_STEPS)) == _NUM_STEPS


def test_stop_on_failure_stops_and_resumes_from_what_was_saved(
    tmp_path: Path, disk: Disk, model_dir: Path, device: Device
) -> None:
    runner = make_runner(disk, model_dir, device, on_failure="stop", asynchronous=False)
    run_sft(runner, disk, tmp_path / "data", 3, -1, _NUM_STEPS)
    status = runner.status()
    assert (status.state, status.step) == ("failed", 4)
    assert "CheckpointWriteError" in status.error
    assert "No space left on device" in status.error
    assert "make room there" in status.error
    disk.empty()
    again = make_runner(disk, model_dir, device)
    stage = StageRequest("sft", "sft", str(tmp_path / "data"), _NUM_STEPS)
    assert again.run_stage(stage) == 2
    run(again)
    assert again.status().state == "finished"


def test_a_stage_whose_end_cannot_be_saved_fails_and_a_stop_tries_again(
    tmp_path: Path, disk: Disk, model_dir: Path, device: Device
) -> None:
    runner = make_runner(disk, model_dir, device)
    run_sft(runner, disk, tmp_path / "data", 3, -1, 3)
    status = runner.status()
    assert status.state == "failed"
    assert "No space left on device" in status.error
    disk.empty()
    runner.stop(save_checkpoint=True)
    runner.run()
    again = make_runner(disk, model_dir, device)
    assert again.run_stage(StageRequest("sft", "sft", "", 3)) == 3
