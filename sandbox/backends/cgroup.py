"""Memory, pids and cpu limits through cgroups, version 1 or 2.

Owner: the local backend. Planning (`plan_cgroups`, `limit_writes`) is pure; CgroupTree does the
writes. Names carry the broker's pid and start time, so that a later broker can sweep what a
killed one left behind.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sandbox.backends.base import SandboxLimits
from sandbox.errors import BackendSetupError

CONTROLLERS = ("memory", "pids", "cpu")
"""What limits need. `cpu` is used only for sandboxes that ask for a share."""
_REQUIRED = ("memory", "pids")
_CPU_PERIOD_US = 100_000
_V1_UNLIMITED = -1
_NAME = re.compile(r"^swe_rl-(\d+)-(\d+)(-|$)")


@dataclass(frozen=True)
class CgroupPlan:
    """Where one broker's cgroups go."""

    version: int
    directories: Mapping[str, Path]
    """The broker's directory by controller; in version 2 the same for all."""
    enable: tuple[Path, ...] = ()
    """Version 2: directories whose subtree_control must pass the controllers down, in order."""


def broker_name(pid: int, start_ticks: int, suffix: str) -> str:
    """Name of a broker's cgroup or directory; see owner_is_dead."""
    return f"swe_rl-{pid}-{start_ticks}-{suffix}"


def process_start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None when there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def owner_is_dead(name: str, start_ticks: Callable[[int], int | None]) -> bool:
    """True for a broker's name whose process is gone; False for any other name."""
    match = _NAME.match(name)
    return match is not None and start_ticks(int(match[1])) != int(match[2])


def plan_cgroups(
    mounts: str, own_cgroups: str, v2_controllers: Callable[[Path], str], parent: str, name: str
) -> CgroupPlan:
    """Chooses version and directories.

    Args:
      mounts: content of /proc/mounts.
      own_cgroups: content of /proc/self/cgroup.
      v2_controllers: reads `cgroup.controllers` of a version 2 mount point.
      parent: BrokerConfig.cgroup_parent.
      name: see broker_name.

    Raises BackendSetupError when neither version offers memory and pids.
    """
    v1: dict[str, Path] = {}
    for line in mounts.splitlines():
        _, point, kind, options, *_ = line.split()
        if kind == "cgroup2":
            root = Path(point)
            offered = v2_controllers(root).split()
            if all(controller in offered for controller in _REQUIRED):
                return _plan_v2(root, offered, parent, name)
        elif kind == "cgroup":
            v1.update(
                {option: Path(point) for option in options.split(",") if option in CONTROLLERS}
            )
    missing = [controller for controller in _REQUIRED if controller not in v1]
    if missing:
        raise BackendSetupError(
            f"no cgroup controllers {missing} are mounted: run where cgroup version 1 or 2 is, "
            "or set cgroups=false to run without limits"
        )
    own = _own_v1_paths(own_cgroups)
    return CgroupPlan(
        version=1,
        directories={
            controller: point / (parent or own.get(controller, "/")).lstrip("/") / name
            for controller, point in v1.items()
        },
    )


def _plan_v2(root: Path, offered: list[str], parent: str, name: str) -> CgroupPlan:
    parents = [root]
    for part in Path(parent.lstrip("/")).parts:
        parents.append(parents[-1] / part)
    directory = parents[-1] / name
    return CgroupPlan(
        version=2,
        directories={controller: directory for controller in CONTROLLERS if controller in offered},
        enable=(*parents, directory),
    )


def _own_v1_paths(own_cgroups: str) -> dict[str, str]:
    paths: dict[str, str] = {}
    for line in own_cgroups.splitlines():
        _, controllers, path = line.split(":", 2)
        paths.update(dict.fromkeys(controllers.split(","), path))
    return paths


def limit_writes(version: int, limits: SandboxLimits) -> list[tuple[str, str, str]]:
    """(controller, file, value) to write, in order; `?` after a file: it may be absent."""
    memory = str(limits.memory_bytes)
    pids = str(limits.max_pids + 1)  # init is one of them
    quota = int(limits.cpu_cores * _CPU_PERIOD_US)
    if version == 2:
        return [
            ("memory", "memory.max", memory),
            ("memory", "memory.swap.max?", "0"),
            ("pids", "pids.max", pids),
            ("cpu", "cpu.max", f"{quota or 'max'} {_CPU_PERIOD_US}"),
        ]
    return [
        ("memory", "memory.limit_in_bytes", memory),
        ("memory", "memory.memsw.limit_in_bytes?", memory),
        ("pids", "pids.max", pids),
        ("cpu", "cpu.cfs_quota_us", str(quota or _V1_UNLIMITED)),
    ]


def oom_kills_in(events: str) -> int:
    """The oom_kill counter of memory.events (version 2) or memory.oom_control (version 1)."""
    for line in events.splitlines():
        key, _, value = line.partition(" ")
        if key == "oom_kill":
            return int(value)
    return 0


class SandboxCgroup:
    """The cgroups of one sandbox, one directory a controller (version 2: one in all)."""

    def __init__(self, version: int, directories: Mapping[str, Path]) -> None:
        self._version = version
        self._directories = dict(directories)
        self._limits: SandboxLimits | None = None
        self._events_fd = -1

    def create(self, limits: SandboxLimits) -> None:
        """Makes the directories. Raises BackendSetupError when they cannot be made."""
        for directory in dict.fromkeys(self._directories.values()):
            try:
                directory.mkdir()
            except OSError as error:
                raise BackendSetupError(f"cannot make cgroup {directory}: {error}") from error
        events = "memory.events" if self._version == 2 else "memory.oom_control"
        self._events_fd = os.open(self._directories["memory"] / events, os.O_RDONLY | os.O_CLOEXEC)
        self.set_limits(limits)

    def set_limits(self, limits: SandboxLimits) -> None:
        """Writes the limits, when they differ from those in force."""
        if limits == self._limits:
            return
        for controller, name, value in limit_writes(self._version, limits):
            directory = self._directories.get(controller)
            if directory is None:
                if limits.cpu_cores and controller == "cpu":
                    raise BackendSetupError("cpu_cores is asked for but there is no cpu controller")
                continue
            if (
                controller == "cpu"
                and not limits.cpu_cores
                and not (self._limits and self._limits.cpu_cores)
            ):
                continue
            try:
                (directory / name.rstrip("?")).write_text(value)
            except OSError as error:
                if name.endswith("?") and error.errno in (errno.ENOENT, errno.EACCES):
                    continue
                raise BackendSetupError(
                    f"cannot write {value} to {directory / name}: {error}"
                ) from error
        self._limits = limits

    def procs_files(self) -> list[str]:
        """Files that place a process here."""
        return [str(d / "cgroup.procs") for d in dict.fromkeys(self._directories.values())]

    def oom_kills(self) -> int:
        """Processes that the kernel killed here for memory, so far."""
        return oom_kills_in(os.pread(self._events_fd, 4096, 0).decode())

    def remove(self) -> bool:
        """Removes the directories; False when one still has a dying process in it."""
        if self._events_fd >= 0:
            os.close(self._events_fd)
            self._events_fd = -1
        removed = [_remove(d) for d in dict.fromkeys(self._directories.values())]
        return all(removed)


class CgroupTree:
    """The cgroups of one broker."""

    def __init__(self, plan: CgroupPlan) -> None:
        self._plan = plan
        # The cpu controller costs time at each start and stop: joined only where it is asked for.
        self._without_cpu = {k: v for k, v in plan.directories.items() if k != "cpu"}

    @classmethod
    def detect(cls, parent: str, name: str) -> CgroupTree:
        """Plans for this host. Raises BackendSetupError."""
        return cls(
            plan_cgroups(
                Path("/proc/mounts").read_text(),
                Path("/proc/self/cgroup").read_text(),
                lambda root: (root / "cgroup.controllers").read_text(),
                parent,
                name,
            )
        )

    @property
    def version(self) -> int:
        """1 or 2."""
        return self._plan.version

    def sweep(self) -> None:
        """Removes the cgroups that dead brokers left beside ours."""
        for directory in dict.fromkeys(self._plan.directories.values()):
            sweep(directory.parent)

    def create(self) -> None:
        """Sweeps what dead brokers left, then makes this broker's directories."""
        self.sweep()
        for directory in dict.fromkeys(self._plan.directories.values()):
            try:
                directory.mkdir()
            except OSError as error:
                raise BackendSetupError(
                    f"cannot make cgroup {directory}: {error}; run as root, give a writable "
                    "cgroup_parent, or set cgroups=false to run without limits"
                ) from error
        wanted = " ".join(f"+{controller}" for controller in self._plan.directories)
        for directory in self._plan.enable:
            try:
                (directory / "cgroup.subtree_control").write_text(wanted)
            except OSError as error:
                raise BackendSetupError(
                    f"cannot enable {wanted} in {directory}: {error}; a cgroup (other than the "
                    "root) that holds processes cannot pass controllers down: set cgroup_parent "
                    "to a delegated, empty cgroup, or cgroups=false to run without limits"
                ) from error

    def sandbox(self, sandbox_id: str, with_cpu: bool) -> SandboxCgroup:
        """The cgroups of one sandbox, not made yet."""
        directories = self._plan.directories if with_cpu else self._without_cpu
        return SandboxCgroup(
            self._plan.version, {k: directory / sandbox_id for k, directory in directories.items()}
        )

    def remove(self) -> None:
        """Removes this broker's directories and what is left below them."""
        for directory in dict.fromkeys(self._plan.directories.values()):
            _remove_tree(directory)


def sweep(parent: Path) -> None:
    """Removes the cgroups of dead brokers below parent."""
    for directory in parent.glob("swe_rl-*"):
        if owner_is_dead(directory.name, process_start_ticks):
            _remove_tree(directory)


def _remove_tree(directory: Path, timeout_s: float = 2.0) -> None:
    """Removes directory and its children, killing their members.

    The kernel gives a cgroup up only some time after its last member is gone: until then
    rmdir says that it is busy.
    """
    deadline = time.monotonic() + timeout_s
    while directory.is_dir():
        for child in [path for path in directory.iterdir() if path.is_dir()]:
            if not _remove(child):
                _kill_members(child)
        if _remove(directory) or time.monotonic() > deadline:
            return
        time.sleep(0.01)


def _kill_members(directory: Path) -> None:
    """Kills what a dead broker's sandbox still runs (its init dies with its parent anyway)."""
    try:
        pids = (directory / "cgroup.procs").read_text().split()
    except OSError:
        return
    for pid in pids:
        try:
            os.kill(int(pid), signal.SIGKILL)
        except ProcessLookupError:
            continue


def _remove(directory: Path) -> bool:
    try:
        directory.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
