"""Client of the RolloutManager, and the file format of training sequences.

Owner: rollout. The one file of this package that others import; besides `proto` it uses
only `rollout.errors`. Every call has a deadline; a status becomes a typed error (re-exported
here). Calls that block on purpose (`lease_attempts`, `next_batch`, `admit_turn`,
`get_evaluation`) take the time that they may block as `timeout_s`.

    client = RolloutClient(dial(address, security))
    batch = await client.next_batch(NextBatchRequest(step=1, num_groups=16), timeout_s=60)
    async for sequence in client.fetch_sequences(ids): ...
"""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from proto import rollout_pb2 as pb
from proto import rollout_pb2_grpc as pb_grpc
from proto import trajectory_pb2 as tpb
from rollout.errors import (
    CAP_METADATA_KEY,
    BadRequestError,
    CapExceededError,
    ConflictError,
    CorruptStoreError,
    DeadlineError,
    FencedError,
    NotFoundError,
    RolloutError,
    UnauthenticatedError,
    UnavailableError,
    error_from_status,
)

__all__ = [
    "BadRequestError",
    "CapExceededError",
    "ConflictError",
    "CorruptStoreError",
    "DeadlineError",
    "FencedError",
    "NotFoundError",
    "RolloutClient",
    "RolloutError",
    "UnauthenticatedError",
    "UnavailableError",
    "evaluation_was_cancelled",
    "read_attempts",
    "read_sequences",
    "write_attempts",
    "write_sequences",
]

_EXPERT_CHUNK_BYTES = 2**20
SEQUENCES_MAGIC = b"SWRLSEQ1"
ATTEMPTS_MAGIC = b"SWRLATT1"
_LENGTH = struct.Struct("<I")
_Reply = TypeVar("_Reply")


def _typed(error: grpc.aio.AioRpcError) -> RolloutError:
    cap = next((str(v) for k, v in error.trailing_metadata() or () if k == CAP_METADATA_KEY), "")
    return error_from_status(error.code(), error.details() or "", cap)


def evaluation_was_cancelled(reply: pb.GetEvaluationReply) -> bool:
    """True when it lost the weight_version that it was pinned to: it has to be started again."""
    return any(tpb.CAUSE_CANCELLED in task.causes for task in reply.tasks)


class RolloutClient:
    """Typed calls to one RolloutManager over an aio channel, which the caller closes.

    Each method takes the RPC's request message and returns its reply; proto/rollout.proto
    states ordering, idempotency and errors. Raises the classes of rollout.errors.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        *,
        call_timeout_s: float = 30.0,
        stream_timeout_s: float = 300.0,
        window_timeout_s: float = 300.0,
    ) -> None:
        """Deadlines in seconds: of short calls, of streams, and of update-window calls."""
        self._stub: Any = pb_grpc.RolloutManagerStub(channel)  # type: ignore[no-untyped-call]
        self._call_timeout_s = call_timeout_s
        self._stream_timeout_s = stream_timeout_s
        self._window_timeout_s = window_timeout_s

    async def _call(
        self,
        method: Callable[..., Awaitable[_Reply]],
        request: object,
        timeout_s: float | None = None,
    ) -> _Reply:
        try:
            return await method(request, timeout=timeout_s or self._call_timeout_s)
        except grpc.aio.AioRpcError as error:
            raise _typed(error) from error

    async def _stream(self, method: Callable[..., Any], request: object) -> AsyncIterator[Any]:
        try:
            async for message in method(request, timeout=self._stream_timeout_s):
                yield message
        except grpc.aio.AioRpcError as error:
            raise _typed(error) from error

    # ---- drivers

    async def add_tasks(self, request: pb.AddTasksRequest) -> pb.AddTasksReply:
        """Adds tasks to a pool."""
        return await self._call(self._stub.AddTasks, request)

    async def set_admission(self, request: pb.SetAdmissionRequest) -> pb.SetAdmissionReply:
        """Opens or closes admission of new training groups."""
        return await self._call(self._stub.SetAdmission, request)

    async def start_evaluation(self, request: pb.StartEvaluationRequest) -> pb.StartEvaluationReply:
        """Starts an evaluation pinned to the version served now."""
        return await self._call(self._stub.StartEvaluation, request)

    async def get_evaluation(
        self, request: pb.GetEvaluationRequest, timeout_s: float | None = None
    ) -> pb.GetEvaluationReply:
        """Waits up to `timeout_s`; `finished` is False when it ran out."""
        return await self._call(self._stub.GetEvaluation, request, timeout_s)

    async def get_status(self) -> pb.GetStatusReply:
        """Counters and the engines' states."""
        return await self._call(self._stub.GetStatus, pb.GetStatusRequest())

    async def flush_cache(self) -> pb.FlushCacheReply:
        """Empties the engines' KV caches."""
        return await self._call(
            self._stub.FlushCache, pb.FlushCacheRequest(), self._window_timeout_s
        )

    async def list_attempts(self, evaluation: str = "") -> list[pb.AttemptSummary]:
        """Finished attempts in order of finishing; training attempts when `evaluation` is empty."""
        request = pb.ListAttemptsRequest(evaluation=evaluation)
        return [m async for m in self._stream(self._stub.ListAttempts, request)]

    async def fetch_turns(
        self, attempt_ids: Sequence[str], *, omit_content: bool = False
    ) -> AsyncIterator[tpb.TurnRecord]:
        """Durable turns of finished attempts, in the order of the request and of turn_index."""
        request = pb.FetchTurnsRequest(attempt_ids=attempt_ids, omit_content=omit_content)
        async for message in self._stream(self._stub.FetchTurns, request):
            yield message.turn

    # ---- gateways

    async def get_session(
        self, session_key: str
    ) -> tuple[pb.GetSessionReply.Header, list[tpb.TurnRecord]]:
        """What a session key stands for, and its durable turns in order."""
        request = pb.GetSessionRequest(session_key=session_key)
        header = pb.GetSessionReply.Header()
        turns: list[tpb.TurnRecord] = []
        async for message in self._stream(self._stub.GetSession, request):
            if message.WhichOneof("item") == "header":
                header = message.header
            else:
                turns.append(message.turn)
        return header, turns

    async def admit_turn(
        self, request: pb.AdmitTurnRequest, timeout_s: float | None = None
    ) -> pb.AdmitTurnReply:
        """Waits up to `timeout_s` in the scheduler's queue."""
        return await self._call(self._stub.AdmitTurn, request, timeout_s)

    async def append_turn(
        self, request: pb.AppendTurnRequest, experts: bytes = b""
    ) -> pb.AppendTurnReply:
        """Makes a turn durable; on success the client may be answered.

        Args: experts are those at the turn's num_routed_tokens tokens; they go in messages of 1 MiB.
        """
        if not experts:
            return await self._call(self._stub.AppendTurn, request)

        def messages() -> Iterator[pb.AppendRoutedTurnRequest]:
            yield pb.AppendRoutedTurnRequest(turn=request)
            for start in range(0, len(experts), _EXPERT_CHUNK_BYTES):
                part = experts[start : start + _EXPERT_CHUNK_BYTES]
                yield pb.AppendRoutedTurnRequest(expert_ids=part)

        return await self._call(self._stub.AppendRoutedTurn, messages())

    async def release_ticket(self, request: pb.ReleaseTicketRequest) -> pb.ReleaseTicketReply:
        """Gives a ticket back without a turn."""
        return await self._call(self._stub.ReleaseTicket, request)

    # ---- harness workers

    async def lease_attempts(
        self, request: pb.LeaseAttemptsRequest, timeout_s: float | None = None
    ) -> pb.LeaseAttemptsReply:
        """Waits up to `timeout_s` for the first attempt; the reply is empty when none came."""
        return await self._call(self._stub.LeaseAttempts, request, timeout_s)

    async def renew_attempts(self, request: pb.RenewAttemptsRequest) -> pb.RenewAttemptsReply:
        """Extends leases; `held` tells which are still owned."""
        return await self._call(self._stub.RenewAttempts, request)

    async def finish_attempt(self, request: pb.FinishAttemptRequest) -> pb.FinishAttemptReply:
        """Ends an attempt with its one cause."""
        return await self._call(self._stub.FinishAttempt, request)

    # ---- the trainer

    async def next_batch(
        self, request: pb.NextBatchRequest, timeout_s: float | None = None
    ) -> pb.NextBatchReply:
        """Waits up to `timeout_s` for a batch; DeadlineError when it did not come (ask again)."""
        return await self._call(self._stub.NextBatch, request, timeout_s)

    async def ack_batch(self, request: pb.AckBatchRequest) -> pb.AckBatchReply:
        """Marks a batch as trained."""
        return await self._call(self._stub.AckBatch, request)

    async def rewind(self, request: pb.RewindRequest) -> pb.RewindReply:
        """Opens a new lineage after a checkpoint was loaded."""
        return await self._call(self._stub.Rewind, request)

    async def report_checkpoint(
        self, request: pb.ReportCheckpointRequest
    ) -> pb.ReportCheckpointReply:
        """Tells that a checkpoint exists."""
        return await self._call(self._stub.ReportCheckpoint, request)

    async def fetch_sequences(self, attempt_ids: Sequence[str]) -> AsyncIterator[tpb.TokenSequence]:
        """Whole sequences of the attempts, in the order asked; an attempt's branches in a row."""
        whole: tpb.TokenSequence | None = None
        request = pb.FetchSequencesRequest(attempt_ids=attempt_ids)
        ids, mask, logprobs, experts = bytearray(), bytearray(), bytearray(), bytearray()
        async for message in self._stream(self._stub.FetchSequences, request):
            if whole is None:
                whole = message.part
            ids += message.part.token_ids
            experts += message.part.routed_experts.ids
            mask += message.part.loss_mask
            logprobs += message.part.rollout_logprobs
            if message.last_part:
                whole.token_ids, whole.loss_mask = bytes(ids), bytes(mask)
                whole.rollout_logprobs = bytes(logprobs)
                if whole.HasField("routed_experts"):
                    whole.routed_experts.ids = bytes(experts)
                yield whole
                whole = None
                ids, mask, logprobs, experts = bytearray(), bytearray(), bytearray(), bytearray()
        if whole is not None:
            raise CorruptStoreError(
                f"FetchSequences ended inside a sequence of attempt {whole.attempt_id}; ask again"
            )

    async def open_update_window(
        self, request: pb.OpenUpdateWindowRequest, timeout_s: float | None = None
    ) -> pb.OpenUpdateWindowReply:
        """Opens the one update window; ConflictError if the version was used before."""
        return await self._call(
            self._stub.OpenUpdateWindow, request, timeout_s or self._window_timeout_s
        )

    async def close_update_window(
        self, request: pb.CloseUpdateWindowRequest, timeout_s: float | None = None
    ) -> pb.CloseUpdateWindowReply:
        """Ends the window of `request.epoch`."""
        return await self._call(
            self._stub.CloseUpdateWindow, request, timeout_s or self._window_timeout_s
        )


def write_sequences(path: Path, sequences: Iterable[tpb.TokenSequence]) -> int:
    """Writes a .sequences file (8-byte magic, then u32 length + message each); returns the count.

    The file appears under its name only when complete.
    """
    return _write_records(path, SEQUENCES_MAGIC, sequences)


def read_sequences(path: Path) -> Iterator[tpb.TokenSequence]:
    """Reads what `write_sequences` wrote; CorruptStoreError if it is something else or cut."""
    return map(tpb.TokenSequence.FromString, _read_records(path, SEQUENCES_MAGIC, "sequences"))


def write_attempts(path: Path, attempts: Iterable[pb.AttemptSummary]) -> int:
    """Writes a file of attempts, framed like a .sequences file; returns the count."""
    return _write_records(path, ATTEMPTS_MAGIC, attempts)


def read_attempts(path: Path) -> Iterator[pb.AttemptSummary]:
    """Reads what `write_attempts` wrote; CorruptStoreError if it is something else or cut."""
    return map(pb.AttemptSummary.FromString, _read_records(path, ATTEMPTS_MAGIC, "attempts"))


def _write_records(path: Path, magic: bytes, records: Iterable[Message]) -> int:
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    count = 0
    try:
        with partial.open("wb") as file:
            file.write(magic)
            for record in records:
                data = record.SerializeToString()
                file.write(_LENGTH.pack(len(data)))
                file.write(data)
                count += 1
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return count


def _read_records(path: Path, wanted: bytes, what: str) -> Iterator[bytes]:
    with Path(path).open("rb") as file:
        magic = file.read(len(wanted))
        if magic != wanted:
            raise CorruptStoreError(
                f"{path} is no {what} file: got magic {magic!r}, wanted {wanted!r}"
            )
        while head := file.read(_LENGTH.size):
            if len(head) < _LENGTH.size:
                raise CorruptStoreError(f"{path} ends inside a length; write it again")
            (size,) = _LENGTH.unpack(head)
            data = file.read(size)
            if len(data) < size:
                raise CorruptStoreError(
                    f"{path} ends inside a record: got {len(data)} B, wanted {size} B"
                )
            yield data
