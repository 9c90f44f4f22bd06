"""Configuration of the broker: every limit of the sandbox package is a field here."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class ImageConfig(BaseModel):
    """One image: a base and read-only layers stacked on it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    base: str = "host"
    """`host`: this machine's /usr, read-only, with a minimal /etc; or the absolute path of a
    root file system."""
    layers: tuple[Path, ...] = ()
    """Directories laid over the base, topmost first; each mirrors `/` (as `usr/local/bin/x`).
    On a `host` base what lies under `usr` is read-only in the sandbox."""
    env: dict[str, str] = Field(default_factory=dict)
    """Added to the environment of each command in this image."""
    warm: int = Field(default=0, ge=0)
    """Sandboxes kept ready for this image; they count towards capacity."""

    @field_validator("base")
    @classmethod
    def _base_is_host_or_absolute(cls, base: str) -> str:
        if base != "host" and not base.startswith("/"):
            raise ValueError(
                f"image base {base!r}: want 'host' or the absolute path of a root file system"
            )
        return base

    @field_validator("layers")
    @classmethod
    def _layers_are_absolute(cls, layers: tuple[Path, ...]) -> tuple[Path, ...]:
        for layer in layers:
            if not layer.is_absolute():
                raise ValueError(f"image layer {str(layer)!r} is not an absolute path")
        return layers


class BrokerConfig(BaseModel):
    """The broker and its local backend."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    images: dict[str, ImageConfig] = Field(default_factory=lambda: {"host": ImageConfig()})
    """Images by the name that Acquire asks for."""
    rootfs_parents: tuple[Path, ...] = ()
    """Directories below which a client may name a root file system itself
    (`rootfs:/abs/path`). Empty: refused, because it would show clients any host directory."""
    capacity: int = Field(default=48, gt=0)
    """Sandboxes alive at one time, leased and warm together."""
    default_ttl_s: float = Field(default=600.0, gt=0)
    """Lease time for requests that set none, in seconds."""
    max_ttl_s: float = Field(default=7200.0, gt=0)
    """Longest lease time granted at once, in seconds; longer requests are cut to it."""
    acquire_timeout_s: float = Field(default=60.0, gt=0)
    """Wait for capacity of an Acquire without a deadline, in seconds."""
    reap_interval_s: float = Field(default=0.5, gt=0)
    """How often expired leases are looked for, in seconds."""
    start_rate_per_s: float = Field(default=0.0, ge=0)
    """Sandboxes started per second, over time; 0: unlimited."""
    start_burst: int = Field(default=16, gt=0)
    """Starts allowed at once before start_rate_per_s holds."""
    max_start_attempts: int = Field(default=4, gt=0)
    """Starts tried for one Acquire while the backend says that it is busy."""

    default_memory_bytes: int = Field(default=2 * 2**30, gt=0)
    """Memory of a sandbox that asks for none; its files count, they live in memory."""
    default_max_pids: int = Field(default=256, gt=1)
    """Processes and threads of a sandbox that asks for no number."""
    disk_bytes: int = Field(default=2**30, gt=0)
    """Size of what a sandbox may write to its file system, in bytes."""
    default_exec_timeout_s: float = Field(default=120.0, gt=0)
    """Wall clock for a command that sets none, in seconds."""
    max_exec_timeout_s: float = Field(default=3600.0, gt=0)
    """Longest command, in seconds; longer requests are cut to it."""
    default_output_cap_bytes: int = Field(default=2**16, gt=0)
    """Bytes kept of stdout, and of stderr, when a request sets no cap."""
    max_output_cap_bytes: int = Field(default=4 * 2**20, gt=0)
    """Largest cap granted; two of these must fit a gRPC message."""
    output_grace_s: float = Field(default=0.02, ge=0)
    """After a command ends, how long its output pipes may stay open in background processes
    before the reply goes out without them, in seconds."""
    max_transfer_bytes: int = Field(default=2**30, gt=0)
    """Content of one upload or download, in bytes."""
    transfer_threads: int = Field(default=4, gt=0)
    """Threads that pack and unpack archives."""

    state_dir: Path = Path("/tmp")
    """Directory for a small work directory, removed at exit."""
    init_binary: Path | None = None
    """The native sandbox_init; None: the one that the build puts beside this package."""
    cgroups: bool = True
    """Enforce memory, pids and cpu limits. False runs without limits: for hosts where cgroups
    are not writable, and trusted commands only."""
    cgroup_parent: str = ""
    """Cgroup (as `/a/b`, relative to the hierarchy's mount) that sandboxes go under; empty:
    version 2, the root; version 1, the broker's own."""
    hidden_usr: tuple[str, ...] = ("local", "src")
    """Directories of the host's /usr that a `host` image does not show."""
    path: str = _PATH
    """PATH of each command."""
    drain_timeout_s: float = Field(default=5.0, ge=0)
    """On SIGTERM, calls in flight get this long before they are cut, in seconds."""

    @model_validator(mode="after")
    def _consistent(self) -> BrokerConfig:
        warm = sum(image.warm for image in self.images.values())
        if warm > self.capacity:
            raise ValueError(
                f"images keep {warm} sandboxes warm but capacity is {self.capacity}: "
                "raise capacity or lower images.*.warm"
            )
        if self.default_ttl_s > self.max_ttl_s:
            raise ValueError(
                f"default_ttl_s ({self.default_ttl_s}) is above max_ttl_s ({self.max_ttl_s})"
            )
        if self.default_output_cap_bytes > self.max_output_cap_bytes:
            raise ValueError("default_output_cap_bytes is above max_output_cap_bytes")
        if 2 * self.max_output_cap_bytes > 12 * 2**20:
            raise ValueError("max_output_cap_bytes is above 6 MiB: a reply would not fit a message")
        return self
