"""Watches a run: samples the manager and the trainer, keeps the samples, shows the progress.

Owner of `metrics/status.jsonl` (one manager status a sample). A service that does not answer
is shown as such; watching never fails a run.

    every status_interval_s: GetStatus of manager and trainer -> status.jsonl -> display
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import deque
from pathlib import Path
from typing import Any

import grpc.aio
from google.protobuf import json_format
from rich.console import Console
from rich.live import Live
from rich.table import Table

from proto import rollout_pb2, trainer_pb2
from rollout.client import RolloutClient, RolloutError
from trainer.client import TrainerClient

_RATE_WINDOW_S = 60.0
_PLAIN_INTERVAL_S = 10.0


def status_row(status: rollout_pb2.GetStatusReply, time_s: float, stage: str) -> dict[str, Any]:
    """One sample as a line of status.jsonl has it: the manager's status, Unix seconds, the stage."""
    row: dict[str, Any] = json_format.MessageToDict(
        status, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return row | {"time_s": time_s, "stage": stage}


class Monitor:
    """Samples in the background while entered; `stage` is what the job says that it does."""

    def __init__(
        self,
        rollout: RolloutClient,
        trainer: TrainerClient,
        metrics: Path,
        interval_s: float,
        console: Console,
    ) -> None:
        self._rollout = rollout
        self._trainer = trainer
        self._path = metrics / "status.jsonl"
        self._interval_s = interval_s
        self._console = console
        self._finished: deque[tuple[float, int]] = deque()
        self._task: asyncio.Task[None] | None = None
        self._manager_status: rollout_pb2.GetStatusReply | None = None
        self._trainer_status: trainer_pb2.GetStatusReply | None = None
        self.stage = "starting"

    async def __aenter__(self) -> Monitor:
        self._task = asyncio.create_task(self._watch(), name="monitor")
        return self

    async def __aexit__(self, *exception: object) -> None:
        assert self._task is not None
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _watch(self) -> None:
        if self._console.is_terminal:
            with Live(
                self._table(), console=self._console, auto_refresh=False, transient=True
            ) as live:
                while True:
                    await self._sample()
                    live.update(self._table(), refresh=True)
                    await asyncio.sleep(self._interval_s)
        next_line = 0.0
        while True:
            await self._sample()
            if time.monotonic() >= next_line:
                self._console.print(self.line(), highlight=False, soft_wrap=True)
                next_line = time.monotonic() + _PLAIN_INTERVAL_S
            await asyncio.sleep(self._interval_s)

    async def _sample(self) -> None:
        with contextlib.suppress(RolloutError):
            self._manager_status = await self._rollout.get_status()
            status = self._manager_status
            now = time.monotonic()
            total = status.num_attempts_finished
            self._finished.append((now, total))
            while now - self._finished[0][0] > _RATE_WINDOW_S:
                self._finished.popleft()
            row = status_row(status, time.time(), self.stage)
            # A sample that finds no room on the disk is no reason to stop watching.
            with contextlib.suppress(OSError), self._path.open("a") as file:
                file.write(json.dumps(row) + "\n")
        with contextlib.suppress(grpc.aio.AioRpcError):
            self._trainer_status = await self._trainer.get_status()

    def trajectories_per_hour(self) -> float:
        """Finished training attempts over the last minute, scaled to an hour."""
        if len(self._finished) < 2:
            return 0.0
        (t0, n0), (t1, n1) = self._finished[0], self._finished[-1]
        return 3600.0 * (n1 - n0) / (t1 - t0) if t1 > t0 else 0.0

    def figures(self) -> dict[str, str]:
        """What the display shows, in order."""
        shown = {"stage": self.stage}
        trainer, manager = self._trainer_status, self._manager_status
        if trainer is not None and trainer.num_steps:
            shown["step"] = f"{trainer.stage_name} {trainer.step}/{trainer.num_steps}"
            scalars = trainer.last_metrics.scalars
            if "loss" in scalars:
                shown["loss"] = f"{scalars['loss']:.4f}"
            if trainer.pause_reason:
                shown["paused"] = trainer.pause_reason
            if "staleness_mean" in scalars:
                shown["staleness"] = f"{scalars['staleness_mean']:.2f}"
        if manager is not None:
            shown["reward"] = f"{manager.reward_mean_recent:.3f}"
            shown["trajectories/hour"] = f"{self.trajectories_per_hour():,.0f}"
            shown["in flight"] = (
                f"{manager.num_attempts_running} (+{manager.num_attempts_queued} queued)"
            )
            shown["groups ready"] = str(manager.num_groups_ready)
            shown["weight_version"] = str(manager.weight_version)
            outages = [f"{b.name} {b.state}" for b in manager.backends if b.state != "closed"]
            if outages:
                shown["outage"] = ", ".join(outages)
            if manager.admission_held:
                shown["paused"] = manager.admission_reason
            shown["KV use"] = ", ".join(
                f"{e.name} {100 * e.kv_usage:.0f} % {e.state}" for e in manager.engines
            )
        return shown

    def line(self) -> str:
        """The figures as one line, for output that is not a terminal."""
        return "  ".join(f"{name} {value}" for name, value in self.figures().items())

    def _table(self) -> Table:
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        for name, value in self.figures().items():
            table.add_row(f"[dim]{name}[/dim]", value)
        return table
