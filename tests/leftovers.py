"""What a run may leave behind on its machine, counted before and after it.

Processes are counted by the run's runfiles or run directory in their command line or
environment, everything else by what is new on the host under names that are ours.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass, fields
from pathlib import Path

_OURS = re.compile(r"swe_rl|sglang|sgl_")
_CGROUP_ROOT = Path("/sys/fs/cgroup")
_SHM = Path("/dev/shm")
_TMP = Path("/tmp")


@dataclass(frozen=True)
class Footprint:
    """Names of everything of ours on this machine."""

    processes: frozenset[str]
    mounts: frozenset[str]
    cgroups: frozenset[str]
    shared_memory: frozenset[str]
    temporary: frozenset[str]
    listening: frozenset[int]

    def added_since(self, before: Footprint) -> dict[str, list[str]]:
        """Kind -> what is here now and was not then; empty when nothing is left."""
        found = {}
        for field in fields(self):
            new = getattr(self, field.name) - getattr(before, field.name)
            if new:
                found[field.name] = sorted(map(str, new))
        return found


def footprint(marker: str) -> Footprint:
    """Takes stock. `marker` is a string in the environment or arguments of the run's processes."""
    return Footprint(
        processes=frozenset(_processes(marker)),
        mounts=frozenset(line.split()[1] for line in _lines("/proc/mounts") if _OURS.search(line)),
        cgroups=frozenset(_cgroups()),
        shared_memory=frozenset(_names(_SHM)),
        temporary=frozenset(name for name in _names(_TMP) if _OURS.search(name)),
        listening=frozenset(_listening()),
    )


def wait_until_clean(
    before: Footprint, marker: str, timeout_s: float = 10.0
) -> dict[str, list[str]]:
    """What is left after at most timeout_s: the kernel frees namespaces a little later."""
    deadline = time.monotonic() + timeout_s
    while True:
        left = footprint(marker).added_since(before)
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


def _processes(marker: str) -> list[str]:
    wanted, found = marker.encode(), []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            command = (entry / "cmdline").read_bytes()
            environment = (entry / "environ").read_bytes()
        except OSError:
            continue
        if wanted in command or wanted in environment:
            text = command.replace(b"\0", b" ").decode(errors="replace")
            found.append(f"{entry.name} {text[:120]}")
    return found


def _cgroups() -> list[str]:
    found = []
    for folder, names, _ in os.walk(_CGROUP_ROOT):
        found += [os.path.join(folder, name) for name in names if _OURS.search(name)]
    return found


def _names(folder: Path) -> list[str]:
    return os.listdir(folder) if folder.is_dir() else []


def _listening() -> list[int]:
    """Local TCP ports in state LISTEN (0A)."""
    ports = []
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in _lines(path)[1:]:
            columns = line.split()
            if columns[3] == "0A":
                ports.append(int(columns[1].rpartition(":")[2], 16))
    return ports


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
