"""What all ranks of a trainer do together: load, train, score, export, save.

One GridWork a rank. On the first it belongs to the StageRunner, which calls it; the others follow
(team.py). Owns policy, learner, and the checkpoints as files; progress is the first rank's.
Invariant: every rank makes the same calls in the same order, so that their collectives meet.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Generator
from pathlib import Path

import torch

from trainer import architecture, checkpoint, checkpoint_state, gap, ranks
from trainer import batch as batching
from trainer import reference as references
from trainer.checkpoint import CheckpointStore, Progress
from trainer.checkpoint_saver import CheckpointSaver, Saved, in_thread
from trainer.config import TrainerConfig
from trainer.device import Device
from trainer.errors import BadRequestError
from trainer.model import Policy
from trainer.rl_step import Fetch, RlStep
from trainer.run_checkpoints import RunCheckpoints
from trainer.sft import SupervisedStep
from trainer.step import Learner
from trainer.team import Team, together

_log = logging.getLogger(__name__)


class GridWork:
    """This rank's part of the model, and what is done with it."""

    team_name = "grid"

    def __init__(
        self,
        config: TrainerConfig,
        device: Device,
        fetch: Fetch | None,
        team: Team,
        on_saved: Callable[[Saved], None] = lambda _: None,
        start_save: Callable[[Callable[[], None]], None] = in_thread,
    ) -> None:
        """Loads the newest sound checkpoint, else what is replayed, else the weights of model_dir.

        Args:
          fetch: reads token sequences; None: there is no manager.
          on_saved: is told of each checkpoint once it is durable.
          start_save: see CheckpointSaver.

        Raises:
          BadRequestError: model_dir or replay_of cannot be used, or the ranks are not the grid's.
        """
        if ranks.num_ranks() != config.grid.num_ranks:
            raise BadRequestError(
                f"the trainer runs on {ranks.num_ranks()} ranks, and its grid has "
                f"{config.grid.num_ranks}: tensor_parallel * pipeline_parallel * data_parallel"
            )
        self.config = config
        self.team = team
        self._fetch = fetch
        policy = Policy(
            config.model_dir, config.grid, device, config.seed, config.dtype, config.layers
        )
        if config.rl.routing_replay and policy.experts is None:
            raise BadRequestError(
                f"trainer.rl.routing_replay is on, but the model in {config.model_dir} has no "
                "experts; turn it off"
            )
        policy.set_recompute(config.recompute)
        self.learner = Learner(policy, config.logprob_chunk)
        self.store = CheckpointStore(
            config.run_dir / "checkpoints", config.checkpoints_kept, config.keep_stage_ends
        )
        self.loaded = self.store.latest()
        if self.loaded is None and (replayed := config.replay_of) is not None:
            self.loaded = ranks.from_first(lambda: checkpoint.start_of_rl(replayed / "checkpoints"))
        if self.loaded is None:
            policy.load_hf()
        else:
            checkpoint_state.load_model(self.learner, self.loaded)
        saver = CheckpointSaver(self.store, device, config.checkpoint.timeout_s, start=start_save)
        self.checkpoints = RunCheckpoints(
            self.store, saver, config.checkpoint, self.loaded, on_saved
        )
        self._stage: RlStep | SupervisedStep | None = None
        team.join(self)

    @property
    def num_parameters(self) -> int:
        """Of the whole model."""
        if ranks.num_ranks() == 1:
            return self.learner.policy.num_parameters
        shapes = architecture.tensor_shapes(architecture.read_config(self.config.model_dir))
        return sum(math.prod(shape) for shape in shapes.values())

    def rl_step(self) -> RlStep:
        """Of the RL stage that began last."""
        assert isinstance(self._stage, RlStep)
        return self._stage

    def supervised_step(self) -> SupervisedStep:
        """Of the supervised stage that began last."""
        assert isinstance(self._stage, SupervisedStep)
        return self._stage

    # ---- stages

    @together
    def begin_stage(
        self, kind: str, name: str, data_path: str, num_steps: int, progress: Progress
    ) -> None:
        """Makes the optimizer, and the step of the stage; takes up the loaded checkpoint if
        `progress` lies within the stage.

        Raises:
          BadRequestError: data_path or the reference of a KL term cannot be used.
        """
        settings = getattr(self.config, kind)
        is_resumed = progress.stage == name and progress.stage_step > 0
        self.learner.begin_stage(settings.optim, num_steps, settings.router_aux_loss)
        self._stage = None
        if kind == "rl":
            if self._fetch is None:
                raise BadRequestError("an RL stage needs manager_address in the trainer's config")
            reference = references.of_stage(
                self.learner,
                self.config.rl.loss,
                self.config.run_dir / "reference" / name,
                self.config.checkpoint.timeout_s,
                progress,
                resumed=is_resumed,
            )
            self._stage = RlStep(self.team, self.learner, self.config, self._fetch, reference)
        else:
            self._stage = ranks.in_step(
                lambda: SupervisedStep(
                    self.team, self.learner, self.config, settings, name, Path(data_path)
                )
            )
        self.team.join(self._stage)
        if is_resumed and self.loaded is not None:
            checkpoint_state.load_all(self.learner, self.loaded)

    # ---- checkpoints

    @together
    def save_periodic(self, progress: Progress) -> None:
        """See RunCheckpoints.periodic."""
        self.checkpoints.periodic(self.learner, progress)

    @together
    def save(self, progress: Progress) -> Path:
        """See RunCheckpoints.now."""
        return self.checkpoints.now(self.learner, progress)

    @together
    def save_of_the_moment(self, progress: Progress) -> Path | None:
        """See RunCheckpoints.of_the_moment."""
        return self.checkpoints.of_the_moment(self.learner, progress)

    @together
    def poll_save(self) -> None:
        """See RunCheckpoints.poll."""
        self.checkpoints.poll()

    @together
    def settle_save(self) -> None:
        """See RunCheckpoints.settle."""
        self.checkpoints.settle()

    @together
    def load_weights(self, name: str) -> None:
        """Takes the weights of the checkpoint `name`; the optimizer stays.

        Raises:
          CorruptCheckpointError: it does not verify.
        """
        found = ranks.from_first(lambda: self.store.find(name))
        checkpoint_state.load_model(self.learner, found)

    # ---- weights

    def export(self) -> Generator[tuple[str, torch.Tensor]]:
        """Yields (Hugging Face name, tensor) on the first rank. Others gather with it: take it to its
        end, or close it. Weights must not change until then.
        """
        self.team.order(self.team_name, "gather", ())
        tensors = self.learner.policy.export_named_tensors()
        try:
            # `yield from` would close what is to be taken to its end.
            while (named := next(tensors, None)) is not None:
                yield named
        finally:
            for _ in tensors:
                pass

    @together
    def gather(self) -> None:
        """What the other ranks do while the first exports."""
        for _ in self.learner.policy.export_named_tensors():
            pass

    @together
    def measure_gap(self, attempt_ids: list[str], weight_version: int) -> gap.Gap:
        """See gap.measure.

        Raises:
          BadRequestError: no manager is configured.
          RolloutError: the manager was not to be had.
        """
        fetch = self._fetch
        if fetch is None:
            raise BadRequestError("MeasureGap needs manager_address in the trainer's config")
        vocab_size = self.learner.policy.vocab_size
        sequences = ranks.in_step(
            lambda: [
                batching.from_proto(record, vocab_size)
                for record in fetch(attempt_ids, self.config.sequences_per_fetch)
            ]
        )
        replayed = self.learner.policy.experts if self.config.rl.routing_replay else None
        if replayed is None:
            sequences = [dataclasses.replace(s, experts=None) for s in sequences]
        elif broken := [s for s in sequences if batching.broken_experts(s, replayed)]:
            raise BadRequestError(
                f"attempt {broken[0].attempt_id} cannot be replayed: "
                f"{batching.broken_experts(broken[0], replayed)}; turn trainer.rl.routing_replay "
                "off, or measure others"
            )
        return gap.measure(self.learner, sequences, weight_version, self.config.token_budget)
