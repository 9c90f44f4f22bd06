"""Members of the GRPO family in the RL stage: trajectories of two branches, packed in two ways."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trainer import batch
from trainer.config import GuardsConfig, LossConfig, RlConfig, TrainerConfig
from trainer.device import Device
from trainer.stage_runner import StageRequest, StageRunner
from trainer.testbed import VOCAB, ManagerThread, record

SETTINGS: dict[str, dict[str, Any]] = {
    "gspo": {"surrogate": "gspo"},
    "cispo": {"surrogate": "cispo"},
    "tis_sequence": {"correction": "tis_sequence"},
    "icepop": {"correction": "icepop", "band_low": 0.9, "band_high": 1.2},
    "mis_geometric": {"correction": "mis_geometric", "band_low": 0.9, "band_high": 1.1},
    "veto": {"veto": 0.72},
    "bypass": {"objective": "bypass"},
}


def branch(
    runner: StageRunner, rng: np.random.Generator, attempt: str, index: int, reward: float
) -> Any:
    """Eight ids of which five are trained, sampled by something near the runner's policy."""
    fields: dict[str, Any] = {"attempt_id": attempt, "branch_index": index, "reward": reward}
    ids, mask = rng.integers(6, VOCAB, 8), [0, 0, 0, *[1] * 5]
    draft = batch.from_proto(record(ids, mask, logprobs=[0.0] * 8, **fields), VOCAB)
    micros = batch.make_micro_batches([draft], 100, VOCAB, torch.device("cpu"))
    near = runner.learner.logprobs(micros)[0].numpy() + 0.3 * rng.standard_normal(5)
    return record(ids, mask, logprobs=[0, 0, 0, *near], **fields)


def train_once(
    folder: Path, model: Path, device: Device, token_budget: int, **loss: Any
) -> dict[str, float]:
    """The figures of one step."""
    thread = ManagerThread()
    try:
        config = TrainerConfig(
            model_dir=model,
            run_dir=folder,
            manager_address=thread.address,
            token_budget=token_budget,
            rl=RlConfig(
                groups_per_step=1,
                batch_wait_s=0.2,
                guards=GuardsConfig(action="warn"),
                loss=LossConfig(**loss),
            ),
        )
        runner = StageRunner(config, device, thread.link)
        rng = np.random.default_rng(3)
        names = {"a": 1.0, "b": 0.0, "c": 0.0}
        members = {n: [branch(runner, rng, n, i, r) for i in range(2)] for n, r in names.items()}
        thread.manager.add_batch({"g": [branches[0] for branches in members.values()]})
        thread.manager.sequences.update(members)
        runner.run_stage(StageRequest("rl", "rl", "", 1))

        def watch() -> None:
            deadline = time.monotonic() + 60
            while runner.status().state == "running" and time.monotonic() < deadline:
                time.sleep(0.005)
            runner.stop(save_checkpoint=False)

        watcher = threading.Thread(target=watch)
        watcher.start()
        runner.run()
        watcher.join()
        assert runner.status().state == "finished", runner.status().error
        (step,) = runner.metrics.since("rl", 1)
        return step.scalars
    finally:
        thread.close()


@pytest.mark.parametrize("name", SETTINGS)
def test_a_step_is_the_same_however_it_is_packed(
    tmp_path: Path, model_dir: Path, device: Device, name: str
) -> None:
    whole = train_once(tmp_path / "whole", model_dir, device, 1000, **SETTINGS[name])
    # Less than one trajectory's two branches: they share a pack all the same where they must.
    split = train_once(tmp_path / "split", model_dir, device, 9, **SETTINGS[name])
    assert whole["num_micro_batches"] == 1
    assert split["num_micro_batches"] == (
        3 if LossConfig(**SETTINGS[name]).needs_whole_trajectories else 6
    )
    for figure in ("loss", "grad_norm", "correction_rejected_fraction"):
        assert split[figure] == pytest.approx(whole[figure], abs=1e-6), figure
    assert whole["grad_norm"] > 1e-3
    rejects = name in {"icepop", "mis_geometric", "veto"}
    assert (whole["correction_rejected_fraction"] > 0) == rejects
