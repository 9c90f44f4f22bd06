"""The lock that makes a trainer the only one on its run directory.

Owner: the trainer process, from before it reads the checkpoints until it has ended. The kernel
lets go of the lock when the process dies, however it dies. A trainer whose command was killed is
told to end and may still save its last checkpoint: the next one waits for it.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer.errors import BadRequestError

_POLL_S = 0.1


@contextmanager
def run_lock(run_dir: Path, wait_s: float) -> Iterator[None]:
    """Holds run_dir/checkpoints/.lock.

    Args: wait_s is how long another trainer may take to let go.

    Raises:
      BadRequestError: another trainer still has it.
    """
    folder = run_dir / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        give_up_s = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= give_up_s:
                    raise BadRequestError(
                        f"another trainer works on {folder} and did not end within {wait_s:g} s "
                        "(trainer.lock_wait_s): end it, or give this one another run_dir"
                    ) from None
                time.sleep(_POLL_S)
        yield
