"""Settings of one sender of weights. Owner: WeightPublisher. Imports pydantic only."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

LOOPBACK = ("127.0.0.1", "::1", "localhost")


class TcpConfig(BaseModel):
    """Settings of the transport `tcp`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: Literal["127.0.0.1", "::1"] = "127.0.0.1"
    """Where the trainer listens, on a free port. Loopback only: connections are not encrypted."""

    fan_out: int = Field(default=1, ge=1, le=64)
    """How often a bucket leaves one process: 1 is a chain of engines, more a tree."""

    stall_timeout_s: float = Field(default=3.0, gt=0)
    """An engine without a byte for so long takes buckets from the trainer, not from its parent."""

    local_sockets: bool = True
    """Between two on one host, in one network namespace, bytes take a local socket: half the CPU time
    of TCP. False: TCP everywhere."""


class DistributedConfig(BaseModel):
    """Settings of the transport `distributed`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    backend: Literal["gloo", "nccl"] = "gloo"
    """Of the process group: `gloo` between CPUs; `nccl` between GPUs (RCCL on ROCm), not tried yet."""

    host: str = "127.0.0.1"
    """Where the engines find the trainer, which listens on a free port for the group's members."""

    allow_unencrypted: bool = False
    """Needed for a host other than loopback: neither gloo nor nccl encrypts or asks who connects."""

    refusal_wait_s: float = Field(default=0.1, gt=0)
    """How long the first bucket is held back for an engine's refusal of the call. A refusal that
    comes later costs the engine a restart, because it might have taken the bucket."""

    @model_validator(mode="after")
    def _check(self) -> DistributedConfig:
        if self.host not in LOOPBACK and not self.allow_unencrypted:
            raise ValueError(
                f"weight_sync.distributed.host={self.host} is not loopback, and the group's "
                "connections are not encrypted: on a network of your own set "
                "weight_sync.distributed.allow_unencrypted=true"
            )
        return self


class DiskConfig(BaseModel):
    """Settings of the transport `disk`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    directory: Path | None = None
    """Where one folder an update is written and removed again; of this trainer alone, seen by every
    engine under the same path. The trainer's default is `weightsync` in its run directory."""

    load_timeout_s: float = Field(default=240.0, gt=0)
    """From the call to an engine to its word that it read everything."""


class WeightSyncConfig(BaseModel):
    """How weights travel from the trainer to the engines."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    transport: Literal["shm", "tcp", "distributed", "disk"] = "shm"
    """`shm`: POSIX shared memory, for engines on the trainer's own host; `tcp`: sockets. Both go
    through our loader, which verifies what it takes. `distributed` and `disk` are SGLang's own calls
    (update_weights_from_distributed, update_weights_from_disk), which verify next to nothing."""

    tcp: TcpConfig = TcpConfig()
    """Settings of `tcp`."""

    distributed: DistributedConfig = DistributedConfig()
    """Settings of `distributed`."""

    disk: DiskConfig = DiskConfig()
    """Settings of `disk`."""

    bucket_bytes: int = Field(default=64 * 2**20, gt=0)
    """Most bytes of one bucket; at least the largest tensor (622 MB for Qwen3-30B-A3B in bf16)."""

    num_buffers: int = Field(default=2, ge=1, le=8)
    """Buckets in shared memory at once: 2 lets packing and loading overlap."""

    checksums: bool = True
    """Sum every bucket on both sides, about 0.1 s a GB each."""

    verify_engine: bool = True
    """Each engine reads its parameters back after the last bucket and compares them with the sums
    that the trainer made of its tensors: one more pass over the weights on both sides, 0.05 to 0.1 s a
    GB on one core each, and 0.2 s for the 18,867 tensors of Qwen3-30B-A3B; the engine's while it is
    paused. Parameters on an accelerator are copied to the host for it. Off for engines whose weights
    lie otherwise after loading (quantised layers)."""

    loader: str = "weightsync.sglang_loader.load"
    """Dotted name of the function that receives in an engine: engines.weight_loader there."""

    bucket_timeout_s: float = Field(default=30.0, gt=0)
    """Longest wait for a receiver to free a buffer, or for the next bucket to arrive."""

    verify_timeout_s: float = Field(default=60.0, gt=0)
    """From the last bucket to the receiver's word that the update is complete."""

    attach_timeout_s: float = Field(default=30.0, gt=0)
    """From the call to an engine to its loader's first sign of life, its queue included."""

    @model_validator(mode="after")
    def _check(self) -> WeightSyncConfig:
        if self.transport == "disk" and self.disk.directory is None:
            raise ValueError(
                "weight_sync.transport=disk needs weight_sync.disk.directory: a folder of this "
                "trainer's own that every engine sees under the same path"
            )
        return self
