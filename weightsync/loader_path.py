"""Updates through our own loader inside the engines, over the transports `shm` and `tcp`.

Each engine's loaders, one a tensor-parallel rank, are started by one SGLang call that carries a
Descriptor for each, and take the buckets from the sender by themselves. Flow:

    call each engine's loader, which connects to the sender             \\  at once
    pack bucket by bucket, double-buffered, and wait for each one's word /

Owner: WeightPublisher. Invariants: those of update_path.py; the sender's segment or socket is gone on
every path, and the segment of a sender that was killed goes when the next publisher starts.
"""

from __future__ import annotations

import array
import asyncio
import base64
import itertools
import logging
import pickle
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import aiohttp

from weightsync import _core
from weightsync.config import WeightSyncConfig
from weightsync.descriptor import TENSOR_NAME, Descriptor, pack_plan
from weightsync.errors import PeerLostError
from weightsync.transports import SEGMENT_PREFIX, Sender, open_sender, send_own
from weightsync.update_path import EngineResult, Target, Update
from weightsync.weight_digest import WeightDigest, tensor_checksum

if TYPE_CHECKING:
    import torch

    from weightsync.plan import Plan

logger = logging.getLogger(__name__)

_ABSENT = _core.ReceiverState.ABSENT


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
        ranks = _ranks(targets)
        num_receivers = sum(len(own) for own in ranks)
        sender, endpoint = open_sender(self._config, plan, epoch, num_receivers)
        # Until more is known: an engine that is not known to be untouched is not.
        results[:] = [
            EngineResult(target.engine, False, True, "what became of it is not known", 0.0)
            for target in targets
        ]
        packed_plan = pack_plan(plan)  # once: engines are paused, and it may have 20,000 tensors
        descriptors = [
            Descriptor(
                epoch=epoch,
                weight_version=update.weight_version,
                endpoint=endpoint,
                receiver=index,
                plan=packed_plan,
                plan_digest=plan.digest,
                # Longer than the sender may wait for another engine that is late.
                bucket_timeout_s=self._config.attach_timeout_s + 2 * self._config.bucket_timeout_s,
                verify_engine=self._config.verify_engine,
            )
            for index in range(num_receivers)
        ]
        started_s = time.monotonic()
        errors: dict[str, str] = {}
        digest: int | None = None
        session = aiohttp.ClientSession()
        calls = [
            asyncio.create_task(
                self._call(session, sender, target, descriptors[own.start : own.stop], errors)
            )
            for target, own in zip(targets, ranks, strict=True)
        ]
        try:
            digest = await asyncio.to_thread(self._pack, sender, update)
            # An engine whose loaders are through answers at once.
            await asyncio.wait(calls, timeout=self._config.attach_timeout_s)
        except PeerLostError as error:  # every receiver is out; each one's reason is in the ring
            logger.warning("window %d: %s", epoch, error)
        finally:
            sender.abort()
            for call in calls:
                call.cancel()
            duration_s = time.monotonic() - started_s
            results[:] = [
                _result(sender, target.engine, own, call.done(), errors, digest, duration_s)
                for target, own, call in zip(targets, ranks, calls, strict=True)
            ]
            sender.close()
            await asyncio.gather(*calls, return_exceptions=True)
            await session.close()
        if digest is not None:
            logger.info("window %d: sent %d bytes of digest %016x", epoch, plan.total_bytes, digest)

    def _pack(self, sender: Sender, update: Update) -> int:
        """Sends every bucket, then waits for the receivers' word; returns the digest of what was
        sent, 0 if engines are not verified. Runs in a thread.
        """
        digest = WeightDigest()
        plan = update.plan
        for index in range(len(plan.buckets)):
            own = update.source.bucket(index)
            sums = self._sums(plan, own, index, digest) if self._config.verify_engine else None
            # The first wait also covers the engine's way to its loader.
            extra_s = self._config.attach_timeout_s if index < self._config.num_buffers + 1 else 0
            timeout_s = self._config.bucket_timeout_s + extra_s
            send_own(sender, plan, own, index, timeout_s, sums)
        sender.finish(self._config.verify_timeout_s + self._config.attach_timeout_s)
        return digest.value

    @staticmethod
    def _sums(
        plan: Plan, own: Sequence[torch.Tensor], index: int, digest: WeightDigest
    ) -> array.array[int]:
        """The sum of each tensor of a bucket, made before packing; also added to `digest`."""
        first = plan.buckets[index].first
        sums = array.array("Q")
        for place, tensor in enumerate(own):
            sums.append(tensor_checksum(tensor))
            digest.add(plan.tensors[first + place].name, sums[-1])
        return sums

    async def _call(
        self,
        session: aiohttp.ClientSession,
        sender: Sender,
        target: Target,
        descriptors: Sequence[Descriptor],
        errors: dict[str, str],
    ) -> None:
        """Starts an engine's loaders and waits for them; leaves the engine out when that fails."""
        url = target.url + "/update_weights_from_tensor"
        body = {
            "load_format": self._config.loader,
            "serialized_named_tensors": [_serialize(descriptor) for descriptor in descriptors],
            "flush_cache": False,
        }
        # The ring's own deadlines end the transfer, and with it this call.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._config.attach_timeout_s)
        error = ""
        try:
            async with session.post(url, json=body, timeout=timeout) as response:
                text = await response.text()
            absent = [d for d in descriptors if sender.state(d.receiver) == _ABSENT]
            if response.status != 200:
                error = f"{url}: got status {response.status}, wanted 200: {text[:300]}"
            elif absent:
                error = f"{url}: a loader could not read its orders; see the engine's log"
        except (aiohttp.ClientError, OSError) as failure:
            error = f"{url}: {type(failure).__name__}: {failure}"
        if error:
            errors[target.engine] = error
            for descriptor in descriptors:
                sender.drop(descriptor.receiver, error)


def _ranks(targets: Sequence[Target]) -> list[range]:
    """The receivers of each engine: one a tensor-parallel rank, in order."""
    ends = list(itertools.accumulate(target.tensor_parallel for target in targets))
    return [
        range(end - target.tensor_parallel, end) for target, end in zip(targets, ends, strict=True)
    ]


def _result(
    sender: Sender,
    engine: str,
    ranks: range,
    has_answered: bool,
    errors: Mapping[str, str],
    digest: int | None,
    duration_s: float,
) -> EngineResult:
    """Call after Abort, so that `touched` is final. `digest`: what a complete engine must hold;
    None: the sender was stopped before it knew.
    """
    error = errors.get(engine, "")
    if not error:
        found = [(rank, _rank_error(sender, index, digest)) for rank, index in enumerate(ranks)]
        wrong = [f"rank {rank}: {text}" if len(ranks) > 1 else text for rank, text in found if text]
        error = "; ".join(wrong)
    if not error and not has_answered:
        error = "its loader finished, but the engine did not answer"
    is_touched = any(sender.was_touched(index) for index in ranks)
    held = 0 if error else sender.digest(ranks.start)
    return EngineResult(engine, not error, is_touched, error, duration_s, held)


def _rank_error(sender: Sender, index: int, digest: int | None) -> str:
    """Why a receiver does not hold what was sent; empty: it does."""
    state = sender.state(index)
    if state != _core.ReceiverState.VERIFIED:
        return sender.error(index) or f"its receiver was still {state.name} at the end"
    held = sender.digest(index)
    if digest is not None and held != digest:
        return (
            f"it holds weights of digest {held:016x}, sent was {digest:016x}: its loader is of "
            "another version, or did not read its parameters back"
        )
    return ""


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
