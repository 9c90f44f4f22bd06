"""A recorded run on the wire: what a trainer's RL stage asks of the RolloutManager.

Owner: rollout.recorded_server. No state: the same call has the same answer. There are no engines,
so that update windows, and every call that is not the trainer's, are UNIMPLEMENTED.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc

from proto import rollout_pb2 as pb
from proto import rollout_pb2_grpc as pb_grpc
from rollout.config import RecordedRunConfig
from rollout.errors import RolloutError, status_code
from rollout.recorded_run import RecordedRun
from rollout.servicer import split_sequence

_MARGIN_S = 0.5
"""A waiting call answers this long before its deadline, or at half of a shorter one."""


class RecordedServicer(pb_grpc.RolloutManagerServicer):
    """Serves one RecordedRun."""

    def __init__(
        self, config: RecordedRunConfig, recorded: RecordedRun, stopping: asyncio.Event
    ) -> None:
        """Args: stopping ends calls that wait."""
        self._config = config
        self._recorded = recorded
        self._stopping = stopping

    async def NextBatch(self, request: Any, context: Any) -> pb.NextBatchReply:
        """The recorded batch; after the last one, what a manager without groups answers."""
        batch = self._recorded.batch(request.step)
        if batch is not None:
            return batch
        remaining = context.time_remaining()
        wait_s = self._config.rollout.long_poll_s
        if remaining is not None:
            wait_s = max(0.0, remaining - min(_MARGIN_S, remaining / 2))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), wait_s)
        await context.abort(
            grpc.StatusCode.DEADLINE_EXCEEDED,
            f"step {request.step} is not replayed: {self._config.num_steps} steps are",
        )
        raise AssertionError("abort raises")

    async def FetchSequences(
        self, request: Any, context: Any
    ) -> AsyncIterator[pb.FetchSequencesReply]:
        """Sequences as the manager builds them."""
        try:
            for attempt_id in request.attempt_ids:
                for sequence in self._recorded.sequences(attempt_id):
                    for part in split_sequence(sequence, self._config.rollout):
                        yield part
        except RolloutError as error:
            await context.abort(status_code(error), str(error))

    async def AckBatch(self, request: Any, context: Any) -> pb.AckBatchReply:
        """The record does not change."""
        return pb.AckBatchReply()

    async def Rewind(self, request: Any, context: Any) -> pb.RewindReply:
        """Each batch tells its version, so that none is reserved here."""
        return pb.RewindReply(lineage=1)

    async def ReportCheckpoint(self, request: Any, context: Any) -> pb.ReportCheckpointReply:
        """Nothing is deleted."""
        return pb.ReportCheckpointReply()
