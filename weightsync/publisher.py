"""Publishes the trainer's weights to every engine as a new weight_version.

Purpose: one call after an optimizer step. Owner: the trainer's rank 0. Flow:

    plan -> OpenUpdateWindow (manager pauses engines)
         -> call each engine's loader, which waits on the ring     \\  at once
         -> pack bucket by bucket into the ring, double-buffered   /
         -> CloseUpdateWindow with what became of each engine (manager commits and resumes)

Invariants: tensors must not change until `publish` returned; one engine's failure never stops
the others; the window is closed on every path on which this process lives (the manager's own
deadline covers the rest); the segment is unlinked on every path, and one whose sender was
killed is removed when the next publisher starts.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import pickle
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import aiohttp

from proto import rollout_pb2 as pb
from weightsync import _core
from weightsync.config import WeightSyncConfig
from weightsync.descriptor import TENSOR_NAME, Descriptor
from weightsync.errors import PeerLostError, PublishError
from weightsync.plan import Plan, TensorSpec, make_plan
from weightsync.transports import SEGMENT_PREFIX, Sender, open_sender, pieces_of

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

LOADER = "weightsync.sglang_loader.load"


def sweep_segments() -> int:
    """Removes the shared memory of senders that were killed; returns how many segments."""
    return int(_core.sweep(SEGMENT_PREFIX))


class WindowClient(Protocol):
    """The two calls of rollout.client.RolloutClient that a publication needs."""

    async def open_update_window(
        self, request: pb.OpenUpdateWindowRequest
    ) -> pb.OpenUpdateWindowReply:
        """Pauses the engines and names them."""

    async def close_update_window(
        self, request: pb.CloseUpdateWindowRequest
    ) -> pb.CloseUpdateWindowReply:
        """Commits or puts back each engine."""


@dataclass(frozen=True, slots=True)
class EngineResult:
    """What became of one engine."""

    engine: str
    complete: bool
    touched: bool
    error: str
    duration_s: float


@dataclass(frozen=True, slots=True)
class PublishResult:
    """One publication."""

    weight_version: int
    num_bytes: int
    duration_s: float
    """From opening the window to its close."""
    engines: tuple[str, ...]
    """Those that serve the new version."""
    per_engine: Mapping[str, EngineResult]
    paused_s: float
    """The manager's figure: first pause to last continue."""


class WeightPublisher:
    """Sends weights to the engines that the manager names."""

    def __init__(self, config: WeightSyncConfig, rollout_client: WindowClient) -> None:
        """Removes the segments of publishers that were killed."""
        self._config = config
        self._client = rollout_client
        if num_removed := sweep_segments():
            logger.info("removed %d segments whose sender was killed", num_removed)

    async def publish(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], weight_version: int
    ) -> PublishResult:
        """Publishes CPU tensors by Hugging Face name.

        Raises ValueError for tensors that cannot be planned, PublishError when no engine took
        them, and what the rollout client raises when the window cannot be opened or closed.
        """
        started_s = time.monotonic()
        tensors = {name: tensor.detach().contiguous() for name, tensor in named_tensors}
        plan = make_plan(
            [
                TensorSpec(name, tuple(t.shape), str(t.dtype).removeprefix("torch."))
                for name, t in tensors.items()
            ],
            self._config.bucket_bytes,
        )
        opened = await self._client.open_update_window(
            pb.OpenUpdateWindowRequest(
                weight_version=weight_version,
                plan_digest=plan.digest,
                num_tensors=len(plan.tensors),
                total_bytes=plan.total_bytes,
            )
        )
        targets = list(opened.targets)
        results = [
            EngineResult(t.engine, False, False, "the sender failed before it began", 0.0)
            for t in targets
        ]
        try:
            await self._send(
                plan, list(tensors.values()), targets, opened.epoch, weight_version, results
            )
        finally:
            closed = await self._client.close_update_window(
                _close_request(opened.epoch, weight_version, results)
            )
        serving = tuple(closed.engines_serving)
        if not serving:
            raise PublishError(
                f"weight_version {weight_version} (window {opened.epoch}) reached no engine: "
                + "; ".join(f"{r.engine}: {r.error or 'failed to commit'}" for r in results)
            )
        return PublishResult(
            weight_version=weight_version,
            num_bytes=plan.total_bytes,
            duration_s=time.monotonic() - started_s,
            engines=serving,
            per_engine={result.engine: result for result in results},
            paused_s=closed.paused.ToTimedelta().total_seconds(),
        )

    async def _send(
        self,
        plan: Plan,
        tensors: Sequence[torch.Tensor],
        targets: Sequence[pb.UpdateTarget],
        epoch: int,
        weight_version: int,
        results: list[EngineResult],
    ) -> None:
        """Sends to all targets at once; `results` says of each how far it came, on every path."""
        sender, endpoint = open_sender(self._config, plan, epoch, len(targets))
        descriptors = [
            Descriptor(
                epoch=epoch,
                weight_version=weight_version,
                endpoint=endpoint,
                receiver=index,
                plan=plan.to_json(),
                plan_digest=plan.digest,
                # Longer than the sender may wait for another engine that is late.
                bucket_timeout_s=self._config.attach_timeout_s + 2 * self._config.bucket_timeout_s,
            )
            for index in range(len(targets))
        ]
        started_s = time.monotonic()
        errors: dict[int, str] = {}
        session = aiohttp.ClientSession()
        calls = [
            asyncio.create_task(self._call(session, sender, target.url, descriptor, errors))
            for target, descriptor in zip(targets, descriptors, strict=True)
        ]
        try:
            await asyncio.to_thread(self._pack, sender, plan, tensors)
            # An engine whose loader is through answers at once.
            await asyncio.wait(calls, timeout=self._config.attach_timeout_s)
        except PeerLostError as error:  # every receiver is out; each one's reason is in the ring
            logger.warning("window %d: %s", epoch, error)
        finally:
            sender.abort()
            for call in calls:
                call.cancel()
            duration_s = time.monotonic() - started_s
            results[:] = [
                _result(sender, target.engine, index, calls[index].done(), errors, duration_s)
                for index, target in enumerate(targets)
            ]
            sender.close()
            await asyncio.gather(*calls, return_exceptions=True)
            await session.close()

    def _pack(self, sender: Sender, plan: Plan, tensors: Sequence[torch.Tensor]) -> None:
        """Sends every bucket, then waits for the receivers' word. Runs in a thread."""
        for index in range(len(plan.buckets)):
            # The first wait also covers the engine's way to its loader.
            extra_s = self._config.attach_timeout_s if index < self._config.num_buffers + 1 else 0
            sender.send(
                pieces_of(plan, tensors, index),
                plan.label(index),
                self._config.bucket_timeout_s + extra_s,
            )
        sender.finish(self._config.verify_timeout_s + self._config.attach_timeout_s)

    async def _call(
        self,
        session: aiohttp.ClientSession,
        sender: Sender,
        engine_url: str,
        descriptor: Descriptor,
        errors: dict[int, str],
    ) -> None:
        """Starts an engine's loader and waits for it; leaves the engine out when that fails."""
        url = engine_url + "/update_weights_from_tensor"
        body = {
            "load_format": LOADER,
            "serialized_named_tensors": [_serialize(descriptor)],
            "flush_cache": False,
        }
        # The ring's own deadlines end the transfer, and with it this call.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._config.attach_timeout_s)
        error = ""
        try:
            async with session.post(url, json=body, timeout=timeout) as response:
                text = await response.text()
            if response.status != 200:
                error = f"{url}: got status {response.status}, wanted 200: {text[:300]}"
            elif sender.state(descriptor.receiver) == _core.ReceiverState.ABSENT:
                error = f"{url}: the loader could not read its orders; see the engine's log"
        except (aiohttp.ClientError, OSError) as failure:
            error = f"{url}: {type(failure).__name__}: {failure}"
        if error:
            errors[descriptor.receiver] = error
            sender.drop(descriptor.receiver, error)


def _result(
    sender: Sender,
    engine: str,
    index: int,
    has_answered: bool,
    errors: Mapping[int, str],
    duration_s: float,
) -> EngineResult:
    """Call after Abort, so that `touched` is final."""
    state = sender.state(index)
    error = errors.get(index, "")
    if not error and state != _core.ReceiverState.VERIFIED:
        error = sender.error(index) or f"its receiver was still {state.name} at the end"
    if not error and not has_answered:
        error = "its loader finished, but the engine did not answer"
    return EngineResult(engine, not error, sender.was_touched(index), error, duration_s)


def _serialize(descriptor: Descriptor) -> str:
    """As SGLang's server wants it: base64 of a pickled list of named tensors."""
    named = [(TENSOR_NAME, _PickledBytes(descriptor.encode()))]
    return base64.b64encode(pickle.dumps(named)).decode()


class _PickledBytes:
    """Bytes that unpickle as a uint8 tensor, by a constructor on SGLang's allow-list.

    A tensor's own reduction is not used: megatron-core, where it is imported, replaces it by a
    function of its own, which the engine refuses to load.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __reduce__(self) -> tuple[Any, ...]:
        import torch

        return torch.ByteTensor, (list(self._data),)


def _close_request(
    epoch: int, weight_version: int, results: Iterable[EngineResult]
) -> pb.CloseUpdateWindowRequest:
    request = pb.CloseUpdateWindowRequest(epoch=epoch, weight_version=weight_version)
    for result in results:
        row = request.results.add(
            engine=result.engine,
            complete=result.complete,
            touched=result.touched,
            error=result.error,
        )
        row.duration.FromNanoseconds(int(result.duration_s * 1e9))
    return request
