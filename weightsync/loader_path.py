"""Updates through our own loader inside the engines, over the transports `shm` and `tcp`.

Each engine's loader is started by one SGLang call that carries a Descriptor, and takes the buckets
from the sender by itself. Flow:

    call each engine's loader, which connects to the sender             \\  at once
    pack bucket by bucket, double-buffered, and wait for each one's word /

Owner: WeightPublisher. Invariants: those of update_path.py; the sender's segment or socket is gone on
every path, and the segment of a sender that was killed goes when the next publisher starts.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import pickle
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import aiohttp

from weightsync import _core
from weightsync.config import WeightSyncConfig
from weightsync.descriptor import TENSOR_NAME, Descriptor
from weightsync.errors import PeerLostError
from weightsync.plan import Plan
from weightsync.transports import SEGMENT_PREFIX, Sender, open_sender, send_bucket
from weightsync.update_path import EngineResult, Target, Update

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

LOADER = "weightsync.sglang_loader.load"


def sweep_segments() -> int:
    """Removes the shared memory of senders that were killed; returns how many segments."""
    return int(_core.sweep(SEGMENT_PREFIX))


class LoaderPath:
    """Sends through weightsync.sglang_loader."""

    def __init__(self, config: WeightSyncConfig) -> None:
        """Nothing is opened yet."""
        self._config = config

    async def prepare(self, update: Update) -> None:
        """Nothing."""

    async def finish(self) -> None:
        """Nothing: `send` leaves nothing behind."""

    async def close(self) -> None:
        """Nothing."""

    async def send(
        self,
        update: Update,
        targets: Sequence[Target],
        epoch: int,
        results: list[EngineResult],
    ) -> None:
        """Sends to all targets at once; see UpdatePath."""
        plan = update.plan
        sender, endpoint = open_sender(self._config, plan, epoch, len(targets))
        descriptors = [
            Descriptor(
                epoch=epoch,
                weight_version=update.weight_version,
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
            await asyncio.to_thread(self._pack, sender, plan, update.tensors)
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
            timeout_s = self._config.bucket_timeout_s + extra_s
            send_bucket(sender, plan, tensors, index, timeout_s)
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
