"""The supervised stages, pre-training and SFT: steps over a file of sequences.

The loss is the mean over the batch's trained tokens. Which rows a step takes is a function of
(seed, stage, step) alone, so a resumed stage sees the rows that an uninterrupted one would.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from rollout.client import read_sequences
from trainer import batch as batching
from trainer import loss
from trainer.batch import MicroBatch, Sequence
from trainer.config import SupervisedConfig
from trainer.errors import BadRequestError
from trainer.metrics_log import StepRecord
from trainer.step_clock import StepClock

if TYPE_CHECKING:
    from trainer.stage_runner import StageRunner


def rows_of_step(num_rows: int, batch_rows: int, step: int, seed: int) -> list[int]:
    """Row numbers of a step (from 1): a fresh shuffle each epoch, read without a break. Pure."""
    first = (step - 1) * batch_rows
    rows: list[int] = []
    permutation: np.ndarray[tuple[int], np.dtype[np.int64]] | None = None
    epoch_of_permutation = -1
    for position in range(first, first + batch_rows):
        epoch, offset = divmod(position, num_rows)
        if permutation is None or epoch != epoch_of_permutation:
            permutation = np.random.default_rng([seed, epoch]).permutation(num_rows)
            epoch_of_permutation = epoch
        rows.append(int(permutation[offset]))
    return rows


def load_rows(path: Path, vocab_size: int) -> list[Sequence]:
    """Reads a sequences file; rows without a trained token are left out.

    Raises:
      BadRequestError: the file is missing or holds no usable row.
    """
    if not path.is_file():
        raise BadRequestError(f"data_path {path} is no file; make one with rollout.traces.build")
    rows = [batching.from_proto(record, vocab_size) for record in read_sequences(path)]
    rows = [r for r in rows if r.num_trained]
    if not rows:
        raise BadRequestError(f"data_path {path} holds no sequence with a trained token")
    return rows


class SupervisedStage:
    """Runs steps until num_steps are done."""

    def __init__(
        self,
        runner: StageRunner,
        settings: SupervisedConfig,
        name: str,
        data_path: Path,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runner = runner
        self._settings = settings
        self._name = name
        self._clock = clock
        self._learner = runner.learner
        self._rows = load_rows(data_path, runner.learner.policy.vocab_size)
        self._seed = zlib.crc32(f"{runner.config.seed}/{name}".encode())

    def run(self, completed_steps: int, num_steps: int) -> None:
        """Trains steps completed_steps + 1 to num_steps.

        Raises:
          StoppedError: the trainer was told to stop.
          NonFiniteError: the loss left the finite numbers.
        """
        policy = self._learner.policy
        for step in range(completed_steps + 1, num_steps + 1):
            clock = StepClock(self._clock)
            chosen = [
                self._rows[i]
                for i in rows_of_step(len(self._rows), self._settings.batch_rows, step, self._seed)
            ]
            micros = batching.make_micro_batches(
                chosen,
                self._runner.config.token_budget,
                policy.vocab_size,
                policy.device.torch_device,
            )
            num_trained = sum(s.num_trained for s in chosen)
            clock.lap("fetch")

            def loss_of(
                _: int, _micro: MicroBatch, new: torch.Tensor, n: int = num_trained
            ) -> torch.Tensor:
                mask = torch.ones_like(new, dtype=torch.bool)
                return loss.sft_loss(new, mask, torch.full_like(new, 1.0 / n))

            update = self._learner.update(micros, loss_of, step)
            clock.lap("update")
            scalars = clock.scalars()
            num_tokens = sum(len(s.token_ids) for s in chosen)
            scalars |= {
                "loss": update.loss,
                "grad_norm": update.grad_norm,
                "lr": update.lr,
                "num_tokens": float(num_tokens),
                "num_trained_tokens": float(num_trained),
                "num_micro_batches": float(len(micros)),
                "tokens_per_s": num_tokens / max(scalars["time_step_s"], 1e-9),
            }
            self._runner.step_done(StepRecord(self._name, step, 0, time.time(), scalars))
