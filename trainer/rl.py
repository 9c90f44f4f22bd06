"""The RL stage: asynchronous GRPO on batches that the RolloutManager has ready. Owner module.

     RolloutManager                     trainer, main thread                        engines
     ready groups ----NextBatch------>  wait         (blocks: no batch is ready)
     token store  ----FetchSequences->  fetch        (blocks: reading)
                                        logprob      old and reference log-probs, where asked for
                                        update       forward, backward, AdamW
     update window <--Open/Close------  publish ------------ weight buckets ------>  load
     ledger       <---AckBatch--------  ack
                                        report       metrics, checkpoint, requests of RPCs
     dev tasks    <--StartEvaluation--  evaluate     at intervals; see selection.py
                                        guard        a band left too long: checkpoint, pause

Rollouts go on during all of it; they stop only inside an update window. Weights are published
right after the update, before the next batch is asked for. Who owns what: this loop owns the
order of the parts; StageRunner owns weights, optimizer and progress; the manager owns the
ledger. A batch counts as trained when it is acknowledged, and comes back after a Rewind to an
older checkpoint: each is trained exactly once along the surviving lineage.

A reply without groups and with `republish_requested` means that an engine started with old
weights: the current weights are published again, as a new version, and the loop asks again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch

from proto import rollout_pb2, trajectory_pb2
from rollout.client import CorruptStoreError
from trainer import batch as batching
from trainer import diagnostics, group_batch, loss
from trainer.batch import MicroBatch
from trainer.config import RlConfig
from trainer.errors import CheckpointWriteError, GuardError, NonFiniteError
from trainer.group_batch import GroupBatch
from trainer.guards import Guards, Verdict
from trainer.manager_link import ManagerLink
from trainer.metrics_log import StepRecord
from trainer.selection import Selection
from trainer.step import Update
from trainer.step_clock import StepClock

if TYPE_CHECKING:
    from trainer.stage_runner import StageRunner

_log = logging.getLogger(__name__)


class RlStage:
    """Runs steps until num_steps are done."""

    def __init__(
        self,
        runner: StageRunner,
        link: ManagerLink,
        name: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runner = runner
        self._link = link
        self._name = name
        self._clock = clock
        self._config: RlConfig = runner.config.rl
        self._learner = runner.learner
        self._selection = Selection(runner, link, self._config.evaluation)
        self._guards = Guards(self._config.guards)
        self._rejected_fraction = 0.0  # of the last update's tokens, by the correction
        self._kl_loss = 0.0  # the KL term's part of the last update's loss

    def run(self, completed_steps: int, num_steps: int) -> None:
        """Trains steps completed_steps + 1 to num_steps.

        Raises:
          StoppedError: the trainer was told to stop.
          TrainerError, RolloutError: the stage failed; weights are those of the last step.
        """
        for record in self._runner.metrics.since(self._name, 1):
            self._guards.observe(record.step, record.scalars)
        self._runner.publish_if_changed()
        self._selection.begin(completed_steps, num_steps)
        for step in range(completed_steps + 1, num_steps + 1):
            clock = StepClock(self._clock)
            claimed = self._next_batch(step, clock)
            consumed_version = self._runner.weight_version
            batch = self._fetch(claimed)
            clock.lap("fetch")
            micros = self._pack(batch)
            old = self._old_logprobs(micros)
            reference = self._reference_logprobs(micros)
            clock.lap("logprob")
            try:
                update = self._update(batch, micros, old, reference, step)
            except NonFiniteError as error:
                clock.lap("update")
                self._trip(f"step {step}: {error}")
                update = None
                batch = batch.left_out((g.group_id for g in claimed.groups), "non_finite")
            clock.lap("update")
            published = self._runner.publish_to_stage() if update else 0
            clock.lap("publish")
            self._ack(claimed, batch, step, consumed_version)
            scalars = self._scalars(batch, micros, old, reference, update, consumed_version)
            scalars["num_groups_ready_left"] = float(claimed.num_groups_ready_left)
            scalars["lineage"] = float(self._runner.lineage)
            verdict = self._guards.observe(step, scalars)
            scalars |= verdict.scalars
            self._runner.step_done(
                StepRecord(
                    self._name,
                    step,
                    published,
                    time.time(),
                    scalars | clock.scalars(),
                    batch.staleness,
                    clock.spans,
                ),
                claimed.batch_id,
            )
            self._heed(verdict, is_last=step == num_steps)
            self._selection.after(step, num_steps)
        self._selection.end(num_steps)

    def _heed(self, verdict: Verdict, is_last: bool) -> None:
        if verdict.left:
            names = ", ".join(band.setting for band in verdict.left)
            _log.warning("outside of trainer.rl.guards: %s", names)
        # After the last step there is nothing to hold back: the stage's end shows what it is.
        if verdict.reason and not (is_last and self._config.guards.action == "pause"):
            self._trip(verdict.reason)

    def _trip(self, reason: str) -> None:
        """Does what the setting says; returns when training goes on.

        Raises:
          GuardError: the stage is to stop.
          StoppedError: the trainer was told to stop while it was paused.
        """
        action = self._config.guards.action
        _log.warning("guard tripped (%s): %s", action, reason)
        if action == "pause":
            self._runner.hold(reason)
        elif action == "stop":
            try:
                self._runner.save_if_changed()
            except CheckpointWriteError as error:
                _log.error("the guard stops the stage without a checkpoint: %s", error)
            raise GuardError(f"a guard stopped the stage: {reason}")

    def _next_batch(self, step: int, clock: StepClock) -> rollout_pb2.NextBatchReply:
        while True:
            request = rollout_pb2.NextBatchRequest(
                step=step,
                weight_version=self._runner.weight_version,
                num_groups=self._config.groups_per_step,
            )
            reply = self._runner.wait(self._link.next_batch(request, self._config.batch_wait_s))
            clock.lap("wait")
            if reply.groups:
                if reply.replayed_at_version:
                    self._runner.take_version(reply.replayed_at_version)
                return reply
            if reply.republish_requested:
                self._runner.publish_to_stage()
                clock.lap("publish")

    def _fetch(self, claimed: rollout_pb2.NextBatchReply) -> GroupBatch:
        """The batch's records. A group that cannot be read back is dropped, not the stage."""
        groups = list(claimed.groups)
        unreadable: dict[str, str] = {}
        try:
            records = self._fetch_groups(groups)
        except CorruptStoreError:
            groups, records = [], []
            for group in claimed.groups:
                try:
                    records += self._fetch_groups([group])
                    groups.append(group)
                except CorruptStoreError as error:
                    _log.error("group %s is dropped: %s", group.group_id, error)
                    unreadable[group.group_id] = "corrupt_record"
        vocab_size = self._learner.policy.vocab_size
        return group_batch.build(
            groups,
            [batching.from_proto(record, vocab_size) for record in records],
            self._config,
            self._runner.weight_version,
            min(self._config.max_staleness, claimed.max_staleness or self._config.max_staleness),
            self._runner.aged,
            unreadable,
            self._learner.policy.experts if self._config.routing_replay else None,
        )

    def _fetch_groups(
        self, groups: Iterable[rollout_pb2.BatchGroup]
    ) -> list[trajectory_pb2.TokenSequence]:
        ids = [m.attempt_id for g in groups for m in g.members]
        return self._link.fetch(ids, self._runner.config.sequences_per_fetch)

    def _pack(self, batch: GroupBatch) -> list[MicroBatch]:
        return batching.make_micro_batches(
            batch.sequences,
            self._runner.config.token_budget,
            self._learner.policy.vocab_size,
            self._learner.policy.device.torch_device,
            batch.trajectory if self._config.loss.needs_whole_trajectories else None,
        )

    def _old_logprobs(self, micros: list[MicroBatch]) -> list[torch.Tensor] | None:
        if not self._config.recompute_old_logprobs or not micros:
            return None
        return self._learner.logprobs(micros)

    def _reference_logprobs(self, micros: list[MicroBatch]) -> list[torch.Tensor] | None:
        if self._runner.reference is None or not micros:
            return None
        return self._runner.reference.score(self._learner, micros)

    def _update(
        self,
        batch: GroupBatch,
        micros: list[MicroBatch],
        old: list[torch.Tensor] | None,
        reference: list[torch.Tensor] | None,
        step: int,
    ) -> Update | None:
        """Takes the step; None when no token of the batch is trained."""
        if not micros:
            return None
        advantages = torch.tensor(batch.advantages, dtype=torch.float32)
        trajectory = torch.tensor(batch.trajectory)
        sequence = trajectory[torch.cat([m.sequence.cpu() for m in micros])]
        # Over the whole batch, so that the packing cannot change the mean.
        weights = loss.token_weights(
            torch.ones(sequence.shape, dtype=torch.bool),
            sequence,
            self._config.loss.norm,
            self._config.loss.constant_length,
        ).split([m.targets.numel() for m in micros])

        num_rejected, kl = 0, 0.0

        def loss_of(i: int, micro: MicroBatch, new: torch.Tensor) -> torch.Tensor:
            nonlocal num_rejected, kl
            owner = micro.sequence.cpu()
            tokens = loss.TokenBatch(
                new=new,
                old=new.detach() if old is None else old[i],
                rollout=micro.rollout,
                advantage=advantages[owner].to(new.device),
                mask=torch.ones_like(new, dtype=torch.bool),
                weight=weights[i].to(new.device),
                sequence=trajectory[owner].to(new.device),
                reference=None if reference is None else reference[i],
            )
            result = loss.policy_loss(tokens, self._config.loss)
            num_rejected += result.num_rejected
            kl += result.kl
            return result.loss

        update = self._learner.update(micros, loss_of, step, with_entropy=True)
        self._rejected_fraction = num_rejected / sequence.numel()
        self._kl_loss = kl
        return update

    def _ack(
        self, claimed: rollout_pb2.NextBatchReply, batch: GroupBatch, step: int, version: int
    ) -> None:
        self._link.ack(
            rollout_pb2.AckBatchRequest(
                batch_id=claimed.batch_id,
                step=step,
                weight_version=version,
                dropped_groups=batch.dropped_groups,
                trajectories=batch.trajectories,
            )
        )

    def _scalars(
        self,
        batch: GroupBatch,
        micros: list[MicroBatch],
        old: list[torch.Tensor] | None,
        reference: list[torch.Tensor] | None,
        update: Update | None,
        version: int,
    ) -> dict[str, float]:
        if update is None:
            refused = "non_finite" in batch.dropped_groups.values()
            return batch.scalars | {"step_skipped": 1.0, "guard_non_finite": float(refused)}
        sequence = torch.cat([m.sequence for m in micros]).cpu().numpy()
        new = _flat(update.logprobs)
        tokens = diagnostics.ActiveTokens(
            new=new,
            old=new if old is None else _flat(old),
            rollout=_flat([m.rollout for m in micros]),
            advantage=np.asarray(batch.advantages)[sequence],
            sequence=np.asarray(batch.trajectory)[sequence],
            versions=torch.cat([m.versions for m in micros]).cpu().numpy(),
        )
        held: dict[str, float] = {}
        if reference is not None:
            held = diagnostics.reference_metrics(new, _flat(reference), self._config.loss)
            held["loss_kl"] = self._kl_loss
        return (
            batch.scalars
            | held
            | diagnostics.off_policy_metrics(tokens, self._config.loss, version)
            | {
                "loss": update.loss,
                "grad_norm": update.grad_norm,
                "lr": update.lr,
                "entropy_mean_nats": update.entropy,
                "correction_rejected_fraction": self._rejected_fraction,
                "num_micro_batches": float(len(micros)),
            }
        )


def _flat(parts: list[torch.Tensor]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return torch.cat(parts).double().cpu().numpy()
