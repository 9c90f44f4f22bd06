"""What a backend gives the broker. Backends know nothing of leases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import BinaryIO, Protocol


@dataclass(frozen=True)
class SandboxLimits:
    """Limits of one sandbox, all resolved."""

    memory_bytes: int
    max_pids: int
    cpu_cores: float = 0.0
    """0: no limit."""


@dataclass(frozen=True)
class ExecSpec:
    """One command, all resolved."""

    command: str
    cwd: str
    timeout_s: float
    output_cap_bytes: int
    env: Mapping[str, str] = field(default_factory=dict)
    user: str = ""
    merge_output: bool = False


@dataclass(frozen=True)
class ExecOutcome:
    """What became of a command."""

    stdout: bytes
    stderr: bytes
    exit_code: int
    timed_out: bool
    oom_killed: bool
    stdout_dropped_bytes: int
    stderr_dropped_bytes: int
    duration_s: float


class Sandbox(Protocol):
    """One isolated machine. After `close` or its death every call raises SandboxDiedError."""

    @property
    def alive(self) -> bool:
        """False once its init has died."""

    async def prepare(self, limits: SandboxLimits, workdir: str) -> None:
        """Makes a fresh sandbox the lessee's: sets its limits, creates its workdir."""

    async def execute(self, spec: ExecSpec) -> ExecOutcome:
        """Runs a command; one at a time, others wait. When cancelled, kills it first."""

    async def kill_processes(self) -> int:
        """Kills every process but init; returns how many."""

    async def upload(self, target_dir: str, archive: BinaryIO) -> tuple[int, int]:
        """Unpacks a tar file; returns (files, bytes of content)."""

    async def download(self, path: str, max_bytes: int) -> BinaryIO:
        """A tar file of a file or directory, positioned at its start; the caller closes it."""

    async def collect_changes(self, path: str, max_bytes: int) -> tuple[BinaryIO, list[str]]:
        """A tar file of what was created or modified below path, and the paths deleted."""

    async def close(self) -> None:
        """Kills everything and frees all resources. Idempotent."""


class Backend(Protocol):
    """Makes sandboxes."""

    @property
    def name(self) -> str:
        """As in Lease.backend."""

    async def start(self) -> None:
        """Raises BackendSetupError when this host cannot run it."""

    async def create(self, image: str, limits: SandboxLimits) -> Sandbox:
        """Makes one. Raises InvalidRequestError (image), BackendBusyError, SandboxDiedError."""

    async def close(self) -> None:
        """Closes what it owns; sandboxes die with it."""
