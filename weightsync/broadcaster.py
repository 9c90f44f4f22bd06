"""Tensors from rank 0 to every other rank, over any transport: the package for jobs of one's own.

    store = torch.distributed.TCPStore("trainer", 29500, world, is_master=rank == 0)
    broadcaster = Broadcaster(rank, world, "tcp", store)
    broadcaster.plan(names, shapes, dtypes)       # each rank; raises where ranks differ
    result = broadcaster.broadcast(tensors, 7)    # rank 0's tensors, into the others' tensors
    broadcaster.close()

The store carries what must be known before: digests of plans, and how to reach the sender. The
trainer's publications to SGLang take `publisher.py` instead, whose windows the manager owns.

Owner: one thread a rank; ranks call the same methods in the same order. Every wait has a deadline.
What went wrong is an error that names the rank, and the bucket where there is one; after it the
tensors of a receiving rank are neither old nor new, and a broadcast of another version to all makes
them whole again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Literal, get_args

from weightsync import _core
from weightsync.config import TcpConfig, WeightSyncConfig
from weightsync.errors import (
    EpochFencedError,
    PeerLostError,
    PlanMismatchError,
    PublishError,
    TransferTimeoutError,
)
from weightsync.plan import Plan, TensorSpec, make_plan
from weightsync.transports import (
    Receiver,
    Sender,
    open_receiver,
    open_sender,
    pieces_of,
    send_bucket,
    take_bucket,
)

if TYPE_CHECKING:
    import torch
    import torch.distributed

Transport = Literal["shm", "tcp", "rccl"]

_SHAPES = "names, shapes, dtypes or their order"


@dataclass(frozen=True, slots=True)
class BucketTimes:
    """One bucket at this rank; seconds since the broadcast began."""

    num_bytes: int
    begun_s: float
    """Packing, or waiting for it, began."""
    done_s: float
    """Sent, or copied into the tensors."""


@dataclass(frozen=True, slots=True)
class BroadcastResult:
    """One broadcast at this rank."""

    version: int
    num_bytes: int
    duration_s: float
    buckets: tuple[BucketTimes, ...]


class Broadcaster:
    """One rank of a group whose rank 0 sends."""

    def __init__(
        self,
        rank: int,
        world: int,
        transport: Transport,
        store: torch.distributed.Store,
        *,
        bucket_bytes: int = 64 * 2**20,
        num_buffers: int = 2,
        checksums: bool = True,
        timeout_s: float = 60.0,
        tcp: TcpConfig | None = None,
        device: int = 0,
        rccl_library: str = "",
        rccl_runtime: str = "",
    ) -> None:
        """Nothing is sent yet.

        Args:
          store: reached by every rank; its keys below `weightsync/` are this group's.
          bucket_bytes: most of one bucket; at least the largest tensor.
          num_buffers: buckets under way at once.
          checksums: sum every bucket on both sides; with rccl that costs a copy to the host.
          timeout_s: for each wait: a rank to come, a buffer to be freed, a bucket to arrive.
          tcp: settings of `tcp`.
          device: of `rccl`, this rank's.
          rccl_library, rccl_runtime: paths; empty: librccl with HIP, else libnccl with CUDA.

        Raises ValueError for an unknown transport, a rank outside the world, or a world of one,
        unless it is rccl's.
        """
        if transport not in get_args(Transport):
            raise ValueError(
                f"transport is {transport!r}, wanted one of {', '.join(get_args(Transport))}"
            )
        if not 0 <= rank < world or (world < 2 and transport != "rccl"):
            raise ValueError(f"rank {rank} of {world}: want a rank below a world of 2 or more")
        self._rank, self._world, self._transport = rank, world, transport
        self._store, self._timeout_s = store, timeout_s
        self._config = WeightSyncConfig(
            transport="tcp" if transport == "tcp" else "shm",
            bucket_bytes=bucket_bytes,
            num_buffers=num_buffers,
            checksums=checksums,
            tcp=tcp or TcpConfig(),
        )
        self._device = device
        self._rccl = (rccl_library, rccl_runtime)
        self._group: _core.RcclGroup | None = None
        self._plan: Plan | None = None
        self._num_plans = 0
        self._num_broadcasts = 0

    def plan(
        self, names: Sequence[str], shapes: Sequence[Sequence[int]], dtypes: Sequence[str]
    ) -> Plan:
        """Agrees with every other rank on what a broadcast carries.

        Args: dtypes are torch's names without the prefix, such as bfloat16.

        Raises:
          ValueError: tensors that cannot be planned.
          PlanMismatchError: another rank has another plan; it names the ranks.
          TransferTimeoutError: a rank did not come.
        """
        plan = make_plan(
            [TensorSpec(n, tuple(s), d) for n, s, d in zip(names, shapes, dtypes, strict=True)],
            self._config.bucket_bytes,
        )
        self._num_plans += 1
        key = f"weightsync/plan/{self._num_plans}"
        mine = f"{plan.digest}/{plan.bucket_bytes}"
        self._store.set(f"{key}/{self._rank}", mine)
        others = [
            rank
            for rank in range(self._world)
            if rank != self._rank and self._get(f"{key}/{rank}", f"the plan of rank {rank}") != mine
        ]
        if others:
            raise PlanMismatchError(
                f"rank {self._rank}: the plan differs from that of rank "
                f"{', '.join(map(str, others))} in {_SHAPES}, or in bucket_bytes"
            )
        if self._transport == "rccl":
            self._join(plan)
        self._plan = plan
        return plan

    def broadcast(self, tensors: Sequence[torch.Tensor], version: int) -> BroadcastResult:
        """Sends rank 0's tensors into the others'; returns when this rank has done its part.

        Args: tensors in the plan's order, contiguous, on the CPU or, for rccl, on this rank's
          device, where what wrote them has been synchronised. version is compared on every rank.

        Raises:
          ValueError: no plan, or tensors that are not the plan's.
          EpochFencedError: rank 0 sends another version than this rank expects.
          PublishError: at rank 0: a rank did not take everything; it names each with its reason.
          WeightSyncError: at another rank: what stopped it.
        """
        # Before anything can fail here, so that ranks stay in step whatever happens at one of them.
        self._num_broadcasts += 1
        plan = self._check(tensors)
        started_s = time.monotonic()
        if self._transport == "rccl":
            buckets = self._broadcast_rccl(plan, tensors, version)
        elif self._rank == 0:
            buckets = self._send(plan, tensors, version, started_s)
        else:
            buckets = self._receive(plan, tensors, version, started_s)
        return BroadcastResult(version, plan.total_bytes, time.monotonic() - started_s, buckets)

    def close(self) -> None:
        """Leaves the group."""
        self._group = None

    def _check(self, tensors: Sequence[torch.Tensor]) -> Plan:
        import torch

        plan = self._plan
        if plan is None:
            raise ValueError("broadcast without a plan: call plan() on every rank first")
        if len(tensors) != len(plan.tensors):
            raise ValueError(f"got {len(tensors)} tensors, the plan has {len(plan.tensors)}")
        dtypes = {name: getattr(torch, name) for name in {spec.dtype for spec in plan.tensors}}
        wants_cpu = self._transport != "rccl"
        # Thousands of tensors: nothing is built for one that is right.
        for tensor, spec in zip(tensors, plan.tensors, strict=True):
            if tensor.shape != spec.shape or tensor.dtype is not dtypes[spec.dtype]:
                dtype = str(tensor.dtype).removeprefix("torch.")
                raise ValueError(
                    f"tensor {spec.name} is {dtype}{tuple(tensor.shape)}, planned as "
                    f"{spec.dtype}{spec.shape}"
                )
            if not tensor.is_contiguous():
                raise ValueError(f"tensor {spec.name} is not contiguous")
            if wants_cpu and not tensor.is_cpu:
                raise ValueError(f"tensor {spec.name} is on {tensor.device}: {self._transport} "
                                 "carries CPU tensors")  # fmt: skip
        return plan

    def _send(
        self, plan: Plan, tensors: Sequence[torch.Tensor], version: int, started_s: float
    ) -> tuple[BucketTimes, ...]:
        sender, endpoint = open_sender(self._config, plan, self._num_broadcasts, self._world - 1)
        times = []
        try:
            order = {"version": version, "endpoint": endpoint}
            self._store.set(f"weightsync/broadcast/{self._num_broadcasts}", json.dumps(order))
            for index, bucket in enumerate(plan.buckets):
                begun_s = time.monotonic() - started_s
                send_bucket(sender, plan, tensors, index, self._timeout_s)
                times.append(BucketTimes(bucket.num_bytes, begun_s, time.monotonic() - started_s))
            sender.finish(self._timeout_s)
        except PeerLostError:
            # No rank is left; each one's reason is with the sender.
            if not _failed(sender, self._world):
                raise
        finally:
            failed = _failed(sender, self._world)
            sender.close()
        if failed:
            raise PublishError(
                f"version {version} did not reach every rank: "
                + "; ".join(f"rank {rank}: {reason}" for rank, reason in failed.items())
            )
        return tuple(times)

    def _receive(
        self, plan: Plan, tensors: Sequence[torch.Tensor], version: int, started_s: float
    ) -> tuple[BucketTimes, ...]:
        number = self._num_broadcasts
        order = json.loads(self._get(f"weightsync/broadcast/{number}", f"broadcast {number}"))
        receiver = open_receiver(order["endpoint"], number, self._rank - 1, self._timeout_s)
        try:
            if order["version"] != version:
                raise EpochFencedError(
                    f"rank {self._rank}: rank 0 sends version {order['version']}, wanted {version}"
                )
            times = self._take(plan, tensors, receiver, started_s)
        except Exception as error:
            receiver.fail(f"{type(error).__name__}: {error}")
            raise
        receiver.verified()
        return times

    def _take(
        self,
        plan: Plan,
        tensors: Sequence[torch.Tensor],
        receiver: Receiver,
        started_s: float,
    ) -> tuple[BucketTimes, ...]:
        times = []
        for index, bucket in enumerate(plan.buckets):
            begun_s = time.monotonic() - started_s
            take_bucket(receiver, plan, tensors, index, self._timeout_s)
            times.append(BucketTimes(bucket.num_bytes, begun_s, time.monotonic() - started_s))
        return tuple(times)

    def _join(self, plan: Plan) -> None:
        """Makes the RCCL group once, and lets it compare the plan too."""
        if self._group is None:
            library, runtime = self._rccl
            api = _core.RcclApi(library=library, runtime=runtime)
            if self._rank == 0:
                self._store.set("weightsync/rccl", api.unique_id().hex())
            unique_id = bytes.fromhex(self._get("weightsync/rccl", "rank 0's id"))
            self._group = _core.RcclGroup(
                api,
                unique_id=unique_id,
                rank=self._rank,
                world=self._world,
                device=self._device,
                bucket_bytes=self._config.bucket_bytes,
                num_buffers=self._config.num_buffers,
                with_checksums=self._config.checksums,
                timeout_s=self._timeout_s,
            )
        self._group.agree(bytes.fromhex(plan.digest), self._timeout_s)

    def _broadcast_rccl(
        self, plan: Plan, tensors: Sequence[torch.Tensor], version: int
    ) -> tuple[BucketTimes, ...]:
        assert self._group is not None
        buckets = [
            (pieces_of(plan, tensors, index), bucket.num_bytes, plan.label(index))
            for index, bucket in enumerate(plan.buckets)
        ]
        times = self._group.broadcast(buckets, version, self._timeout_s)
        return tuple(BucketTimes(*row) for row in times)

    def _get(self, key: str, what: str) -> str:
        """The value that another rank sets."""
        try:
            self._store.wait([key], timedelta(seconds=self._timeout_s))
            return bytes(self._store.get(key)).decode()
        except RuntimeError as error:  # torch's DistStoreError and its time-outs
            raise TransferTimeoutError(
                f"rank {self._rank}: {what} did not come within {self._timeout_s} s: {error}"
            ) from error


def _failed(sender: Sender, world: int) -> dict[int, str]:
    """Rank -> reason, of those that did not take everything."""
    errors = {rank: sender.error(rank - 1) for rank in range(1, world)}
    return {rank: error for rank, error in errors.items() if error}
