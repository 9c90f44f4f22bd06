"""What one rank writes into a checkpoint, taken between two optimizer steps.

    take    sharded state -> plan -> Snapshot   main thread, all ranks together
    hold    copies into HostBuffers             main thread; the optimizer may go on after it
    write   one file, its SHA-256 as it goes    any thread; touches no live tensor once held
    finish  megatron's index of all files       the first rank

The files are megatron's `torch_dist` format. A snapshot that was not held holds the live tensors:
it may be written only while nothing trains.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.strategies import torch as torch_strategy
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from trainer import checkpoint_state, ranks
from trainer.device import Device
from trainer.step import Learner

_BUFFERED_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """This rank's part of a checkpoint."""

    items: list[tuple[WriteItem, torch.Tensor | io.BytesIO]]
    file_name: str
    has_optimizer: bool
    metadata: Metadata | None  # the index of all ranks' items, on the first rank


@dataclasses.dataclass(frozen=True)
class Written:
    """What a rank wrote: no file if there was nothing."""

    file_name: str
    sha256: str
    num_bytes: int
    results: list[WriteResult]


class HostBuffers:
    """Memory of the host for one snapshot, kept from save to save."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._buffers: dict[Any, torch.Tensor] = {}

    def hold(self, snapshot: Snapshot) -> Snapshot:
        """The same snapshot in memory of its own; the one held before is overwritten."""
        before, self._buffers = self._buffers, {}
        items: list[tuple[WriteItem, torch.Tensor | io.BytesIO]] = []
        for item, data in snapshot.items:
            if isinstance(data, torch.Tensor):
                buffer = before.pop(item.index, None)
                if buffer is None or (buffer.shape, buffer.dtype) != (data.shape, data.dtype):
                    buffer = self._device.host_buffer(data.shape, data.dtype)
                buffer.copy_(data, non_blocking=True)
                self._buffers[item.index] = data = buffer
            items.append((item, data))
        self._device.synchronize()
        return dataclasses.replace(snapshot, items=items)


def take(learner: Learner, folder: Path) -> Snapshot:
    """Plans what each rank writes to the empty `folder`; every rank calls it."""
    with_optimizer = checkpoint_state.has_optimizer(learner)
    plan = _Plan()
    dist_checkpointing.save(
        checkpoint_state.sharded_state(learner, loading=False, with_optimizer=with_optimizer),
        str(folder),
        sharded_strategy=plan,
        async_sharded_save=True,
        content_metadata={"distrib_optim_sharding_type": checkpoint_state.SHARDING},
    )
    return Snapshot(
        plan.items, f"__{torch.distributed.get_rank()}_0.distcp", with_optimizer, plan.metadata
    )


def write(snapshot: Snapshot, folder: Path) -> Written:
    """Writes and syncs this rank's file. Raises OSError."""
    if not snapshot.items:
        return Written("", "", 0, [])
    results = []
    with (folder / snapshot.file_name).open("wb", buffering=_BUFFERED_BYTES) as file:
        stream = _HashedStream(file)
        for item, data in snapshot.items:
            begin = stream.tell()
            if isinstance(data, torch.Tensor):
                torch.save(_alone(data), stream)
            else:
                stream.write(data.getbuffer())
            if stream.error is not None:
                raise stream.error
            length = stream.tell() - begin
            place = _StorageInfo(snapshot.file_name, begin, length)
            results.append(WriteResult(item.index, length, place))
        file.flush()
        os.fsync(file.fileno())
    return Written(snapshot.file_name, stream.sha256(), stream.tell(), results)


def finish(metadata: Metadata, written: Sequence[Written], folder: Path) -> None:
    """Writes the index of what all ranks wrote. Raises OSError."""
    writer = FileSystemWriter(folder)
    writer.set_up_storage_writer(True)
    writer.finish(metadata, [part.results for part in written])
    save_config(CheckpointingConfig(_Plan().backend, _Plan().version), str(folder))


class _Plan(torch_strategy.TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """A strategy of megatron's that plans a save and writes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.items: list[tuple[WriteItem, torch.Tensor | io.BytesIO]] = []
        self.metadata: Metadata | None = None

    def async_save(
        self, sharded_state_dict: Any, checkpoint_dir: Any, async_strategy: str = ""
    ) -> AsyncRequest:
        """Fills `items` and, on the first rank, `metadata`."""
        named, _, _ = torch_strategy._replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, self.keep_only_main_replica
        )
        state = torch_strategy.mcore_to_pyt_state_dict(named, False)
        planner = torch_strategy.MCoreSavePlanner(
            dedup_replicated_tensors=not self.keep_only_main_replica,
            flatten_state_dict=False,
            flatten_sharded_tensors=False,
        )
        planner.set_up_planner(state, is_coordinator=ranks.is_first())
        local = planner.create_local_plan()
        plans = ranks.to_first(local)
        if plans:
            _, self.metadata = planner.create_global_plan(plans)
        local = planner.finish_plan(planner.create_decentralized_global_plan(local))
        self.items = [(item, planner.resolve_data(item)) for item in local.items]
        return AsyncRequest(None, (), [])


class _HashedStream:
    """A file that is summed while it is written, and that notes an error instead of raising it.

    torch hides the cause when a write fails inside of it; the caller asks for `error` after each.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.error: OSError | None = None
        self._file = file
        self._sha256 = hashlib.sha256()
        self._num_bytes = 0

    def write(self, data: Any) -> int:
        """Takes all of `data`."""
        size = memoryview(data).nbytes
        self._num_bytes += size
        if self.error is None:
            try:
                self._file.write(data)
                self._sha256.update(data)
            except OSError as error:
                self.error = error
        return size

    def flush(self) -> None:
        """Does nothing: the file is flushed once, at its end."""

    def tell(self) -> int:
        """Bytes taken so far."""
        return self._num_bytes

    def sha256(self) -> str:
        """Of all that was taken."""
        return self._sha256.hexdigest()


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the host, in storage of its own: torch writes a view's whole storage."""
    tensor = tensor.detach().cpu()
    is_view = tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size()
    return tensor.clone() if is_view else tensor
