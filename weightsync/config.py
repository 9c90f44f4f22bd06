"""Settings of one sender of weights. Owner: WeightPublisher. Imports pydantic only."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class TcpConfig(BaseModel):
    """Settings of the transport `tcp`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: Literal["127.0.0.1", "::1"] = "127.0.0.1"
    """Where the trainer listens, on a free port. Loopback only: connections are not encrypted."""

    fan_out: int = Field(default=1, ge=1, le=64)
    """How often a bucket leaves one process: 1 is a chain of engines, more a tree."""

    stall_timeout_s: float = Field(default=3.0, gt=0)
    """An engine without a byte for so long takes buckets from the trainer, not from its parent."""


class WeightSyncConfig(BaseModel):
    """How weights travel from the trainer to the engines."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    transport: Literal["shm", "tcp"] = "shm"
    """`shm`: POSIX shared memory, for engines on the trainer's own host; `tcp`: sockets."""

    tcp: TcpConfig = TcpConfig()
    """Settings of `tcp`."""

    bucket_bytes: int = Field(default=64 * 2**20, gt=0)
    """Most bytes of one bucket; at least the largest tensor (622 MB for Qwen3-30B-A3B in bf16)."""

    num_buffers: int = Field(default=2, ge=1, le=8)
    """Buckets in shared memory at once: 2 lets packing and loading overlap."""

    checksums: bool = True
    """Sum every bucket on both sides, about 0.1 s a GB each."""

    bucket_timeout_s: float = Field(default=30.0, gt=0)
    """Longest wait for a receiver to free a buffer, or for the next bucket to arrive."""

    verify_timeout_s: float = Field(default=60.0, gt=0)
    """From the last bucket to the receiver's word that the update is complete."""

    attach_timeout_s: float = Field(default=30.0, gt=0)
    """From the call to an engine to its loader's first sign of life, its queue included."""
