"""Updates through a process group: SGLang's `update_weights_from_distributed`.

The trainer is rank 0 of a group of its own with every rank of every engine. For each bucket the
engines are called with its names, and the trainer broadcasts its bytes (`flattened_bucket`). Flow:

    once a set of engines: forget an older group -> all ranks join at once
    a bucket: call every engine -> broadcast -> every engine answers    (the next is packed meanwhile)

The group is used again as long as every engine serves what it was last given through it: one that
was restarted, or missed an update, makes the set join anew.

Owner: WeightPublisher. Invariants: those of update_path.py; megatron's own groups are not involved;
a group in which anything went wrong is dropped, which ends the waits of engines for it, and those
that can go on get the whole update once more in a new group. Each round loses an engine, so that
there are at most as many as engines. An engine that waits for another engine, and not for us,
ends only with SGLang's own time-out: it is given up, and the manager restarts it.

What is checked: that each engine answered every bucket with success, and that a refusal before our
first byte leaves it untouched. What cannot be: whether names and shapes were those of its model
(SGLang skips unknown names and keeps the old values of missing ones), and whether the bytes are
those sent. There is no epoch in these calls: an old sender is fenced because the manager restarts
every engine of a window whose sender did not close it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from weightsync.config import WeightSyncConfig
from weightsync.errors import WeightSyncError
from weightsync.stock_calls import Answer, EngineCalls, Progress, with_head
from weightsync.update_group import GROUP_NAME, UpdateGroup, flat_order
from weightsync.update_path import EngineResult, Target, Update

if TYPE_CHECKING:
    from weightsync.plan import TensorSpec

logger = logging.getLogger(__name__)

_BAD_REQUEST = 400


class DistributedPath:
    """Sends through one process group for the set of engines."""

    def __init__(self, config: WeightSyncConfig) -> None:
        """Nothing is opened yet."""
        self._config = config
        self._group: UpdateGroup | None = None

    async def prepare(self, update: Update) -> None:
        """Gathers all tensors: the head, say, may be needed twice."""
        await asyncio.to_thread(update.source.whole)

    async def send(
        self,
        update: Update,
        targets: Sequence[Target],
        epoch: int,
        results: list[EngineResult],
    ) -> None:
        """Sends to all targets at once; see UpdatePath."""
        update = with_head(update)
        rows = [Progress(target) for target in targets]
        calls = EngineCalls()
        started_s = time.monotonic()
        left, num_before = rows, len(rows) + 1
        try:
            while left and len(left) < num_before:
                num_before = len(left)
                left = await self._round(calls, update, left)
        finally:
            if not all(row.complete for row in rows):
                self._drop()
            for row in rows:
                row.seconds = time.monotonic() - started_s
            results[:] = [row.result() for row in rows]
            await calls.close()

    async def finish(self) -> None:
        """Nothing: the group is kept."""

    async def close(self) -> None:
        """Leaves the group. Engines keep their end of it until the next sender joins."""
        self._drop()

    def _drop(self) -> None:
        """Leaves the group; not at once where a collective still runs, so a thread does it."""
        group, self._group = self._group, None
        if group is not None:
            asyncio.get_running_loop().run_in_executor(None, group.close)

    async def _round(
        self, calls: EngineCalls, update: Update, rows: list[Progress]
    ) -> list[Progress]:
        """Sends the whole update once; returns those to try again, without any that failed."""
        left = await self._join(calls, rows)
        group = self._group
        if group is None:
            return left
        last = len(update.plan.buckets) - 1
        flat = await asyncio.to_thread(group.pack, update, 0)
        for index in range(last + 1):
            tensors = [update.plan.tensors[place] for place in flat_order(update, index)]
            posted = [asyncio.create_task(self._call(calls, row.target, tensors)) for row in rows]
            try:
                if index == 0:
                    wait_s = self._config.distributed.refusal_wait_s
                    refused, _ = await asyncio.wait(
                        posted, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED
                    )
                    if refused:
                        return await self._give_up(posted, rows, "another engine refused")
                for row in rows:
                    row.touched = True
                await asyncio.to_thread(group.broadcast, flat)
                if index < last:
                    flat = await asyncio.to_thread(group.pack, update, index + 1)
                await asyncio.wait(posted)
                if any(call.result().error for call in posted):
                    return await self._give_up(posted, rows, "another engine failed")
            except WeightSyncError as error:
                why = f"bucket {index} ({update.plan.label(index)}): {error}"
                return await self._give_up(posted, rows, why)
            finally:
                for call in posted:
                    call.cancel()
        group.weight_version = update.weight_version
        for row in rows:
            row.complete = True
        return []

    async def _call(
        self, calls: EngineCalls, target: Target, tensors: Sequence[TensorSpec]
    ) -> Answer:
        """Lets an engine take a bucket."""
        body = {
            "names": [tensor.name for tensor in tensors],
            "dtypes": [tensor.dtype for tensor in tensors],
            "shapes": [list(tensor.shape) for tensor in tensors],
            "group_name": GROUP_NAME,
            "load_format": "flattened_bucket",
            "flush_cache": False,
            "abort_all_requests": False,
        }
        # Longer than our own wait for the broadcast, so that the engine can tell what it was.
        timeout_s = self._config.attach_timeout_s + 2 * self._config.bucket_timeout_s
        return await calls.post(target, "/update_weights_from_distributed", body, timeout_s)

    async def _give_up(
        self, posted: Sequence[asyncio.Task[Answer]], rows: Sequence[Progress], why: str
    ) -> list[Progress]:
        """Drops the group; returns the engines that are not at fault, and notes why.

        At fault is what failed before the group was dropped, and what gives no answer after.
        """
        at_fault = {i for i, call in enumerate(posted) if call.done() and call.result().error}
        self._drop()
        answers = await asyncio.gather(*posted)
        left = []
        for index, (row, answer) in enumerate(zip(rows, answers, strict=True)):
            if index in at_fault or not answer.status:
                row.error = answer.error
            else:
                row.error = why
                left.append(row)
        logger.warning("%s; left out: %s", why, [r.target.engine for r in rows if r not in left])
        return left

    async def _join(self, calls: EngineCalls, rows: Sequence[Progress]) -> list[Progress]:
        """Makes the group, unless the one there is serves; without one, returns whom to try next."""
        targets = [row.target for row in rows]
        if self._group is not None and self._group.serves(targets):
            return []
        self._drop()
        sizes = await asyncio.gather(*(self._ready(calls, row) for row in rows))
        if not all(sizes):
            return [row for row, size in zip(rows, sizes, strict=True) if size]
        timeout_s = self._config.bucket_timeout_s
        try:
            group = UpdateGroup(self._config.distributed, 1 + sum(sizes), timeout_s)
        except WeightSyncError as error:
            for row in rows:
                row.error = str(error)
            return []
        self._group = group
        common = {
            "master_address": self._config.distributed.host,
            "master_port": group.port,
            "world_size": 1 + sum(sizes),
            "group_name": GROUP_NAME,
            "backend": self._config.distributed.backend,
        }
        posted = []
        for index, target in enumerate(targets):
            body = common | {"rank_offset": 1 + sum(sizes[:index])}
            joining = calls.post(target, "/init_weights_update_group", body, 2 * timeout_s)
            posted.append(asyncio.create_task(joining))
        connected = asyncio.create_task(asyncio.to_thread(group.connect))
        try:
            pending: set[asyncio.Task[object]] = {connected, *posted}  # type: ignore[arg-type]
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                if any(call.done() and call.result().error for call in posted):
                    return await self._give_up(posted, rows, "another engine did not join")
                if connected in done and (failure := connected.exception()):
                    return await self._give_up(posted, rows, str(failure))
        finally:
            for call in posted:
                call.cancel()
        group.members = tuple((t.engine, t.url) for t in targets)
        return []

    async def _ready(self, calls: EngineCalls, row: Progress) -> int:
        """Makes an engine forget an older group; returns its ranks, 0 when it does not answer."""
        timeout_s = self._config.attach_timeout_s
        body = {"group_name": GROUP_NAME}
        answer = await calls.post(row.target, "/destroy_weights_update_group", body, timeout_s)
        if answer.error and answer.status != _BAD_REQUEST:  # that one: it had none
            row.error = answer.error
            return 0
        return row.target.tensor_parallel
