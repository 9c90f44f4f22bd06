"""The other ranks of a trainer as processes on its own host.

Owner: the first rank, for as long as it serves. Each runs `trainer.server` with the same settings and
the environment that torchrun would give it. Where torchrun did start this process, there is nothing to
start. Invariants: none outlives the first rank; one that ends by itself ends the first rank too,
which goes on from its newest checkpoint when it is started again.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from proto.free_ports import free_ports

_log = logging.getLogger(__name__)
_END_S = 30.0
_GRACE_S = 3.0
_PARENT = "SWE_RL_TRAINER_PARENT"
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Asks the kernel to kill this rank when the process that `following` runs in is gone."""
    parent = os.environ.get(_PARENT)
    if parent is None:
        return
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != int(parent):  # it ended before the call above
        sys.exit(1)


@contextlib.contextmanager
def following(num_ranks: int, config_file: Path, timeout_s: float) -> Iterator[None]:
    """Starts ranks 1 and up, and makes this process rank 0; ends them afterwards.

    Args:
      num_ranks: the grid's.
      config_file: TrainerConfig as JSON.
      timeout_s: how long they may take to come to their end once the first rank has.

    Raises:
      ValueError: this process is one of another number of ranks.
    """
    given = os.environ.get("WORLD_SIZE")
    if given is not None:
        if int(given) != num_ranks:
            raise ValueError(
                f"WORLD_SIZE is {given}, and the grid has {num_ranks} ranks: start as many, or "
                "change trainer.grid"
            )
        yield
        return
    if num_ranks == 1:
        yield
        return
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_ports(1)[0]),
        "WORLD_SIZE": str(num_ranks),
        "RANK": "0",
        "LOCAL_RANK": "0",
    }
    command = [sys.executable, "-P", "-m", "trainer.server", "--config", str(config_file)]
    processes: list[subprocess.Popen[bytes]] = []
    ending = threading.Event()
    try:
        for rank in range(1, num_ranks):
            own = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            own[_PARENT] = str(os.getpid())
            processes.append(subprocess.Popen(command, env=own, stdin=subprocess.DEVNULL))
            watch = threading.Thread(
                target=_watch, args=(rank, processes[-1], ending), name=f"rank {rank}", daemon=True
            )
            watch.start()
        yield
    except BaseException:
        ending.set()
        for process in processes:
            process.kill()
        raise
    finally:
        ending.set()
        for process in processes:
            try:
                process.wait(min(timeout_s, _END_S))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _watch(rank: int, process: subprocess.Popen[bytes], ending: threading.Event) -> None:
    """Ends this process when a rank has ended by itself: nobody can train without it."""
    code = process.wait()
    # What ended it may be ending this rank as well, which has the better words for it.
    if not ending.wait(_GRACE_S):
        _log.error("rank %d ended with exit code %d, and so does the trainer", rank, code)
        os._exit(1)
