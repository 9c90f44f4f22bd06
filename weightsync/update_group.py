"""The trainer's end of a process group with the ranks of engines, apart from every other group.

Owner: DistributedPath. The engines make theirs by SGLang's `init_weights_update_group`, a default
group of torch in all but its name; here the backend is made directly over the same store and
prefixes, so that torch's registry of groups, in which megatron's lie, never hears of it and any
thread may make one. Invariants: every collective has a deadline; `close` ends all waits for this
rank at once, the others' included.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, TCPStore

from weightsync.config import DistributedConfig
from weightsync.errors import PeerLostError, TransferTimeoutError
from weightsync.plan import DTYPE_BYTES
from weightsync.update_path import Target, Update

GROUP_NAME = "swe_rl_weight_update"
"""One name for every sender, so that the next one finds and removes what a killed one left."""

_DEVICES = {"gloo": "cpu", "nccl": "cuda"}
_POLL_S = 0.001


class UpdateGroup:
    """Rank 0 of a group; made by `__init__` and `connect`, ended by `close`."""

    def __init__(self, config: DistributedConfig, world: int, timeout_s: float) -> None:
        """Listens. Raises PeerLostError when the address is not to be had."""
        self._config, self._world = config, world
        self._timeout = timedelta(seconds=timeout_s)
        self.members: tuple[tuple[str, str], ...] = ()
        """Names and addresses of the engines."""
        self.weight_version = 0
        """What every member was last given through this group."""
        try:
            self._server: TCPStore | None = TCPStore(
                config.host, 0, None, True, self._timeout, wait_for_workers=False
            )
        except RuntimeError as error:  # torch's DistNetworkError
            raise PeerLostError(
                f"cannot listen at weight_sync.distributed.host={config.host}: {error}"
            ) from error
        self.port: int = self._server.port
        self._backend: Any = None
        self._buffers: list[torch.Tensor] = []

    def connect(self) -> None:
        """Waits for every member. Blocks; raises PeerLostError after the time-out or `close`."""
        try:
            # A connection of its own, so that closing the server ends the wait.
            store = TCPStore(self._config.host, self.port, None, False, self._timeout)
            prefixed = PrefixStore(GROUP_NAME, store)
            device = _DEVICES[self._config.backend]
            prefixed = PrefixStore(f"{device}/", PrefixStore(f"{GROUP_NAME}/", prefixed))
            self._backend = self._make_backend(prefixed)
        except RuntimeError as error:
            raise PeerLostError(
                f"the group of {self._world} did not come about: {error}"
            ) from error

    def serves(self, targets: Sequence[Target]) -> bool:
        """Whether these are its members, each with the weights that it was last given here."""
        return self.members == tuple((t.engine, t.url) for t in targets) and all(
            t.weight_version == self.weight_version for t in targets
        )

    def pack(self, update: Update, index: int) -> torch.Tensor:
        """The bytes of bucket `index` without gaps, in a buffer that the next but one takes again."""
        places = flat_order(update, index)
        tensors = update.source.whole()
        size = sum(update.plan.tensors[place].num_bytes for place in places)
        flat = self._buffer(update, index)[:size]
        start = 0
        for place in places:
            raw = tensors[place].reshape(-1).view(torch.uint8)
            flat[start : start + raw.numel()].copy_(raw)
            start += raw.numel()
        return flat

    def broadcast(self, flat: torch.Tensor) -> None:
        """Sends to every member. Blocks.

        Raises PeerLostError, TransferTimeoutError; the group is of no use after either.
        """
        options = torch.distributed.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        try:
            work = self._backend.broadcast([flat], options)
            if self._config.backend == "gloo":
                work.wait(self._timeout)
            else:
                self._wait_on_device(work)
        except RuntimeError as error:
            raise PeerLostError(f"broadcast to {self._world - 1} ranks: {error}") from error

    def close(self) -> None:
        """Ends every wait for this rank. A broadcast in another thread keeps its end until it fails."""
        self._server = None
        if self._backend is not None and self._config.backend == "nccl":
            self._backend.abort()
        self._backend = None

    def _make_backend(self, store: Any) -> Any:
        if self._config.backend == "gloo":
            return torch.distributed.ProcessGroupGloo(store, 0, self._world, self._timeout)
        options = torch.distributed.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        return torch.distributed.ProcessGroupNCCL(store, 0, self._world, options)

    def _wait_on_device(self, work: Any) -> None:
        deadline_s = time.monotonic() + self._timeout.total_seconds()
        while not work.is_completed():
            if time.monotonic() >= deadline_s:
                raise TransferTimeoutError(
                    f"broadcast to {self._world - 1} ranks did not end in {self._timeout}"
                )
            time.sleep(_POLL_S)

    def _buffer(self, update: Update, index: int) -> torch.Tensor:
        size = update.plan.largest_bucket
        if not self._buffers or self._buffers[0].numel() < size:
            device = _DEVICES[self._config.backend]
            self._buffers = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
        return self._buffers[index % 2]


def flat_order(update: Update, index: int) -> list[int]:
    """Places in the plan of a bucket's tensors, widest elements first: each then lies aligned."""
    bucket = update.plan.buckets[index]
    places = range(bucket.first, bucket.first + len(bucket.offsets))
    return sorted(places, key=lambda p: -DTYPE_BYTES[update.plan.tensors[p].dtype])
