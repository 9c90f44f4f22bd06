"""The trainer's line to the RolloutManager: blocking calls for the main thread.

The gRPC channel and the weight publisher live in the server's event loop; the main thread hands
it a coroutine and waits. An unavailable manager is retried until `manager_retry_s`, because it
restarts with its ledger intact. Owner: the main thread.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, Protocol, TypeVar

from proto import rollout_pb2, trajectory_pb2
from rollout.client import (
    DeadlineError,
    FencedError,
    RolloutClient,
    UnavailableError,
    evaluation_was_cancelled,
)
from trainer.errors import EvaluationFailedError, EvaluationLostError, PublishFailedError

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_BACKOFF_S = 0.5
_EVALUATION_POLL_S = 5.0


class PublishResult(Protocol):
    """What weightsync.publisher reports."""

    @property
    def weight_version(self) -> int:
        """The version published."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights."""
        ...

    @property
    def duration_s(self) -> float:
        """From opening the window to its close."""
        ...

    @property
    def engines(self) -> tuple[str, ...]:
        """Those that serve the version."""
        ...


class Publisher(Protocol):
    """weightsync.publisher.WeightPublisher, as it is used here."""

    async def publish(
        self, named_tensors: Iterable[tuple[str, Any]], weight_version: int
    ) -> PublishResult:
        """Opens a window, sends every tensor, closes the window."""
        ...


@dataclasses.dataclass(frozen=True)
class Unsent:
    """A publication that only counted."""

    weight_version: int
    num_bytes: int = 0
    duration_s: float = 0.0
    engines: tuple[str, ...] = ()


class CountingPublisher:
    """Publishes to nobody: a replay has no engines, but its versions grow as the run's did."""

    async def publish(
        self, named_tensors: Iterable[tuple[str, Any]], weight_version: int
    ) -> PublishResult:
        """Takes note of the version."""
        for _ in named_tensors:  # other ranks gather with this one
            pass
        return Unsent(weight_version)


class ManagerLink:
    """Calls of one trainer to one manager."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        client: RolloutClient,
        publisher: Publisher,
        retry_s: float,
        publish_errors: tuple[type[Exception], ...] = (),
    ) -> None:
        """Takes over a client and a publisher.

        Args: loop runs in another thread, and client and publisher belong to it;
          publish_errors are what the publisher raises when no engine took the weights, besides
          a manager that is away, and a window that ended before its sender did.
        """
        self._loop = loop
        self._client = client
        self._publisher = publisher
        self._retry_s = retry_s
        self._closing = False
        self._publish_errors: tuple[type[Exception], ...] = (
            UnavailableError,
            DeadlineError,
            FencedError,  # the window timed out, or died with the manager before it was closed
            *publish_errors,
        )

    def stop_retrying(self) -> None:
        """From now on an unavailable manager is not waited for: the process is ending. Any thread."""
        self._closing = True

    def next_batch(
        self, request: rollout_pb2.NextBatchRequest, timeout_s: float
    ) -> concurrent.futures.Future[rollout_pb2.NextBatchReply]:
        """Starts to wait for a batch, however long it takes; cancel the future to give up.

        Args: timeout_s is the deadline of one call; the call is idempotent by step, and is
          repeated when it passes.
        """

        async def ask() -> rollout_pb2.NextBatchReply:
            while True:
                try:
                    return await self._retry(lambda: self._client.next_batch(request, timeout_s))
                except DeadlineError:
                    continue

        return self._start(ask())

    def fetch(
        self, attempt_ids: Sequence[str], per_call: int
    ) -> list[trajectory_pb2.TokenSequence]:
        """Fetches every sequence of the attempts, `per_call` attempts at a time."""

        async def collect(part: Sequence[str]) -> list[trajectory_pb2.TokenSequence]:
            return [s async for s in self._client.fetch_sequences(part)]

        async def fetch_all() -> list[trajectory_pb2.TokenSequence]:
            sequences: list[trajectory_pb2.TokenSequence] = []
            for i in range(0, len(attempt_ids), per_call):
                part = attempt_ids[i : i + per_call]
                sequences += await self._retry(lambda part=part: collect(part))  # type: ignore[misc]
            return sequences

        return self._start(fetch_all()).result()

    def ack(self, request: rollout_pb2.AckBatchRequest) -> None:
        """Marks a batch as trained."""
        self._call(lambda: self._client.ack_batch(request))

    def rewind(self, request: rollout_pb2.RewindRequest) -> rollout_pb2.RewindReply:
        """Opens a new lineage."""
        return self._call(lambda: self._client.rewind(request))

    def report_checkpoint(self, request: rollout_pb2.ReportCheckpointRequest) -> None:
        """Tells that a checkpoint exists."""
        self._call(lambda: self._client.report_checkpoint(request))

    def evaluate(
        self, request: rollout_pb2.StartEvaluationRequest, timeout_s: float
    ) -> concurrent.futures.Future[rollout_pb2.GetEvaluationReply]:
        """Starts an evaluation and begins to wait for its end; cancel the future to give up.

        The future raises:
          EvaluationLostError: no engine serves the version any more; publish, and start another.
          EvaluationFailedError: it did not end within `timeout_s`.
          RolloutError: the manager refused.
        """

        async def ask() -> rollout_pb2.GetEvaluationReply:
            give_up = time.monotonic() + timeout_s
            await self._retry(lambda: self._client.start_evaluation(request))
            wanted = rollout_pb2.GetEvaluationRequest(name=request.name)
            while (left := give_up - time.monotonic()) > 0:
                try:
                    reply = await self._client.get_evaluation(
                        wanted, timeout_s=min(left, _EVALUATION_POLL_S)
                    )
                except (DeadlineError, UnavailableError):
                    await asyncio.sleep(min(left, _BACKOFF_S))
                    continue
                if reply.republish_requested or evaluation_was_cancelled(reply):
                    raise EvaluationLostError(
                        f"{request.name}: no engine serves weight_version "
                        f"{reply.weight_version} any more"
                    )
                if reply.finished:
                    return reply
            raise EvaluationFailedError(
                f"{request.name} did not end within {timeout_s:.0f} s; raise "
                "trainer.rl.evaluation.timeout_s"
            )

        return self._start(ask())

    def publish(
        self, named_tensors: Iterable[tuple[str, Any]], weight_version: int
    ) -> PublishResult:
        """Publishes weights once; the tensors must not change until this returns, and an iterator
        is run in another thread meanwhile.

        Raises:
          PublishFailedError: no engine serves the version; the number must not be used again.
        """
        try:
            return self._start(self._publisher.publish(named_tensors, weight_version)).result()
        except self._publish_errors as error:
            raise PublishFailedError(f"weight_version {weight_version}: {error}") from error

    def _start(self, work: Coroutine[Any, Any, _T] | Any) -> concurrent.futures.Future[_T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _call(self, call: Callable[[], Awaitable[_T]]) -> _T:
        return self._start(self._retry(call)).result()

    async def _retry(self, call: Callable[[], Awaitable[_T]]) -> _T:
        give_up = time.monotonic() + self._retry_s
        while True:
            try:
                return await call()
            except UnavailableError as error:
                if time.monotonic() >= give_up or self._closing:
                    raise
                _log.warning("manager unavailable, trying again: %s", error)
                await asyncio.sleep(_BACKOFF_S)
