"""Trains a step and saves, again and again, until it is killed: for checkpoint_kill_test.

    python -P -m trainer.save_loop MODEL_DIR CHECKPOINTS_DIR asynchronous|synchronous

Goes on after the newest checkpoint. Prints `saving N` before and `saved N` after each save; while an
asynchronous one is written, steps are taken.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from trainer import batch as batching
from trainer import device as devices
from trainer import loss, testbed
from trainer.batch import MicroBatch
from trainer.config import GridConfig, OptimConfig


def _nll(_index: int, _micro: MicroBatch, new: torch.Tensor) -> torch.Tensor:
    return loss.sft_loss(new, torch.ones_like(new, dtype=torch.bool), torch.ones_like(new))


def main() -> None:
    """Runs until killed."""
    device = devices.enter(1, 60.0)
    from trainer import checkpoint_state
    from trainer.checkpoint import CheckpointStore, Progress
    from trainer.checkpoint_saver import CheckpointSaver
    from trainer.model import Policy
    from trainer.step import Learner

    policy = Policy(Path(sys.argv[1]), GridConfig(), device, seed=0)
    policy.load_hf()
    learner = Learner(policy, 1000)
    learner.begin_stage(OptimConfig(warmup_steps=0), 1_000_000, 0.0)
    store = CheckpointStore(Path(sys.argv[2]), kept=2)
    saver = CheckpointSaver(store, device)
    step = 0
    if latest := store.latest():
        checkpoint_state.load_all(learner, latest)
        step = latest.progress.stage_step
    rows = [batching.from_proto(row, testbed.VOCAB) for row in testbed.copy_rows(8)]
    micros = batching.make_micro_batches(rows, 1000, testbed.VOCAB, device.torch_device)
    is_asynchronous = sys.argv[3] == "asynchronous"

    def train() -> None:
        nonlocal step
        step += 1
        learner.update(micros, _nll, step)

    while True:
        train()
        progress = Progress("sft", step)
        print(f"saving {step}", flush=True)
        if is_asynchronous:
            saver.begin(learner, progress)
            while saver.poll() is None:
                train()
        else:
            saver.save(learner, progress)
        print(f"saved {progress.stage_step}", flush=True)


if __name__ == "__main__":
    main()
