from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from rollout.client import write_sequences
from trainer import sft, testbed
from trainer.config import SftConfig, SftOptimConfig, TrainerConfig
from trainer.device import Device
from trainer.errors import BadRequestError, StageConflictError
from trainer.stage_runner import StageRequest, StageRunner


def run(runner: StageRunner) -> None:
    def watch() -> None:
        while runner.status().state == "running":
            time.sleep(0.005)
        runner.stop(save_checkpoint=False)

    threading.Thread(target=watch, daemon=True).start()
    runner.run()


def make_runner(tmp_path: Path, device: Device) -> StageRunner:
    settings = SftConfig(optim=SftOptimConfig(lr=1e-2, warmup_steps=2))
    config = TrainerConfig(
        model_dir=testbed.write_model(tmp_path / "model"),
        run_dir=tmp_path / "run",
        sft=settings,
    )
    write_sequences(tmp_path / "data.sequences", testbed.copy_rows(64))
    return StageRunner(config, device, None)


def test_a_toy_is_learned_in_thirty_steps(tmp_path: Path, device: Device) -> None:
    runner = make_runner(tmp_path, device)
    data = str(tmp_path / "data.sequences")
    assert runner.run_stage(StageRequest("sft", "sft", data, 30)) == 0
    with pytest.raises(StageConflictError, match=r"'sft' \(sft\) runs"):
        runner.run_stage(StageRequest("sft", "other", data, 30))
    assert runner.run_stage(StageRequest("sft", "sft", data, 30)) == 0
    run(runner)
    records = runner.metrics.since("sft", 1)
    assert [r.step for r in records] == list(range(1, 31))
    assert records[0].scalars["loss"] > 3.0
    assert records[-1].scalars["loss"] < 0.1
    status = runner.status()
    assert status.state == "finished"
    assert status.finished_stages == ("sft",)
    assert Path(status.latest_checkpoint).is_dir()
    assert runner.run_stage(StageRequest("sft", "sft", data, 30)) == 30
    with pytest.raises(
        BadRequestError, match="ended after 30 steps and is not taken up again for 31"
    ):
        runner.run_stage(StageRequest("sft", "sft", data, 31))
    with pytest.raises(BadRequestError, match="data_path '/nowhere' is no file"):
        runner.run_stage(StageRequest("sft", "other", "/nowhere", 30))
    events = list((tmp_path / "run" / "metrics" / "events" / "sft").iterdir())
    assert len(events) == 1


def test_rows_of_an_epoch_are_all_different_and_resume_needs_no_state() -> None:
    steps = [sft.rows_of_step(10, 4, step, seed=3) for step in range(1, 6)]
    flat = [row for rows in steps for row in rows]
    assert sorted(flat[:10]) == sorted(flat[10:]) == list(range(10))
    assert flat[:10] != flat[10:]
    assert sft.rows_of_step(10, 4, 4, seed=3) == steps[3]


def test_data_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadRequestError, match="no file"):
        sft.load_rows(tmp_path / "none.sequences", 40)
    write_sequences(tmp_path / "empty.sequences", [testbed.record([6, 7], [0, 0])])
    with pytest.raises(BadRequestError, match="no sequence with a trained token"):
        sft.load_rows(tmp_path / "empty.sequences", 40)
