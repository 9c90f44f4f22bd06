"""One rank of a grid that trains a few fixed steps, for tests of what grids must agree on.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=p python -P -m trainer.grid_run \\
        --model-dir DIR --tensor-parallel 2 --out FILE.safetensors

Every grid trains the same global batches. Rank 0 prints JSON: `losses`, `grad_norms` and `entropies`
by step, and whether the export before the first step was exactly what was loaded; it writes the
weights after the last step to --out. With --save a checkpoint is written while the steps after
--save-after are taken; `save_error` says why it was not. With --resume steps go on after the newest
checkpoint there.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from trainer import batch as batching
from trainer import device as devices
from trainer import loss as losses
from trainer import testbed
from trainer.batch import MicroBatch
from trainer.config import GridConfig, LossConfig, OptimConfig
from trainer.errors import CheckpointWriteError

_TOKEN_BUDGET = 60
_COLLECTIVE_TIMEOUT_S = 120.0


def global_batch(step: int, replayed: batching.ExpertLayout | None) -> list[batching.Sequence]:
    """Nine sampled sequences of 9 to 29 ids, so that packs come out uneven; with `replayed`, with
    choices of experts that no router made.
    """
    rng = np.random.default_rng([7, step])
    rows = []
    for i in range(9):
        length = int(rng.integers(9, 30))
        ids = rng.integers(6, testbed.VOCAB, length)
        mask = [0] * 4 + [1] * (length - 4)
        logprobs = -np.log(testbed.VOCAB) + 0.2 * rng.standard_normal(length)
        row = testbed.record(ids, mask, logprobs=logprobs, attempt_id=f"row{i}", banned=(0, 1, 3))
        if replayed is not None:
            every = np.arange(replayed.num_experts)
            choice = rng.permuted(np.tile(every, (length - 1, replayed.num_layers, 1)), axis=-1)
            row = testbed.with_experts(row, choice[..., : replayed.top_k], replayed.num_experts)
        rows.append(batching.from_proto(row, testbed.VOCAB))
    return rows


def objective(
    advantage: torch.Tensor, num_tokens: int, _index: int, micro: MicroBatch, new: torch.Tensor
) -> torch.Tensor:
    """The default member of the family: this micro-batch's part of the batch's token mean."""
    tokens = losses.TokenBatch(
        new=new,
        old=new.detach(),
        rollout=micro.rollout,
        advantage=advantage[micro.sequence],
        mask=torch.ones_like(new, dtype=torch.bool),
        weight=torch.full_like(new, 1 / num_tokens),
        sequence=micro.sequence,
    )
    return losses.policy_loss(tokens, LossConfig()).loss


def main() -> None:
    """Trains --num-steps steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-dir", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--num-steps", type=int, default=3, help="counted from the very first")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--save-after", type=int, default=3, help="the step that is saved")
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--replay", action="store_true", help="batches choose the experts")
    for name in ("tensor", "pipeline", "expert"):
        parser.add_argument(f"--{name}-parallel", type=int, default=1)
    arguments = parser.parse_args()
    device = devices.enter(1, _COLLECTIVE_TIMEOUT_S)
    from megatron.core import parallel_state
    from safetensors.torch import load_file, save_file

    from trainer import checkpoint_state
    from trainer.checkpoint import CheckpointStore, Progress
    from trainer.checkpoint_saver import CheckpointSaver
    from trainer.model import Policy
    from trainer.step import Learner

    model_ranks = arguments.tensor_parallel * arguments.pipeline_parallel
    grid = GridConfig(
        tensor_parallel=arguments.tensor_parallel,
        pipeline_parallel=arguments.pipeline_parallel,
        expert_parallel=arguments.expert_parallel,
        data_parallel=int(os.environ["WORLD_SIZE"]) // model_ranks,
    )
    policy = Policy(arguments.model_dir, grid, device, seed=0)
    policy.load_hf()
    loaded = load_file(arguments.model_dir / "model.safetensors")
    exported = dict(policy.export_named_tensors())
    is_exact = exported.keys() == loaded.keys() and all(
        torch.equal(exported[name], loaded[name]) for name in loaded
    )
    learner = Learner(policy, 16)
    learner.begin_stage(
        OptimConfig(lr=arguments.lr, warmup_steps=0, final_lr_fraction=1.0),
        arguments.num_steps,
        0.0,
    )
    completed = 0
    if arguments.resume is not None:
        checkpoint = CheckpointStore(arguments.resume, kept=1).latest()
        assert checkpoint is not None
        checkpoint_state.load_model(learner, checkpoint)
        checkpoint_state.load_all(learner, checkpoint)
        completed = checkpoint.progress.stage_step
    saver = None
    if arguments.save is not None:
        store = CheckpointStore(arguments.save, kept=2)
        saver = CheckpointSaver(store, device, _COLLECTIVE_TIMEOUT_S)
    updates = []
    for step in range(completed + 1, arguments.num_steps + 1):
        sequences = global_batch(step, policy.experts if arguments.replay else None)
        micros = batching.make_micro_batches(
            sequences,
            _TOKEN_BUDGET,
            policy.vocab_size,
            device.torch_device,
            multiple=grid.tensor_parallel,
        )
        advantage = torch.tensor([1.0 if i % 3 else -0.5 for i in range(len(sequences))])
        num_tokens = sum(micro.targets.numel() for micro in micros)
        own = batching.own_share(
            micros,
            parallel_state.get_data_parallel_rank(),
            grid.data_parallel,
            grid.tensor_parallel,
            device.torch_device,
        )

        loss_of = functools.partial(objective, advantage, num_tokens)
        updates.append(learner.update(own, loss_of, step, with_entropy=True))
        if saver is not None and step == arguments.save_after:
            saver.begin(learner, Progress("grid", stage_step=step))
    save_error = ""
    if saver is not None:
        try:
            saver.wait()
        except CheckpointWriteError as error:
            save_error = str(error)
    final = {n: t.clone().contiguous() for n, t in policy.export_named_tensors()}
    if dist.get_rank() == 0:
        save_file(final, arguments.out)
        print(
            json.dumps(
                {
                    "is_export_exact": is_exact,
                    "save_error": save_error,
                    "losses": [update.loss for update in updates],
                    "grad_norms": [update.grad_norm for update in updates],
                    "entropies": [update.entropy for update in updates],
                }
            ),
            flush=True,
        )
    devices.leave()


if __name__ == "__main__":
    main()
