"""Finds and ends what a run started, grandchildren included, so that nothing outlives it.

Owner: the supervisor. The launching process becomes a child subreaper: an orphaned
grandchild is re-parented to it instead of to PID 1, stays visible here and is reaped here.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36


def become_subreaper() -> None:
    """Makes the calling process the parent of its orphaned descendants. Raises OSError."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def dying_with_parent(argv: Sequence[str]) -> list[str]:
    """argv such that the kernel sends the process SIGTERM when its parent dies.

    Done by util-linux's setpriv, which execs the command, so the process id stays. Not by a
    function between fork and exec: that makes fork run the hooks of gRPC's threads, which
    now and then never return.
    """
    return ["setpriv", "--pdeathsig", "TERM", "--", *argv]


def children_by_parent() -> dict[int, list[int]]:
    """Every process of the host by its parent, from /proc; processes that vanish are left out."""
    table: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # The command may hold blanks and brackets: fields are counted from its last ')'.
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        table.setdefault(int(fields[1]), []).append(int(entry.name))
    return table


def descendants(root: int) -> list[int]:
    """Process ids below root, parents before children."""
    table = children_by_parent()
    found: list[int] = []
    frontier = [root]
    while frontier:
        children = table.get(frontier.pop(0), [])
        found += children
        frontier += children
    return found


def kill_all(pids: Iterable[int]) -> None:
    """SIGKILL to each; those already gone are fine."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def end_descendants(spare: Iterable[int] = (), timeout_s: float = 10.0) -> list[int]:
    """Kills and reaps every descendant of this process but `spare`; returns those that remained.

    Call it last: it also reaps children that asyncio might be waiting for.
    """
    spared = set(spare)
    deadline = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        left = [pid for pid in descendants(os.getpid()) if pid not in spared]
        if not left or time.monotonic() > deadline:
            return left
        kill_all(left)
        time.sleep(0.02)
