"""A replay of recorded batches equals the run bit for bit, also across a trainer that died."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollout.client import write_sequences
from trainer.checkpoint import CheckpointStore, start_of_rl
from trainer.config import TrainerConfig
from trainer.device import Device
from trainer.errors import BadRequestError
from trainer.manager_link import CountingPublisher, ManagerLink
from trainer.rl_test import group, run_until
from trainer.stage_runner import StageRequest, StageRunner
from trainer.testbed import ManagerThread, copy_rows

LIVE = ("time_", "mfu_", "tokens_per_s", "num_groups_ready_left")
NUM_STEPS = 4
DIED_AFTER = 2


def make_config(tmp_path: Path, name: str, model: Path, address: str, **more: Any) -> TrainerConfig:
    settings: dict[str, Any] = {
        "model_dir": model,
        "run_dir": tmp_path / name,
        "manager_address": address,
        "checkpoints_kept": 1,
        "sft": {"batch_rows": 8},
        "rl": {
            "optim": {"lr": 3e-3, "warmup_steps": 2, "final_lr_fraction": 0.5},
            "groups_per_step": 1,
            "batch_wait_s": 0.2,
            "checkpoint_every_steps": 0,
            "max_staleness": 2,
            "guards": {"action": "warn"},
        },
    }
    return TrainerConfig.model_validate(settings | more)


def scalars(runner: StageRunner) -> list[dict[str, str]]:
    """Of each step, bit for bit, but for what depends on the time of day."""
    return [
        {k: v.hex() for k, v in r.scalars.items() if not k.startswith(LIVE)}
        | {"staleness": str(r.staleness_histogram)}
        for r in runner.metrics.since("rl", 1)
    ]


def record(tmp_path: Path, model: Path, device: Device) -> tuple[list[dict[str, str]], Any, Any]:
    """SFT, RL, a death after DIED_AFTER steps, and the rest in a new trainer.

    Returns each step's scalars, and the batches and sequences that a replay is given.
    """
    thread = ManagerThread()
    manager = thread.manager
    try:
        config = make_config(tmp_path, "run", model, thread.address)
        write_sequences(tmp_path / "data.sequences", copy_rows(32))
        runner = StageRunner(config, device, thread.link)
        runner.run_stage(StageRequest("sft", "sft", str(tmp_path / "data.sequences"), 2))
        run_until(runner, lambda: runner.status().state == "finished")

        runner = StageRunner(config, device, thread.link)
        for step in range(1, NUM_STEPS + 1):
            manager.add_batch(group(runner, step, version=1))
        batches = list(manager.replies)
        del manager.replies[DIED_AFTER:]
        runner.run_stage(StageRequest("rl", "rl", "", NUM_STEPS))
        run_until(runner, lambda: runner.status().step == DIED_AFTER)
        runner.save()

        # Versions go on above all that the lost trainer may have published.
        manager.max_weight_version = 4
        manager.replies = batches[DIED_AFTER:]
        again = StageRunner(config, device, thread.link)
        assert again.run_stage(StageRequest("rl", "rl", "", NUM_STEPS)) == DIED_AFTER
        run_until(again, lambda: again.status().state == "finished")
        for batch, ack in zip(batches, manager.acked, strict=True):
            batch.replayed_at_version = ack.weight_version
        return scalars(again), batches, dict(manager.sequences)
    finally:
        thread.close()


def replay(
    tmp_path: Path, name: str, model: Path, device: Device, batches: Any, sequences: Any, **rl: Any
) -> StageRunner:
    thread = ManagerThread()
    try:
        thread.manager.replies = list(batches)
        thread.manager.sequences = sequences
        config = make_config(tmp_path, name, model, thread.address, replay_of=tmp_path / "run")
        config = config.model_copy(update={"rl": config.rl.model_copy(update=rl)})
        link = ManagerLink(thread.loop, thread.client, CountingPublisher(), 5.0)
        runner = StageRunner(config, device, link)
        runner.run_stage(StageRequest("rl", "rl", "", NUM_STEPS))
        run_until(runner, lambda: runner.status().state in {"finished", "failed"})
        assert runner.status().state == "finished", runner.status().error
        return runner
    finally:
        thread.close()


def test_a_replay_equals_the_run_bit_for_bit(
    tmp_path: Path, model_dir: Path, device: Device
) -> None:
    recorded, batches, sequences = record(tmp_path, model_dir, device)
    assert len(recorded) == NUM_STEPS
    versions = [batch.replayed_at_version for batch in batches]
    assert versions == [1, 2, 5, 6], "the second trainer went on above the lost versions"
    # Everything was sampled at version 1; the restart's versions 3 to 5 hold no update of their own.
    assert [step["staleness"] for step in recorded] == ["{0: 2}", "{1: 2}", "{2: 2}", "{3: 2}"]
    assert ["step_skipped" in step for step in recorded] == [False, False, False, True]

    runner = replay(tmp_path, "replay", model_dir, device, batches, sequences)
    assert scalars(runner) == recorded
    assert [r.weight_version for r in runner.metrics.since("rl", 1)] == [2, 3, 6, 0]

    other = replay(
        tmp_path, "other", model_dir, device, batches, sequences, negative_advantage_scale=0.5
    )
    changed = scalars(other)
    assert changed[0]["loss"] != recorded[0]["loss"]
    assert changed[0]["reward_mean"] == recorded[0]["reward_mean"]


def test_the_start_of_rl_is_kept_however_long_the_stage(
    tmp_path: Path, model_dir: Path, device: Device
) -> None:
    record(tmp_path, model_dir, device)
    folder = tmp_path / "run" / "checkpoints"
    kept = [path.name.partition("-")[2] for path in CheckpointStore(folder, 1).paths()]
    assert kept == ["sft-2", "rl-4"]
    found = start_of_rl(folder)
    assert (found.progress.stage, found.progress.rl_step) == ("sft", 0)


def test_a_run_without_its_start_of_rl_is_refused(
    tmp_path: Path, model_dir: Path, device: Device
) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    config = make_config(tmp_path, "replay", model_dir, "", replay_of=tmp_path / "run")
    with pytest.raises(BadRequestError, match="keep_stage_ends"):
        StageRunner(config, device, None)
