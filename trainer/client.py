"""Client of the Trainer service: what drivers and launch use. Imports `proto` alone.

Each method is one RPC of trainer.proto, with a deadline. Errors are grpc.aio.AioRpcError with
the codes that trainer.proto names.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc

from proto import trainer_pb2 as pb
from proto import trainer_pb2_grpc


class TrainerClient:
    """Calls one trainer over an asyncio channel, which the caller closes."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        *,
        call_timeout_s: float = 30.0,
        work_timeout_s: float = 600.0,
    ) -> None:
        """Args: deadlines in seconds, of short calls and of those that wait for a step to end."""
        self._stub: Any = trainer_pb2_grpc.TrainerStub(channel)  # type: ignore[no-untyped-call]
        self._call_timeout_s = call_timeout_s
        self._work_timeout_s = work_timeout_s

    async def run_stage(
        self, kind: pb.StageKind, name: str, num_steps: int, data_path: str = ""
    ) -> int:
        """Starts a stage; returns the steps already done. Idempotent by (kind, name)."""
        request = pb.RunStageRequest(kind=kind, name=name, num_steps=num_steps, data_path=data_path)
        reply = await self._stub.RunStage(request, timeout=self._call_timeout_s)
        return int(reply.completed_steps)

    async def get_status(self) -> pb.GetStatusReply:
        """What the trainer is doing."""
        reply: pb.GetStatusReply = await self._stub.GetStatus(
            pb.GetStatusRequest(), timeout=self._call_timeout_s
        )
        return reply

    async def stream_metrics(
        self, stage_name: str, from_step: int = 1, timeout_s: float | None = None
    ) -> AsyncIterator[pb.StepMetrics]:
        """Every step's metrics from from_step on, then live ones until the trainer stops.

        Args: timeout_s bounds the whole stream; with None, break out when you have enough.
        """
        request = pb.StreamMetricsRequest(stage_name=stage_name, from_step=from_step)
        async for metrics in self._stub.StreamMetrics(request, timeout=timeout_s):
            yield metrics

    async def save_checkpoint(self) -> pb.SaveCheckpointReply:
        """Writes a checkpoint between steps; durable when this returns."""
        reply: pb.SaveCheckpointReply = await self._stub.SaveCheckpoint(
            pb.SaveCheckpointRequest(), timeout=self._work_timeout_s
        )
        return reply

    async def export(self, path: str) -> pb.ExportReply:
        """Writes the weights as a Hugging Face folder at an absolute path."""
        reply: pb.ExportReply = await self._stub.Export(
            pb.ExportRequest(path=path), timeout=self._work_timeout_s
        )
        return reply

    async def publish(self) -> pb.PublishReply:
        """Publishes the current weights as a new version. Not idempotent."""
        reply: pb.PublishReply = await self._stub.Publish(
            pb.PublishRequest(), timeout=self._work_timeout_s
        )
        return reply

    async def measure_gap(
        self, attempt_ids: list[str], weight_version: int = 0
    ) -> pb.MeasureGapReply:
        """Compares rollout_logprobs of attempts with the current weights'."""
        reply: pb.MeasureGapReply = await self._stub.MeasureGap(
            pb.MeasureGapRequest(attempt_ids=attempt_ids, weight_version=weight_version),
            timeout=self._work_timeout_s,
        )
        return reply

    async def pause(self) -> None:
        """No further step starts until `resume`."""
        await self._stub.Pause(pb.PauseRequest(), timeout=self._call_timeout_s)

    async def resume(self) -> None:
        """Lets steps start again."""
        await self._stub.Resume(pb.ResumeRequest(), timeout=self._call_timeout_s)

    async def stop(self, save_checkpoint: bool = False) -> None:
        """Ends the process after the current step; returns before it has ended."""
        await self._stub.Stop(
            pb.StopRequest(save_checkpoint=save_checkpoint), timeout=self._call_timeout_s
        )
