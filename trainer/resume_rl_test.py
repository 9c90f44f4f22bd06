"""A process that ends while a checkpoint is being written: which batches come again, and how often."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from proto import rollout_pb2 as rpb
from trainer.checkpoint import CheckpointStore
from trainer.checkpoint_saver import in_thread
from trainer.config import CheckpointConfig, GuardsConfig, RlConfig, TrainerConfig
from trainer.device import Device
from trainer.rl_test import group, run_until
from trainer.stage_runner import StageRequest, StageRunner
from trainer.testbed import ManagerThread, ScriptedManager

_NUM_STEPS = 5


class RewindingManager(ScriptedManager):
    """Keeps the manager's promise: batches newer than the step of a rewind are ready again."""

    def __init__(self) -> None:
        super().__init__()
        self.claimed: dict[int, rpb.NextBatchReply] = {}
        self.lineage = 0
        self.oldest_needed = 0
        self.trained: dict[int, list[str]] = {}  # groups by step along the surviving lineage

    async def NextBatch(self, request: Any, context: Any) -> rpb.NextBatchReply:
        if request.step not in self.claimed:
            reply = rpb.NextBatchReply()
            reply.CopyFrom(await super().NextBatch(request, context))
            reply.batch_id = f"b{request.step}.{self.lineage}"
            self.claimed[request.step] = reply
        return self.claimed[request.step]

    async def AckBatch(self, request: Any, context: Any) -> rpb.AckBatchReply:
        claimed = self.claimed[request.step]
        assert claimed.batch_id == request.batch_id
        self.trained[request.step] = [g.group_id for g in claimed.groups]
        return await super().AckBatch(request, context)

    async def Rewind(self, request: Any, context: Any) -> rpb.RewindReply:
        assert request.step >= self.oldest_needed, "its tokens are gone"
        past = [self.claimed[step].batch_id for step in range(1, request.step + 1)]
        assert list(request.batch_ids) == past
        self.lineage += 1
        for step in sorted((s for s in self.claimed if s > request.step), reverse=True):
            self.replies.insert(0, self.claimed.pop(step))
            self.trained.pop(step, None)
        return await super().Rewind(request, context)

    async def ReportCheckpoint(self, request: Any, context: Any) -> rpb.ReportCheckpointReply:
        self.oldest_needed = max(self.oldest_needed, request.oldest_kept_step)
        return await super().ReportCheckpoint(request, context)


def make_runner(
    tmp_path: Path,
    model: Path,
    device: Device,
    manager: ManagerThread,
    start_save: Callable[[Callable[[], None]], None] | None = None,
) -> StageRunner:
    config = TrainerConfig(
        model_dir=model,
        run_dir=tmp_path / "run",
        manager_address=manager.address,
        checkpoint=CheckpointConfig(timeout_s=60.0 if start_save is None else 0.01),
        rl=RlConfig(
            groups_per_step=1,
            batch_wait_s=0.2,
            checkpoint_every_steps=1,
            guards=GuardsConfig(action="warn"),
        ),
    )
    return StageRunner(config, device, manager.link, start_save or in_thread)


@pytest.mark.parametrize("num_written", [0, 1, 2])
def test_a_kill_before_the_save_ended_trains_no_batch_twice_and_leaves_none_out(
    tmp_path: Path, model_dir: Path, device: Device, num_written: int
) -> None:
    ledger = RewindingManager()
    manager = ManagerThread(manager=ledger)
    begun: list[Callable[[], None]] = []

    def write(work: Callable[[], None]) -> None:
        """The process is killed while it writes any save after the first ones."""
        begun.append(work)
        if len(begun) <= num_written:
            work()

    try:
        killed = make_runner(tmp_path, model_dir, device, manager, write)
        for step in range(1, _NUM_STEPS + 1):
            ledger.add_batch(group(killed, step, version=1))
        killed.run_stage(StageRequest("rl", "rl", "", _NUM_STEPS + 1))
        # Trained and acknowledged one and more steps past the checkpoint that was sealed.
        run_until(killed, lambda: killed.status().step >= num_written + 2)
        num_acked = len(ledger.acked)
        assert len(ledger.trained) == num_acked >= num_written + 2
        assert [c.step for c in ledger.checkpoints] == list(range(1, num_written + 1))

        again = make_runner(tmp_path, model_dir, device, manager)
        assert again.run_stage(StageRequest("rl", "rl", "", _NUM_STEPS)) == num_written
        run_until(again, lambda: again.status().state in {"finished", "failed"})
        assert again.status().error == ""
    finally:
        manager.close()
    assert [r.step for r in ledger.rewound] == [0, num_written]
    assert len(ledger.acked) == num_acked + _NUM_STEPS - num_written
    assert ledger.trained == {s: [f"g{s}"] for s in range(1, _NUM_STEPS + 1)}
    latest = CheckpointStore(tmp_path / "run" / "checkpoints", kept=3).latest()
    assert latest is not None
    lineages = [1] * num_written + [2] * (_NUM_STEPS - num_written)
    assert latest.progress.batch_ids == tuple(f"b{s}.{n}" for s, n in enumerate(lineages, 1))


def test_training_goes_on_while_a_checkpoint_is_written_and_its_end_waits(
    tmp_path: Path, model_dir: Path, device: Device
) -> None:
    manager = ManagerThread(manager=RewindingManager())
    try:
        runner = make_runner(tmp_path, model_dir, device, manager)
        for step in range(1, 4):
            manager.manager.add_batch(group(runner, step, version=1))
        runner.run_stage(StageRequest("rl", "rl", "", 3))
        run_until(runner, lambda: runner.status().state in {"finished", "failed"})
        assert runner.status().error == ""
    finally:
        manager.close()
    records = runner.metrics.since("rl", 1)
    assert all("checkpoint_blocked_s" in r.scalars for r in records[1:])
    assert "checkpoint_blocked_s" not in records[0].scalars
    assert runner.status().latest_checkpoint.endswith("-rl-3")
    assert manager.manager.checkpoints[-1].step == 3
