"""The Trainer service of trainer.proto: translates messages to StageRunner calls and back.

Owner: the event-loop thread. It never touches torch; work goes to the main thread as jobs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import grpc
from google.protobuf import duration_pb2, struct_pb2, timestamp_pb2

from proto import trainer_pb2 as pb
from proto import trainer_pb2_grpc
from rollout.client import RolloutError
from trainer.errors import STATUS_CODES, TrainerError
from trainer.metrics_log import StepRecord
from trainer.stage_runner import Kind, StageRequest, StageRunner, State

_T = TypeVar("_T")

_KINDS: dict[int, Kind] = {
    pb.STAGE_KIND_PRETRAIN: "pretrain",
    pb.STAGE_KIND_SFT: "sft",
    pb.STAGE_KIND_RL: "rl",
}
_STATES: dict[State, pb.StageState] = {
    "idle": pb.STAGE_STATE_IDLE,
    "running": pb.STAGE_STATE_RUNNING,
    "paused": pb.STAGE_STATE_PAUSED,
    "finished": pb.STAGE_STATE_FINISHED,
    "failed": pb.STAGE_STATE_FAILED,
}


def _metrics(record: StepRecord) -> pb.StepMetrics:
    seconds = int(record.finished_at)
    nanos = int((record.finished_at - seconds) * 1e9)
    return pb.StepMetrics(
        stage_name=record.stage,
        step=record.step,
        weight_version=record.weight_version,
        finished_at=timestamp_pb2.Timestamp(seconds=seconds, nanos=nanos),
        scalars=record.scalars,
        staleness_histogram=record.staleness_histogram,
    )


def _duration(seconds: float) -> duration_pb2.Duration:
    duration = duration_pb2.Duration()
    duration.FromNanoseconds(int(seconds * 1e9))
    return duration


class TrainerService(trainer_pb2_grpc.TrainerServicer):
    """Serves one StageRunner."""

    def __init__(self, runner: StageRunner, stopping: asyncio.Event) -> None:
        """Args: stopping is set when the process begins to end; streams then finish."""
        self._runner = runner
        self._stopping = stopping

    async def RunStage(self, request: Any, context: Any) -> pb.RunStageReply:
        kind = _KINDS.get(request.kind)
        if kind is None:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"RunStage got kind {request.kind}: want PRETRAIN, SFT or RL",
            )
        wanted = StageRequest(kind, request.name, request.data_path, request.num_steps)  # type: ignore[arg-type]

        async def start() -> int:
            return self._runner.run_stage(wanted)

        completed = await self._typed(context, start)
        return pb.RunStageReply(completed_steps=completed)

    async def GetStatus(self, request: Any, context: Any) -> pb.GetStatusReply:
        status = self._runner.status()
        reply = pb.GetStatusReply(
            state=_STATES[status.state],
            stage_name=status.stage.name if status.stage else "",
            step=status.step,
            num_steps=status.stage.num_steps if status.stage else 0,
            weight_version=status.weight_version,
            error=status.error,
            finished_stages=status.finished_stages,
            num_parameters=status.num_parameters,
            latest_checkpoint=status.latest_checkpoint,
            pause_reason=status.pause_reason,
        )
        if status.last_record is not None:
            reply.last_metrics.CopyFrom(_metrics(status.last_record))
        return reply

    async def StreamMetrics(self, request: Any, context: Any) -> AsyncIterator[pb.StepMetrics]:
        loop, news = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            loop.call_soon_threadsafe(news.set)

        self._runner.metrics.add_listener(wake)
        try:
            step = max(1, request.from_step)
            while True:
                news.clear()
                for record in self._runner.metrics.since(request.stage_name, step):
                    yield _metrics(record)
                    step = record.step + 1
                if self._stopping.is_set():
                    return
                waits = {
                    asyncio.create_task(news.wait()),
                    asyncio.create_task(self._stopping.wait()),
                }
                try:
                    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for task in waits:
                        task.cancel()
        finally:
            self._runner.metrics.remove_listener(wake)

    async def SaveCheckpoint(self, request: Any, context: Any) -> pb.SaveCheckpointReply:
        def save() -> tuple[Path, float]:
            begun = time.monotonic()
            return self._runner.save(), time.monotonic() - begun

        path, seconds = await self._job(context, save)
        return pb.SaveCheckpointReply(path=str(path), duration=_duration(seconds))

    async def Export(self, request: Any, context: Any) -> pb.ExportReply:
        path = Path(request.path)
        count, size = await self._job(context, lambda: self._runner.export(path))
        return pb.ExportReply(num_tensors=count, num_bytes=size)

    async def Publish(self, request: Any, context: Any) -> pb.PublishReply:
        result = await self._job(context, self._runner.publish)
        return pb.PublishReply(
            weight_version=result.weight_version,
            duration=_duration(result.duration_s),
            num_bytes=result.num_bytes,
            num_engines=len(result.engines),
        )

    async def MeasureGap(self, request: Any, context: Any) -> pb.MeasureGapReply:
        ids, version = list(request.attempt_ids), request.weight_version
        gap = await self._job(context, lambda: self._runner.measure_gap(ids, version))
        details = struct_pb2.Struct()
        details.update(gap.worst)
        return pb.MeasureGapReply(
            num_tokens=gap.num_tokens,
            mean_abs_nats=gap.mean_abs_nats,
            max_abs_nats=gap.max_abs_nats,
            details=details,
        )

    async def Pause(self, request: Any, context: Any) -> pb.PauseReply:
        self._runner.pause()
        return pb.PauseReply()

    async def Resume(self, request: Any, context: Any) -> pb.ResumeReply:
        self._runner.resume()
        return pb.ResumeReply()

    async def Stop(self, request: Any, context: Any) -> pb.StopReply:
        self._runner.stop(request.save_checkpoint)
        return pb.StopReply()

    async def _job(self, context: Any, work: Callable[[], _T]) -> _T:
        async def run() -> _T:
            return await asyncio.wrap_future(self._runner.submit(work))

        return await self._typed(context, run)

    async def _typed(self, context: Any, call: Callable[[], Awaitable[_T]]) -> _T:
        """Awaits `call`, and turns our errors into the status that STATUS_CODES names."""
        try:
            return await call()
        except TrainerError as error:
            code = STATUS_CODES.get(type(error), grpc.StatusCode.INTERNAL)
            await context.abort(code, str(error))
        except OSError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"cannot write: {error}")
        except RolloutError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"the manager failed: {error}")
        raise AssertionError("abort raises")
