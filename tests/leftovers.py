"""What a run may leave behind on its machine, counted before and after it.

Processes are counted by a marker in their command line or environment, everything else by what is
new on the host under names that are ours, less what a living process without the marker holds:
other runs may work on the same machine.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from dataclasses import dataclass, fields
from pathlib import Path

_OURS = re.compile(r"swe_rl|sglang|sgl_")
_OWNER = re.compile(r"swe_rl[a-z_-]*[-_]([0-9]+)(?=[-_]|$)")
"""The process id in names such as swe_rl-PID-..., swe_rl-launch-PID and swe_rl_ws_PID_..."""
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
    ours, others = _processes(marker)
    held = _held(others)
    in_others = frozenset(str(pid) for pid in others)

    def free(name: str) -> bool:
        """True when no other living process owns the name (by its pid) or has it open."""
        if in_others.intersection(_OWNER.findall(name)):
            return False
        return not any(path == name or path.startswith(name + "/") for path in held)

    return Footprint(
        processes=frozenset(ours),
        mounts=frozenset(line.split()[1] for line in _lines("/proc/mounts") if _OURS.search(line)),
        cgroups=frozenset(filter(free, _cgroups())),
        shared_memory=frozenset(filter(free, _paths(_SHM))),
        temporary=frozenset(filter(free, filter(_OURS.search, _paths(_TMP)))),
        listening=frozenset(
            port for port, inode in _listening() if f"socket:[{inode}]" not in held
        ),
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


def _processes(marker: str) -> tuple[list[str], list[int]]:
    """(descriptions of ours, pids of all others)."""
    wanted = marker.encode()
    ours: list[str] = []
    others: list[int] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            command = (entry / "cmdline").read_bytes()
            environment = (entry / "environ").read_bytes()
        except OSError:
            continue
        if int(entry.name) != os.getpid() and (wanted in command or wanted in environment):
            text = command.replace(b"\0", b" ").decode(errors="replace")
            ours.append(f"{entry.name} {text[:120]}")
        else:
            others.append(int(entry.name))
    return ours, others


def _held(pids: list[int]) -> set[str]:
    """Paths and sockets that processes have open or mapped."""
    held: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    held.add(os.readlink(link))
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_text()
            held.update(re.findall(r"/dev/shm/\S+", maps))
    return held


def _cgroups() -> list[str]:
    found = []
    for folder, names, _ in os.walk(_CGROUP_ROOT):
        found += [os.path.join(folder, name) for name in names if _OURS.search(name)]
    return found


def _paths(folder: Path) -> list[str]:
    return [str(folder / name) for name in os.listdir(folder)] if folder.is_dir() else []


def _listening() -> list[tuple[int, str]]:
    """(local TCP port, inode) in state LISTEN (0A)."""
    ports = []
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in _lines(path)[1:]:
            columns = line.split()
            if columns[3] == "0A":
                ports.append((int(columns[1].rpartition(":")[2], 16), columns[9]))
    return ports


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
