"""Saves beside training: what is written is what was there when the save began."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer import batch as batching
from trainer import checkpoint_state, loss, testbed
from trainer.batch import MicroBatch
from trainer.checkpoint import CheckpointStore, Progress
from trainer.checkpoint_saver import CheckpointSaver, Saved
from trainer.checkpoint_test import make_learner
from trainer.config import CheckpointConfig
from trainer.device import Device
from trainer.errors import CheckpointWriteError
from trainer.run_checkpoints import RunCheckpoints
from trainer.snapshot import Snapshot
from trainer.step import Learner


@functools.cache
def micro_batches() -> list[MicroBatch]:
    rows = [batching.from_proto(row, testbed.VOCAB) for row in testbed.copy_rows(8)]
    return batching.make_micro_batches(rows, 1000, testbed.VOCAB, torch.device("cpu"))


def step(learner: Learner, number: int) -> float:
    def nll(_index: int, _micro: MicroBatch, new: torch.Tensor) -> torch.Tensor:
        return loss.sft_loss(new, torch.ones_like(new, dtype=torch.bool), torch.ones_like(new))

    return learner.update(micro_batches(), nll, number).loss


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {n: t.clone() for n, t in learner.policy.export_named_tensors()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


class Later:
    """Runs the writing of saves when it is told to."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []

    def __call__(self, work: Callable[[], None]) -> None:
        self.waiting.append(work)

    def write(self) -> None:
        thread = threading.Thread(target=self.waiting.pop(0))
        thread.start()
        thread.join()


def live(snapshot: Snapshot) -> Snapshot:
    """What a saver would write if it took no snapshot."""
    return snapshot


@pytest.mark.parametrize("hold", [None, live], ids=["snapshot", "no_snapshot"])
def test_steps_taken_while_a_save_is_written_are_not_in_it(
    tmp_path: Path, model_dir: Path, device: Device, hold: Any
) -> None:
    learner, later = make_learner(model_dir, device), Later()
    store = CheckpointStore(tmp_path / "checkpoints", kept=3)
    saver = CheckpointSaver(store, device, hold=hold, start=later)
    # The second save reuses the memory of the first.
    losses: list[float] = []
    for number in (1, 3):
        step(learner, number)
        begun_with = weights(learner)
        saver.begin(learner, Progress("sft", number))
        assert saver.in_flight
        assert saver.poll() is None
        losses = [step(learner, number + 1)]
        assert not same(weights(learner), begun_with)
        later.write()
        saved = saver.wait()
        assert saved is not None
        assert not saver.in_flight
    losses.append(step(learner, 5))
    again = make_learner(model_dir, device)
    latest = store.latest()
    assert latest is not None
    assert latest.progress.stage_step == 3
    checkpoint_state.load_model(again, latest)
    is_torn = not same(weights(again), begun_with)
    assert is_torn == (hold is live)
    checkpoint_state.load_all(again, latest)
    # The first step shows the weights, the next one the optimizer's state.
    resumed = [step(again, 4), step(again, 5)]
    assert (resumed == losses) == (hold is not live)


def test_one_save_at_a_time_and_every_wait_ends(
    tmp_path: Path, model_dir: Path, device: Device
) -> None:
    learner, later = make_learner(model_dir, device), Later()
    store = CheckpointStore(tmp_path / "checkpoints", kept=3)
    saver = CheckpointSaver(store, device, timeout_s=0.01, start=later)
    assert saver.wait() is None
    saver.begin(learner, Progress("sft", 1))
    with pytest.raises(CheckpointWriteError, match="000001-sft-1 is still being written"):
        saver.begin(learner, Progress("sft", 2))
    with pytest.raises(CheckpointWriteError, match=r"still is.*trainer\.checkpoint\.timeout_s"):
        saver.wait()
    assert saver.in_flight
    assert store.paths() == []
    later.write()
    saved = saver.poll()
    assert saved is not None
    assert store.paths() == [saved.path]
    assert saved.num_bytes == sum(p.stat().st_size for p in saved.path.glob("*.distcp"))


def made(
    tmp_path: Path, device: Device, **config: Any
) -> tuple[CheckpointStore, RunCheckpoints, Later, list[Saved]]:
    store, later = CheckpointStore(tmp_path / "checkpoints", kept=2), Later()
    saver = CheckpointSaver(store, device, timeout_s=0.01, start=later)
    told: list[Saved] = []
    run = RunCheckpoints(store, saver, CheckpointConfig(**config), None, told.append)
    return store, run, later, told


def test_a_step_counts_as_saved_once_its_checkpoint_is_sealed(
    tmp_path: Path, model_dir: Path, device: Device
) -> None:
    learner = make_learner(model_dir, device)
    store, run, later, told = made(tmp_path, device)
    run.periodic(learner, Progress("sft", 1))
    run.poll()
    assert (run.saved, told, store.paths()) == (Progress(), [], [])
    later.write()
    run.poll()
    assert run.saved == Progress("sft", 1)
    assert [s.path for s in told] == store.paths()
    scalars = run.take_scalars()
    assert scalars.keys() == {"checkpoint_blocked_s", "checkpoint_write_s", "checkpoint_bytes"}
    assert run.take_scalars() == {}
    # What is asked for by name is there, and the same progress is not saved twice.
    path = run.of_the_moment(learner, Progress("sft", 1))
    assert [path] == store.paths()
    assert run.now(learner, Progress("sft", 2)).name == "000002-sft-2"
    assert len(told) == 2


def test_without_asynchronous_a_periodic_save_is_durable_at_once(
    tmp_path: Path, model_dir: Path, device: Device
) -> None:
    store, run, later, told = made(tmp_path, device, asynchronous=False)
    run.periodic(make_learner(model_dir, device), Progress("sft", 1))
    assert later.waiting == []
    assert [s.path for s in told] == store.paths() == [tmp_path / "checkpoints" / "000001-sft-1"]


def test_a_save_that_does_not_end_costs_those_that_are_due_and_not_the_run(
    tmp_path: Path, model_dir: Path, device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    learner = make_learner(model_dir, device)
    _, run, later, told = made(tmp_path, device)
    run.periodic(learner, Progress("sft", 1))
    run.periodic(learner, Progress("sft", 2))
    assert run.take_scalars()["checkpoint_failed"] == 1.0
    assert "000001-sft-1 has not been written" in caplog.text
    with pytest.raises(CheckpointWriteError, match="is still being written"):
        run.now(learner, Progress("sft", 2))
    assert run.of_the_moment(learner, Progress("sft", 2)) is None
    run.settle()
    later.write()
    run.periodic(learner, Progress("sft", 3))
    assert run.saved == Progress("sft", 1)
    later.write()
    run.settle()
    assert [s.progress.stage_step for s in told] == [1, 3]


def test_stop_on_failure_stops(tmp_path: Path, model_dir: Path, device: Device) -> None:
    learner = make_learner(model_dir, device)
    _, run, _, _ = made(tmp_path, device, on_failure="stop")
    run.periodic(learner, Progress("sft", 1))
    with pytest.raises(CheckpointWriteError):
        run.periodic(learner, Progress("sft", 2))
