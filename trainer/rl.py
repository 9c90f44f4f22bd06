"""The RL stage: asynchronous GRPO on batches that the RolloutManager has ready. Owner module.

     RolloutManager                     trainer, main thread                        engines
     ready groups ----NextBatch------>  wait         (blocks: no batch is ready)
     token store  ----FetchSequences->  fetch        (blocks: reading; each rank its own: rl_step.py)
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
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from proto import rollout_pb2
from trainer.config import RlConfig
from trainer.errors import CheckpointWriteError, GuardError, NonFiniteError
from trainer.group_batch import GroupBatch
from trainer.guards import Guards, Verdict
from trainer.manager_link import ManagerLink
from trainer.metrics_log import StepRecord
from trainer.selection import Selection
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
        self._work = runner.work.rl_step()
        self._selection = Selection(runner, link, self._config.evaluation)
        self._guards = Guards(self._config.guards)
        self._updated_at_s: dict[int, float] = {}  # version -> when its update was done; Unix time

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
            latency = self._latency(claimed)
            consumed_version = self._runner.weight_version
            batch = self._fetch(claimed)
            clock.lap("fetch")
            self._work.score()
            clock.lap("logprob")
            try:
                trained = self._work.update(step)
            except NonFiniteError as error:
                clock.lap("update")
                self._trip(f"step {step}: {error}")
                clock.lap("other")  # it may have been paused for hours
                trained = None
                batch = batch.left_out((g.group_id for g in claimed.groups), "non_finite")
            clock.lap("update")
            updated_at_s = time.time()
            published = self._runner.publish_to_stage() if trained is not None else 0
            clock.lap("publish")
            if published:
                self._updated_at_s[published] = updated_at_s
            self._ack(claimed, batch, step, consumed_version)
            scalars = _scalars(batch, trained)
            scalars["num_groups_ready_left"] = float(claimed.num_groups_ready_left)
            scalars["lineage"] = float(self._runner.lineage)
            scalars |= latency
            verdict = self._guards.observe(step, scalars)
            scalars |= verdict.scalars | clock.scalars()
            scalars |= self._runner.throughput.scalars(scalars)
            self._runner.step_done(
                StepRecord(
                    self._name,
                    step,
                    published,
                    time.time(),
                    scalars,
                    batch.staleness,
                    clock.spans,
                ),
                claimed.batch_id,
            )
            self._heed(verdict, is_last=step == num_steps)
            self._selection.after(step, num_steps)
        self._selection.end(num_steps)

    def _latency(self, claimed: rollout_pb2.NextBatchReply) -> dict[str, float]:
        """From an update's end to the first token that a turn began with its version, of the newest
        that is known and was not told yet. Engines wait for no batch with it; only the telling does.
        """
        told: dict[str, float] = {}
        for first in sorted(claimed.first_tokens, key=lambda f: f.weight_version):
            updated_at_s = self._updated_at_s.get(first.weight_version)
            if updated_at_s is not None:
                sampled_at_s = first.sampled_at.ToNanoseconds() / 1e9
                told["publish_to_first_token_s"] = sampled_at_s - updated_at_s
                # This one is told, and those before it will not be.
                self._updated_at_s = {
                    v: at for v, at in self._updated_at_s.items() if v > first.weight_version
                }
        return told

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
        """The batch's tokens, each data-parallel rank its own."""
        version = self._runner.weight_version
        oldest = [m.oldest_weight_version for g in claimed.groups for m in g.members]
        versions = np.arange(min(oldest, default=version), version + 1)
        ages = dict(zip(versions.tolist(), self._runner.aged(versions).tolist(), strict=True))
        limit = min(self._config.max_staleness, claimed.max_staleness or self._config.max_staleness)
        groups = [group.SerializeToString() for group in claimed.groups]
        return self._work.fetch(groups, version, limit, ages)

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


def _scalars(batch: GroupBatch, trained: dict[str, float] | None) -> dict[str, float]:
    if trained is not None:
        return batch.scalars | trained
    refused = "non_finite" in batch.dropped_groups.values()
    return batch.scalars | {"step_skipped": 1.0, "guard_non_finite": float(refused)}
