"""What carries an update's buckets: one interface for both ends, whichever transport is set.

Purpose: publisher and loader know senders, receivers and endpoints, not what they are made of.
Owner: WeightPublisher opens a sender; each engine's loader opens a receiver with the endpoint that
it was sent. Invariant: an endpoint is plain JSON and holds all that a receiver needs to connect.

    shm   the receivers read one ring of buckets in the sender's host's shared memory
    tcp   buckets are passed on from receiver to receiver; the sender sends each fan_out times
"""

from __future__ import annotations

import array
import os
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from weightsync import _core
from weightsync.errors import PlanMismatchError
from weightsync.plan import SUM_BYTES

if TYPE_CHECKING:
    import torch

    from weightsync.config import WeightSyncConfig
    from weightsync.plan import Plan

SEGMENT_PREFIX = "swe_rl_ws_"

Endpoint = dict[str, Any]
"""How to reach a sender: its `transport` and what that needs."""


class Sender(Protocol):
    """Sends buckets to a fixed number of receivers; core/shm_ring.h has the rules."""

    def send(
        self, pieces: _core.Buffer, label: str, timeout_s: float, owner: object = None
    ) -> None:
        """Sends the next bucket; leaves out receivers that are late.

        `shm` has packed it when this returns. `tcp` reads the pieces where they lie: they must not
        change until num_buffers more were sent, or `finish` or `close` returned, and `owner`, which
        keeps them alive, is held until then.
        """

    def finish(self, timeout_s: float) -> None:
        """Waits for each receiver's word."""

    def drop(self, receiver: int, reason: str) -> None:
        """Leaves a receiver out."""

    def abort(self) -> None:
        """Tells receivers to give up and ends waits."""

    def close(self) -> None:
        """Aborts, and frees everything."""

    def state(self, receiver: int) -> _core.ReceiverState:
        """How far a receiver is."""

    def error(self, receiver: int) -> str:
        """Why it failed; empty: it did not."""

    def digest(self, receiver: int) -> int:
        """What it gave to `verified`."""

    def was_touched(self, receiver: int) -> bool:
        """Whether it may have read a bucket; final after `abort`."""


class Receiver(Protocol):
    """Takes buckets in order."""

    def next(self, label: str, timeout_s: float) -> memoryview:
        """The next bucket in place; valid until `release`."""

    def release(self) -> None:
        """Gives it back."""

    def verified(self, digest: int = 0) -> None:
        """Tells the sender that all is complete, and a 64-bit sum of what it holds."""

    def fail(self, reason: str) -> None:
        """Tells the sender why not."""


def open_sender(
    config: WeightSyncConfig, plan: Plan, epoch: int, num_receivers: int
) -> tuple[Sender, Endpoint]:
    """A sender for one update, and what its receivers need.

    Raises PeerLostError when shared memory or the address is not to be had.
    """
    num_buffers = min(config.num_buffers, len(plan.buckets))
    if config.transport == "tcp":
        token = secrets.token_hex(16)
        sender = _core.TcpSender(
            host=config.tcp.host,
            token=token,
            epoch=epoch,
            num_receivers=num_receivers,
            fan_out=config.tcp.fan_out,
            num_buffers=num_buffers,
            buffer_bytes=plan.largest_size(config.verify_engine),
            with_checksums=config.checksums,
            stall_timeout_s=config.tcp.stall_timeout_s,
            with_local_sockets=config.tcp.local_sockets,
        )
        return sender, {
            "transport": "tcp",
            "host": config.tcp.host,
            "port": sender.port,
            "token": token,
        }
    ring = _core.RingSender(
        name=f"{SEGMENT_PREFIX}{os.getpid()}_{epoch}_{secrets.token_hex(4)}",
        epoch=epoch,
        num_receivers=num_receivers,
        num_buffers=num_buffers,
        buffer_bytes=plan.largest_size(config.verify_engine),
        with_checksums=config.checksums,
    )
    return ring, {"transport": "shm", "segment": ring.name}


def open_receiver(endpoint: Endpoint, epoch: int, index: int, timeout_s: float) -> Receiver:
    """Connects receiver `index` to the sender of `endpoint`.

    Raises PeerLostError when the sender is gone, EpochFencedError when it is of another epoch,
    TransferTimeoutError, and PlanMismatchError for an endpoint of another version.
    """
    transport = endpoint.get("transport")
    try:
        if transport == "shm":
            return _core.RingReceiver(name=endpoint["segment"], epoch=epoch, index=index)
        if transport == "tcp":
            return _core.TcpReceiver(
                host=endpoint["host"],
                port=endpoint["port"],
                token=endpoint["token"],
                epoch=epoch,
                index=index,
                timeout_s=timeout_s,
            )
    except KeyError as error:
        raise PlanMismatchError(f"an endpoint of {transport} lacks {error}") from error
    raise PlanMismatchError(
        f"transport {transport!r} is unknown here: trainer and engine run different versions"
    )


def send_bucket(
    sender: Sender,
    plan: Plan,
    tensors: Sequence[torch.Tensor],
    index: int,
    timeout_s: float,
    sums: array.array[int] | None = None,
) -> None:
    """Sends bucket `index` of all `tensors`; see Sender.send for how long they must not change.

    `sums`: the XXH64 of each of its tensors, uint64, to be sent behind them.
    """
    send_own(sender, plan, _own(plan, tensors, index), index, timeout_s, sums)


def send_own(
    sender: Sender,
    plan: Plan,
    own: Sequence[torch.Tensor],
    index: int,
    timeout_s: float,
    sums: array.array[int] | None = None,
) -> None:
    """As send_bucket, of the bucket's `own` tensors."""
    pieces = _pieces(plan, own, index)
    if sums is not None:
        address, count = sums.buffer_info()
        pieces.extend((address, count * sums.itemsize, plan.sums_offset(index)))
    sender.send(pieces, plan.label(index), timeout_s, (own, sums))


def take_bucket(
    receiver: Receiver, plan: Plan, tensors: Sequence[torch.Tensor], index: int, timeout_s: float
) -> None:
    """Receives bucket `index` into its part of `tensors`: contiguous, on the CPU, as planned.

    Raises PlanMismatchError when the bucket has another size than planned.
    """
    data = receiver.next(plan.label(index), timeout_s)
    _check_size(plan, index, data)
    _core.unpack(data, pieces_of(plan, tensors, index))
    receiver.release()


def pieces_of(plan: Plan, tensors: Sequence[torch.Tensor], index: int) -> array.array[int]:
    """Flat (address, bytes, offset) triples of the tensors of a bucket, as the core takes them."""
    return _pieces(plan, _own(plan, tensors, index), index)


def _pieces(plan: Plan, own: Sequence[torch.Tensor], index: int) -> array.array[int]:
    pieces = array.array("Q", bytes(24 * len(own)))
    pieces[0::3] = array.array("Q", [tensor.data_ptr() for tensor in own])
    pieces[1::3] = array.array("Q", [tensor.nbytes for tensor in own])
    pieces[2::3] = array.array("Q", plan.buckets[index].offsets)
    return pieces


def sums_of(plan: Plan, index: int, data: memoryview) -> list[int]:
    """The XXH64 of each tensor of bucket `index`, as its sender found them."""
    count = len(plan.buckets[index].offsets) * SUM_BYTES
    return data[-count:].cast("Q").tolist()


def tensors_of(
    plan: Plan, index: int, data: memoryview, with_sums: bool = False
) -> list[tuple[str, torch.Tensor]]:
    """Names and tensors of bucket `index`, which read `data` in place: valid until its release.

    Raises PlanMismatchError when the bucket has another size than planned.
    """
    import torch

    bucket = plan.buckets[index]
    _check_size(plan, index, data, with_sums)
    specs = plan.tensors[bucket.first : bucket.first + len(bucket.offsets)]
    return [
        (
            spec.name,
            torch.frombuffer(
                data,
                dtype=getattr(torch, spec.dtype),
                count=spec.num_elements,
                offset=offset,
            ).view(spec.shape),
        )
        for spec, offset in zip(specs, bucket.offsets, strict=True)
    ]


def _own(plan: Plan, tensors: Sequence[torch.Tensor], index: int) -> Sequence[torch.Tensor]:
    bucket = plan.buckets[index]
    return tensors[bucket.first : bucket.first + len(bucket.offsets)]


def _check_size(plan: Plan, index: int, data: memoryview, with_sums: bool = False) -> None:
    wanted = plan.bucket_size(index, with_sums)
    if len(data) != wanted:
        raise PlanMismatchError(
            f"bucket {index} ({plan.label(index)}) has {len(data)} bytes, wanted {wanted}"
        )
