"""Tensors from rank 0 to every other rank, over any transport: the package for jobs of one's own.

    store = torch.distributed.TCPStore("trainer", 29500, world, is_master=rank == 0)
    broadcaster = Broadcaster(rank, world, "tcp", store)
    broadcaster.plan(names, shapes, dtypes)       # each rank; raises where ranks differ
    result = broadcaster.broadcast(tensors, 7)    # rank 0's tensors, into the others' tensors
    broadcaster.close()

The store carries what must be known before (rank_store.py): plans, versions, and how to reach the
sender. The trainer's publications to SGLang take `publisher.py` instead, whose windows the manager
owns.

Owner: one thread a rank; ranks call the same methods in the same order. Every wait has a deadline.
What went wrong is an error that names the rank, and the bucket where there is one. A broadcast that a
rank cannot take part in is called off on every rank before a byte moves. One that fails later
leaves the tensors of a receiving rank neither old nor new; a broadcast of another version to all makes
them whole again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from pydantic import ValidationError

from weightsync import _core
from weightsync.config import TcpConfig, WeightSyncConfig
from weightsync.errors import EpochFencedError, PeerLostError, PublishError
from weightsync.plan import MAX_VERSION, Plan, TensorSpec, make_plan
from weightsync.rank_store import Order, RankStore, listed
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

        Raises ValueError for an unknown transport, a rank outside the world, a world of one
        unless it is rccl's, more ranks than shm and tcp serve (MAX_RECEIVERS + 1), and settings out
        of range.
        """
        if transport not in get_args(Transport):
            raise ValueError(
                f"transport is {transport!r}, wanted one of {', '.join(get_args(Transport))}"
            )
        if not 0 <= rank < world or (world < 2 and transport != "rccl"):
            raise ValueError(f"rank {rank} of {world}: want a rank below a world of 2 or more")
        if world - 1 > _core.MAX_RECEIVERS and transport != "rccl":
            raise ValueError(
                f"world is {world}: {transport} serves {_core.MAX_RECEIVERS} ranks beside rank 0"
            )
        if timeout_s <= 0:
            raise ValueError(f"timeout_s is {timeout_s}, wanted above 0")
        self._rank, self._world, self._transport = rank, world, transport
        self._timeout_s = timeout_s
        self._ranks = RankStore(store, rank, world, timeout_s)
        try:
            self._config = WeightSyncConfig(
                transport="tcp" if transport == "tcp" else "shm",
                bucket_bytes=bucket_bytes,
                num_buffers=num_buffers,
                checksums=checksums,
                tcp=tcp or TcpConfig(),
            )
        except ValidationError as error:
            raise ValueError(_explained(error)) from error
        self._device = device
        self._rccl = (rccl_library, rccl_runtime)
        self._group: _core.RcclGroup | None = None
        self._plan: Plan | None = None

    def plan(
        self, names: Sequence[str], shapes: Sequence[Sequence[int]], dtypes: Sequence[str]
    ) -> Plan:
        """Agrees with every other rank on what a broadcast carries.

        Args: dtypes are torch's names without the prefix, such as bfloat16.

        Raises:
          ValueError: tensors that cannot be planned; the others hear of it.
          PlanMismatchError: plans differ, or a rank has none; it says what differs at which rank.
          TransferTimeoutError: a rank did not come.
        """
        try:
            specs = [
                TensorSpec(n, tuple(s), d) for n, s, d in zip(names, shapes, dtypes, strict=True)
            ]
            plan = make_plan(specs, self._config.bucket_bytes)
        except (ValueError, TypeError) as error:
            self._ranks.refuse_plan(str(error))
            raise
        self._ranks.agree_on_plan(plan)
        if self._transport == "rccl":
            self._join(plan)
        self._plan = plan
        return plan

    def broadcast(self, tensors: Sequence[torch.Tensor], version: int) -> BroadcastResult:
        """Sends rank 0's tensors into the others'; returns when this rank has done its part.

        Args: tensors in the plan's order, contiguous, on the CPU or, for rccl, on this rank's
          device, where what wrote them has been synchronised. version is compared on every rank.

        Raises:
          ValueError, TypeError: no plan, not the plan's tensors, or a version out of range.
          EpochFencedError: rank 0 sends another version than this rank expects.
          PublishError: another rank could not take part, and nothing moved; or, at rank 0, a
            rank did not take everything. It names each with its reason.
          WeightSyncError: at another rank: what stopped it.
        """
        # Before anything can fail here, so that ranks stay in step whatever happens at one of them.
        number = self._ranks.begin()
        started_s = time.monotonic()
        try:
            plan = self._check(tensors, version)
        except (TypeError, ValueError) as error:
            self._call_off(version, f"{type(error).__name__}: {error}")
            raise
        if self._rank == 0:
            problems = self._ranks.gather_problems(version)
            if problems:
                self._ranks.give_order(Order(version, problems=problems))
                raise PublishError(f"version {version} was called off: {listed(problems)}")
            buckets = self._lead(plan, tensors, version, number, started_s)
        else:
            self._ranks.say_ready(version, "")
            order = self._ranks.take_order()
            if order.version != version:
                raise EpochFencedError(
                    f"rank {self._rank}: rank 0 sends version {order.version}, wanted {version}"
                )
            if order.problems:
                raise PublishError(
                    f"rank {self._rank}: version {version} was called off: "
                    + listed(order.problems)
                )
            buckets = self._follow(plan, tensors, order, number, started_s)
        return BroadcastResult(version, plan.total_bytes, time.monotonic() - started_s, buckets)

    def close(self) -> None:
        """Leaves the group."""
        self._group = None

    def _call_off(self, version: int, problem: str) -> None:
        """Tells the others that this rank cannot take part."""
        if self._rank == 0:
            self._ranks.give_order(Order(version, problems={0: problem}))
        else:
            self._ranks.say_ready(version, problem)

    def _check(self, tensors: Sequence[torch.Tensor], version: int) -> Plan:
        import torch

        plan = self._plan
        if plan is None:
            raise ValueError("broadcast without a plan: call plan() on every rank first")
        if isinstance(version, bool) or not isinstance(version, int):
            raise TypeError(f"version is {version!r}, wanted a whole number")
        if not 0 <= version <= MAX_VERSION:
            raise ValueError(f"version is {version}, wanted 0 to {MAX_VERSION}")
        if len(tensors) != len(plan.tensors):
            raise ValueError(f"got {len(tensors)} tensors, the plan has {len(plan.tensors)}")
        dtypes = {name: getattr(torch, name) for name in {spec.dtype for spec in plan.tensors}}
        wants_cpu = self._transport != "rccl"
        # Thousands of tensors: nothing is built for one that is right.
        for tensor, spec in zip(tensors, plan.tensors, strict=True):
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"tensor {spec.name} is a {type(tensor).__name__}")
            if tensor.shape != spec.shape or tensor.dtype is not dtypes[spec.dtype]:
                dtype = str(tensor.dtype).removeprefix("torch.")
                raise ValueError(
                    f"tensor {spec.name} is {dtype}{tuple(tensor.shape)}, planned as "
                    f"{spec.dtype}{spec.shape}"
                )
            if not tensor.is_contiguous():
                raise ValueError(f"tensor {spec.name} is not contiguous")
            if tensor.is_meta or (wants_cpu and not tensor.is_cpu):
                raise ValueError(f"tensor {spec.name} is on {tensor.device}: {self._transport} "
                                 f"carries tensors of {'the CPU' if wants_cpu else 'a device'}")  # fmt: skip
        return plan

    def _lead(
        self,
        plan: Plan,
        tensors: Sequence[torch.Tensor],
        version: int,
        number: int,
        started_s: float,
    ) -> tuple[BucketTimes, ...]:
        """Rank 0's part, once all are ready."""
        if self._transport == "rccl":
            self._ranks.give_order(Order(version))
            return self._broadcast_rccl(plan, tensors, version)
        try:
            sender, endpoint = open_sender(self._config, plan, number, self._world - 1)
        except Exception as error:
            self._call_off(version, f"{type(error).__name__}: {error}")
            raise
        self._ranks.give_order(Order(version, endpoint))
        return self._send(plan, tensors, sender, version, started_s)

    def _follow(
        self,
        plan: Plan,
        tensors: Sequence[torch.Tensor],
        order: Order,
        number: int,
        started_s: float,
    ) -> tuple[BucketTimes, ...]:
        """Another rank's part."""
        if self._transport == "rccl":
            return self._broadcast_rccl(plan, tensors, order.version)
        receiver = open_receiver(order.endpoint, number, self._rank - 1, self._timeout_s)
        try:
            times = self._take(plan, tensors, receiver, started_s)
        except Exception as error:
            receiver.fail(f"{type(error).__name__}: {error}")
            raise
        receiver.verified()
        return times

    def _send(
        self,
        plan: Plan,
        tensors: Sequence[torch.Tensor],
        sender: Sender,
        version: int,
        started_s: float,
    ) -> tuple[BucketTimes, ...]:
        times = []
        try:
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
            raise PublishError(f"version {version} did not reach every rank: {listed(failed)}")
        return tuple(times)

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
            unique_id = self._ranks.share_id(api.unique_id)
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


def _failed(sender: Sender, world: int) -> dict[int, str]:
    """Rank -> reason, of those that did not take everything."""
    errors = {rank: sender.error(rank - 1) for rank in range(1, world)}
    return {rank: error for rank, error in errors.items() if error}


def _explained(error: ValidationError) -> str:
    """The first setting at fault, in one line."""
    first = error.errors()[0]
    name = ".".join(str(part) for part in first["loc"])
    return f"{name} is {first['input']!r}: {first['msg']}"
