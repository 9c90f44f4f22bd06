"""Publishes the trainer's weights to every engine as a new weight_version.

Purpose: one call after an optimizer step. Owner: the trainer's rank 0. Flow:

    plan -> path.prepare -> OpenUpdateWindow (manager pauses engines)
         -> path.send: an UpdatePath, chosen by setting, brings the tensors to every engine
         -> CloseUpdateWindow with what became of each engine (manager commits and resumes)
         -> path.finish

Invariants: tensors, and what an iterator gathers them from, must not change until `publish`
returned: no optimizer step before; one engine's failure never stops
the others; the window is closed on every path on which this process lives (the manager's own
deadline covers the rest).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from proto import rollout_pb2 as pb
from weightsync.config import WeightSyncConfig
from weightsync.disk_path import DiskPath, sweep_folders
from weightsync.errors import PublishError, WeightSyncError
from weightsync.loader_path import LoaderPath, sweep_segments
from weightsync.plan import MAX_VERSION, Plan, make_plan
from weightsync.tensor_source import Gathered, Gathering, gather_all, spec_of
from weightsync.update_path import EngineResult, Target, Update, UpdatePath

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

__all__ = ["PublishError", "PublishResult", "WeightPublisher", "sweep"]


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


def open_path(config: WeightSyncConfig) -> UpdatePath:
    """The path of the setting `transport`."""
    if config.transport == "distributed":
        from weightsync.distributed_path import DistributedPath  # it needs torch

        return DistributedPath(config)
    if config.transport == "disk":
        return DiskPath(config)
    return LoaderPath(config)


def sweep(config: WeightSyncConfig) -> None:
    """Removes what senders that were killed left in shared memory and on disk."""
    if num_removed := sweep_segments():
        logger.info("removed %d segments whose sender was killed", num_removed)
    if config.transport == "disk" and config.disk.directory is not None:
        sweep_folders(config.disk.directory)


class WeightPublisher:
    """Sends weights to the engines that the manager names."""

    def __init__(self, config: WeightSyncConfig, rollout_client: WindowClient) -> None:
        """Removes what publishers that were killed left behind."""
        sweep(config)
        self._config = config
        self._client = rollout_client
        self._path = open_path(config)
        self._known: Plan | None = None

    async def publish(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], weight_version: int
    ) -> PublishResult:
        """Publishes tensors by Hugging Face name; those on a device are copied to the host.

        Args: an iterator is gathered a bucket ahead of the sending, in a thread, where the plan is
          known from the publication before; the first time, and for a collection, all tensors are in
          memory before engines are paused.

        Raises ValueError for tensors that cannot be planned and a version out of range, PublishError
        when no engine took them, shared memory, an address or the disk was not to be had, there are
        more receivers than a sender serves, or tensors changed since the plan was made, and what the
        rollout client raises when the window cannot be opened or closed.
        """
        if not 0 <= weight_version <= MAX_VERSION:
            raise ValueError(f"weight_version is {weight_version}, wanted 0 to {MAX_VERSION}")
        started_s = time.monotonic()
        update = await self._update(named_tensors, weight_version)
        # Until an engine has taken it, nobody knows whether the plan is right.
        self._known = None
        try:
            await self._path.prepare(update)
            epoch, results, closed = await self._run_window(update)
        except (OSError, WeightSyncError) as error:
            raise PublishError(
                f"weight_version {weight_version} could not be sent: {error}"
            ) from error
        finally:
            await self._path.finish()
            await asyncio.to_thread(update.source.close)
        serving = tuple(closed.engines_serving)
        if not serving:
            raise PublishError(
                f"weight_version {weight_version} (window {epoch}) reached no engine: "
                + "; ".join(f"{r.engine}: {r.error or 'failed to commit'}" for r in results)
            )
        self._known = update.plan
        return PublishResult(
            weight_version=weight_version,
            num_bytes=update.plan.total_bytes,
            duration_s=time.monotonic() - started_s,
            engines=serving,
            per_engine={result.engine: result for result in results},
            paused_s=closed.paused.ToTimedelta().total_seconds(),
        )

    async def close(self) -> None:
        """Removes what is kept between publications."""
        await self._path.close()

    async def _update(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], weight_version: int
    ) -> Update:
        if self._known is not None and isinstance(named_tensors, Iterator):
            source = Gathering(self._known, named_tensors, self._config.bucket_timeout_s)
            return Update(self._known, source, weight_version)
        tensors = await asyncio.to_thread(gather_all, named_tensors)
        specs = [spec_of(name, tensor) for name, tensor in tensors.items()]
        plan = make_plan(specs, self._config.bucket_bytes)
        return Update(plan, Gathered(plan, list(tensors.values())), weight_version)

    async def _run_window(
        self, update: Update
    ) -> tuple[int, list[EngineResult], pb.CloseUpdateWindowReply]:
        """Opens a window, sends, closes it."""
        opened = await self._client.open_update_window(
            pb.OpenUpdateWindowRequest(
                weight_version=update.weight_version,
                plan_digest=update.plan.digest,
                num_tensors=len(update.plan.tensors),
                total_bytes=update.plan.total_bytes,
            )
        )
        targets = [
            Target(t.engine, t.url, t.weight_version, t.tensor_parallel or 1)
            for t in opened.targets
        ]
        results = [
            EngineResult(t.engine, False, False, "the sender failed before it began", 0.0)
            for t in targets
        ]
        try:
            await self._path.send(update, targets, opened.epoch, results)
        finally:
            closed = await self._client.close_update_window(
                _close_request(opened.epoch, update.weight_version, results)
            )
        return opened.epoch, results, closed


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
