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
from megatron.core import parallel_state

from rollout.client import read_sequences
from trainer import batch as batching
from trainer import loss
from trainer.batch import MicroBatch, Sequence
from trainer.config import SupervisedConfig, TrainerConfig
from trainer.errors import BadRequestError
from trainer.metrics_log import StepRecord
from trainer.step import Learner
from trainer.step_clock import StepClock
from trainer.team import Team, together

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


class SupervisedStep:
    """One step of a supervised stage, on every rank; each has the whole file of sequences."""

    team_name = "supervised"

    def __init__(
        self,
        team: Team,
        learner: Learner,
        config: TrainerConfig,
        settings: SupervisedConfig,
        name: str,
        data_path: Path,
    ) -> None:
        """Raises BadRequestError for a file that is missing or holds no usable row."""
        self.team = team
        self._learner = learner
        self._config = config
        self._batch_rows = settings.batch_rows
        self._rows = load_rows(data_path, learner.policy.vocab_size)
        self._seed = zlib.crc32(f"{config.seed}/{name}".encode())

    @together
    def update(self, step: int) -> dict[str, float]:
        """Takes the optimizer step; returns its figures.

        Raises:
          NonFiniteError: the loss left the finite numbers.
        """
        policy = self._learner.policy
        chosen = [
            self._rows[i] for i in rows_of_step(len(self._rows), self._batch_rows, step, self._seed)
        ]
        micros = batching.make_micro_batches(
            chosen,
            self._config.token_budget,
            policy.vocab_size,
            policy.device.torch_device,
            multiple=self._config.grid.tensor_parallel,
        )
        num_trained = sum(s.num_trained for s in chosen)

        def loss_of(_: int, _micro: MicroBatch, new: torch.Tensor) -> torch.Tensor:
            mask = torch.ones_like(new, dtype=torch.bool)
            return loss.sft_loss(new, mask, torch.full_like(new, 1.0 / num_trained))

        own = batching.own_share(
            micros,
            parallel_state.get_data_parallel_rank(),
            parallel_state.get_data_parallel_world_size(),
            self._config.grid.tensor_parallel,
            policy.device.torch_device,
        )
        update = self._learner.update(own, loss_of, step)
        return {
            "loss": update.loss,
            "grad_norm": update.grad_norm,
            "lr": update.lr,
            "num_tokens": float(sum(len(s.token_ids) for s in chosen)),
            "num_token_pairs": float(sum(len(s.token_ids) ** 2 for s in chosen)),
            "num_trained_tokens": float(num_trained),
            "num_micro_batches": float(len(micros)),
        }


class SupervisedStage:
    """Runs steps until num_steps are done."""

    def __init__(
        self,
        runner: StageRunner,
        name: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runner = runner
        self._name = name
        self._clock = clock
        self._work = runner.work.supervised_step()

    def run(self, completed_steps: int, num_steps: int) -> None:
        """Trains steps completed_steps + 1 to num_steps.

        Raises:
          StoppedError: the trainer was told to stop.
          NonFiniteError: the loss left the finite numbers.
        """
        for step in range(completed_steps + 1, num_steps + 1):
            clock = StepClock(self._clock)
            scalars = self._work.update(step)
            clock.lap("update")
            scalars |= clock.scalars()
            scalars |= self._runner.throughput.scalars(scalars)
            self._runner.step_done(StepRecord(self._name, step, 0, time.time(), scalars))
