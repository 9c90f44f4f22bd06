"""RolloutManager on the wire: messages to the manager's methods and back.

Owner: rollout.server. No decisions here: conversions, deadlines, and the one place where a
RolloutError becomes a status (rollout.errors' table).
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, NoReturn, TypeVar

from grpc.aio import ServicerContext as _Context

from proto import rollout_pb2 as pb
from proto import rollout_pb2_grpc as pb_grpc
from proto import trajectory_pb2 as tpb
from rollout.attempt_summaries import summaries
from rollout.attempt_table import Attempt
from rollout.config import RolloutConfig
from rollout.errors import (
    CAP_METADATA_KEY,
    BadRequestError,
    CapExceededError,
    RolloutError,
    status_code,
)
from rollout.experts import bytes_per_token
from rollout.manager import RolloutManager
from rollout.status import manager_status

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["RolloutManager"].full_name
_Request = TypeVar("_Request")
_Reply = TypeVar("_Reply")


async def _abort(context: _Context, error: RolloutError) -> NoReturn:
    metadata = (
        ((CAP_METADATA_KEY, error.cap),)
        if isinstance(error, CapExceededError) and error.cap
        else ()
    )
    await context.abort(status_code(error), str(error), trailing_metadata=metadata)
    raise AssertionError("abort raises")


def _unary(
    method: Callable[[Any, _Request, _Context], Awaitable[_Reply]],
) -> Callable[[Any, _Request, _Context], Awaitable[_Reply]]:
    """Turns a RolloutError of a unary call into its status."""

    @functools.wraps(method)
    async def handler(self: Any, request: _Request, context: _Context) -> _Reply:
        try:
            return await method(self, request, context)
        except RolloutError as error:
            await _abort(context, error)

    return handler


def _stream(
    method: Callable[[Any, _Request, _Context], AsyncIterator[_Reply]],
) -> Callable[[Any, _Request, _Context], AsyncIterator[_Reply]]:
    """Turns a RolloutError of a streaming call into its status."""

    @functools.wraps(method)
    async def handler(self: Any, request: _Request, context: _Context) -> AsyncIterator[_Reply]:
        try:
            async for reply in method(self, request, context):
                yield reply
        except RolloutError as error:
            await _abort(context, error)

    return handler


class RolloutServicer(pb_grpc.RolloutManagerServicer):
    """The service; proto/rollout.proto documents each call."""

    def __init__(self, manager: RolloutManager) -> None:
        self._manager = manager

    def _wait_s(self, context: _Context) -> float:
        """How long a call may block so that its answer still arrives in time."""
        remaining = context.time_remaining()
        if remaining is None:
            return self._manager.config.long_poll_s
        return max(0.0, remaining - min(0.5, remaining / 2))

    # ---- drivers

    @_unary
    async def AddTasks(self, request: pb.AddTasksRequest, context: _Context) -> pb.AddTasksReply:
        added = self._manager.add_tasks(request.pool, request.tasks)
        return pb.AddTasksReply(num_added=added, num_known=len(request.tasks) - added)

    @_unary
    async def SetAdmission(
        self, request: pb.SetAdmissionRequest, context: _Context
    ) -> pb.SetAdmissionReply:
        self._manager.set_admission(request.open, request.reason, hold=request.hold)
        return pb.SetAdmissionReply()

    @_unary
    async def StartEvaluation(
        self, request: pb.StartEvaluationRequest, context: _Context
    ) -> pb.StartEvaluationReply:
        progress = await self._manager.start_evaluation(request)
        return pb.StartEvaluationReply(
            num_attempts=progress.num_attempts, weight_version=progress.weight_version
        )

    @_unary
    async def GetEvaluation(
        self, request: pb.GetEvaluationRequest, context: _Context
    ) -> pb.GetEvaluationReply:
        return await self._manager.wait_evaluation(request.name, self._wait_s(context))

    @_unary
    async def GetStatus(self, request: pb.GetStatusRequest, context: _Context) -> pb.GetStatusReply:
        return manager_status(self._manager)

    @_unary
    async def FlushCache(
        self, request: pb.FlushCacheRequest, context: _Context
    ) -> pb.FlushCacheReply:
        await self._manager.pool.flush_cache()
        return pb.FlushCacheReply()

    @_stream
    async def ListAttempts(
        self, request: pb.ListAttemptsRequest, context: _Context
    ) -> AsyncIterator[pb.AttemptSummary]:
        for summary in summaries(self._manager.attempts, request.evaluation):
            yield summary

    @_stream
    async def FetchTurns(
        self, request: pb.FetchTurnsRequest, context: _Context
    ) -> AsyncIterator[pb.FetchTurnsReply]:
        for attempt_id in request.attempt_ids:
            for turn in self._manager.sessions.finished_turns(attempt_id):
                if request.omit_content:
                    turn.ClearField("prompt_ids")
                    turn.ClearField("sampled_ids")
                    turn.ClearField("rollout_logprobs")
                    turn.ClearField("new_messages_json")
                    turn.ClearField("assistant_message_json")
                yield pb.FetchTurnsReply(turn=turn)

    # ---- gateways

    @_stream
    async def GetSession(
        self, request: pb.GetSessionRequest, context: _Context
    ) -> AsyncIterator[pb.GetSessionReply]:
        attempt = self._manager.attempts.by_session(request.session_key)
        turns = list(self._manager.sessions.turns(attempt))  # one moment's view
        yield pb.GetSessionReply(
            header=pb.GetSessionReply.Header(
                attempt_id=attempt.attempt_id,
                epoch=attempt.epoch,
                sampling=self._manager.sessions.sampling(attempt),
                caps=self._manager.sessions.caps(),
                evaluation=attempt.evaluation,
                task_id=attempt.task_id,
                expert_layout=self._manager.sessions.expert_layout,
            )
        )
        for turn in turns:
            yield pb.GetSessionReply(turn=turn)

    @_unary
    async def AdmitTurn(self, request: pb.AdmitTurnRequest, context: _Context) -> pb.AdmitTurnReply:
        grant = await self._manager.admit_turn(request, self._wait_s(context))
        engine = self._manager.pool.engines[grant.engine]
        reply = pb.AdmitTurnReply(
            engine=engine.name,
            engine_url=engine.url,
            extra_key=grant.kv.extra_key,
            kv_version_lower_bound=grant.kv.version_lower_bound,
        )
        reply.queued.FromMicroseconds(int(grant.queued_s * 1e6))
        return reply

    @_unary
    async def AppendTurn(
        self, request: pb.AppendTurnRequest, context: _Context
    ) -> pb.AppendTurnReply:
        self._manager.append_turn(request.ticket_id, request.epoch, request.turn)
        return pb.AppendTurnReply()

    @_unary
    async def AppendRoutedTurn(
        self, requests: AsyncIterator[pb.AppendRoutedTurnRequest], context: _Context
    ) -> pb.AppendTurnReply:
        first: pb.AppendTurnRequest | None = None
        experts = bytearray()
        most = 0
        async for request in requests:
            if first is None and request.WhichOneof("item") == "turn":
                first = request.turn
                most = self._manager.sessions.most_expert_bytes(first.turn)
            elif first is None or len(experts) + len(request.expert_ids) > most:
                raise BadRequestError(
                    f"AppendRoutedTurn wants a turn, then at most {most} B of experts; got "
                    f"{request.WhichOneof('item')} after {len(experts)} B of them"
                )
            else:
                experts += request.expert_ids
        if first is None:
            raise BadRequestError("AppendRoutedTurn wants a turn; the stream was empty")
        self._manager.append_turn(first.ticket_id, first.epoch, first.turn, bytes(experts))
        return pb.AppendTurnReply()

    @_unary
    async def ReleaseTicket(
        self, request: pb.ReleaseTicketRequest, context: _Context
    ) -> pb.ReleaseTicketReply:
        await self._manager.release_ticket(request.ticket_id, request.engine_failed, request.detail)
        return pb.ReleaseTicketReply()

    # ---- harness workers

    @_unary
    async def LeaseAttempts(
        self, request: pb.LeaseAttemptsRequest, context: _Context
    ) -> pb.LeaseAttemptsReply:
        leased = await self._manager.lease_attempts(
            request.worker, request.max_attempts, self._wait_s(context), request.incarnation
        )
        return pb.LeaseAttemptsReply(attempts=[self._leased(a) for a in leased])

    @_unary
    async def RenewAttempts(
        self, request: pb.RenewAttemptsRequest, context: _Context
    ) -> pb.RenewAttemptsReply:
        held, expires_at = self._manager.renew(request.worker, request.attempts)
        reply = pb.RenewAttemptsReply(held=held)
        reply.expires_at.FromMicroseconds(int(expires_at * 1e6))
        return reply

    @_unary
    async def FinishAttempt(
        self, request: pb.FinishAttemptRequest, context: _Context
    ) -> pb.FinishAttemptReply:
        return pb.FinishAttemptReply(requeued=self._manager.finish_attempt(request))

    # ---- the trainer

    @_unary
    async def NextBatch(self, request: pb.NextBatchRequest, context: _Context) -> pb.NextBatchReply:
        manager = self._manager
        batch_id = await manager.next_batch(
            request.step, request.num_groups, request.weight_version, self._wait_s(context)
        )
        reply = pb.NextBatchReply(
            num_groups_ready_left=manager.batches.num_ready(),
            max_staleness=manager.config.max_staleness,
            republish_requested=batch_id is None,
            first_tokens=manager.first_tokens.messages(),
        )
        if batch_id is not None:
            reply.batch_id = batch_id
            reply.groups.extend(manager.batches.groups(batch_id))
        return reply

    @_unary
    async def AckBatch(self, request: pb.AckBatchRequest, context: _Context) -> pb.AckBatchReply:
        self._manager.acknowledge(request)
        return pb.AckBatchReply()

    @_unary
    async def Rewind(self, request: pb.RewindRequest, context: _Context) -> pb.RewindReply:
        rewound = self._manager.rewind(request.step, request.lineage_token, list(request.batch_ids))
        return pb.RewindReply(
            lineage=rewound.lineage,
            max_weight_version=rewound.max_weight_version,
            num_batches_ready_again=rewound.num_batches,
        )

    @_unary
    async def ReportCheckpoint(
        self, request: pb.ReportCheckpointRequest, context: _Context
    ) -> pb.ReportCheckpointReply:
        self._manager.report_checkpoint(request.oldest_kept_step)
        return pb.ReportCheckpointReply()

    @_stream
    async def FetchSequences(
        self, request: pb.FetchSequencesRequest, context: _Context
    ) -> AsyncIterator[pb.FetchSequencesReply]:
        for attempt_id in request.attempt_ids:
            for sequence in self._manager.sessions.training_sequences(attempt_id):
                for part in split_sequence(sequence, self._manager.config):
                    yield part

    @_unary
    async def OpenUpdateWindow(
        self, request: pb.OpenUpdateWindowRequest, context: _Context
    ) -> pb.OpenUpdateWindowReply:
        opened = await self._manager.open_window(request)
        return pb.OpenUpdateWindowReply(
            epoch=opened.epoch,
            targets=[
                pb.UpdateTarget(
                    engine=t.engine,
                    url=t.url,
                    weight_version=t.weight_version,
                    tensor_parallel=t.tensor_parallel,
                )
                for t in opened.targets
            ],
            lineage=self._manager.ledger.lineage,
        )

    @_unary
    async def CloseUpdateWindow(
        self, request: pb.CloseUpdateWindowRequest, context: _Context
    ) -> pb.CloseUpdateWindowReply:
        closed = await self._manager.close_window(request)
        reply = pb.CloseUpdateWindowReply(
            engines_serving=closed.engines_serving, engines_restarting=closed.engines_restarting
        )
        reply.paused.FromMicroseconds(int(closed.paused_s * 1e6))
        return reply

    def _leased(self, attempt: Attempt) -> pb.LeasedAttempt:
        manager = self._manager
        leased = pb.LeasedAttempt(
            attempt_id=attempt.attempt_id,
            epoch=attempt.epoch,
            group_id=attempt.group_id,
            task_id=attempt.task_id,
            task_path=manager.ledger.task_path(attempt.task_id) or "",
            session_key=attempt.session_key,
            agent=attempt.agent,
            caps=manager.sessions.caps(),
            evaluation=attempt.evaluation,
        )
        leased.expires_at.FromMicroseconds(int(attempt.lease_expires_at * 1e6))
        if manager.config.time_budget_s is not None:
            leased.time_budget.FromMicroseconds(int(manager.config.time_budget_s * 1e6))
        return leased


def split_sequence(
    sequence: tpb.TokenSequence, config: RolloutConfig
) -> Iterator[pb.FetchSequencesReply]:
    """Messages within fetch_chunk_tokens and fetch_chunk_bytes; scalars and spans ride in the first."""
    total = len(sequence.token_ids) // 4
    routed = sequence.routed_experts
    width = bytes_per_token(routed.layout)
    chunk = max(1, min(config.fetch_chunk_tokens, config.fetch_chunk_bytes // (9 + width)))
    for start in range(0, max(total, 1), chunk):
        end = start + chunk
        part = tpb.TokenSequence(attempt_id=sequence.attempt_id)
        if start == 0:
            part.CopyFrom(sequence)
        part.branch_index = sequence.branch_index
        part.token_ids = sequence.token_ids[4 * start : 4 * end]
        part.loss_mask = sequence.loss_mask[start:end]
        part.rollout_logprobs = sequence.rollout_logprobs[4 * start : 4 * end]
        if width:
            part.routed_experts.ids = routed.ids[width * start : width * end]
        yield pb.FetchSequencesReply(part=part, last_part=end >= total)
