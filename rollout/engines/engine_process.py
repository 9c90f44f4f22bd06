"""One SGLang server as a child process: command line, log, private temporary folder, end.

Owner: EnginePool. Invariants: the server and all it spawns form one process group, which dies
with this process (the launcher asks the kernel for that) and is gone after `stop`; whatever
it leaves on disk lies in its temporary folder, which `stop` removes, with what is in
/dev/shm whose owner was killed before it could. A folder whose owner
was killed is recognised by its free lock, and removed by the next `sweep_folders`.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import fcntl
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from proto.free_ports import free_ports
from rollout.engines.config import EngineConfig
from rollout.engines.cpu_launcher import SEMAPHORE_PREFIX

_FOLDER_PREFIX = "swe_rl_engine_"
# Unix sockets lie in the folder, and their paths may have 107 characters.
_FOLDER_ROOT = Path("/tmp")
_GROUP_END_S = 2.0


def engine_command(config: EngineConfig, port: int) -> list[str]:
    """The command line of a server that listens on loopback at `port`."""
    return [
        str(config.python),
        "-P",
        "-m",
        config.launcher,
        f"--model-path={config.model_path}",
        f"--load-format={config.load_format}",
        "--host=127.0.0.1",
        f"--port={port}",
        f"--dtype={config.dtype}",
        f"--tp-size={config.tensor_parallel}",
        f"--context-length={config.context_length}",
        f"--max-total-tokens={config.max_total_tokens}",
        f"--max-running-requests={config.max_running_requests}",
        f"--custom-weight-loader={config.weight_loader}",
        "--skip-tokenizer-init",  # ids in, ids out: text is the gateway's
        "--enable-metrics",
        "--log-level-http=warning",
        *(["--enable-return-routed-experts"] if config.routed_experts else []),
        *config.extra_flags,
    ]


def engine_environment(
    config: EngineConfig, inherited: Mapping[str, str], folder: Path
) -> dict[str, str]:
    """The environment of a server: ours, plus what keeps it offline, quiet and exact."""
    return {
        **inherited,
        "TMPDIR": str(folder),
        "HOME": str(folder),
        SEMAPHORE_PREFIX: f"/{folder.name}",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": str(config.num_threads),
        # A health check that generates a token would be counted as a request.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        # Otherwise a dead scheduler leaves its server hanging for 5 s more.
        "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
    }


class TemporaryFolder:
    """A folder in /tmp, locked for as long as its owner lives."""

    def __init__(self) -> None:
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX, dir=_FOLDER_ROOT))
            self._lock: IO[str] = (self.path / "lock").open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            if (self.path / "lock").exists():  # a sweep may have been faster than the lock
                return
            self._lock.close()

    def close(self) -> None:
        """Removes the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def sweep_folders() -> int:
    """Removes the folders of owners that were killed, with what their engines left in /dev/shm;
    returns how many.
    """
    num_removed = 0
    for path in _FOLDER_ROOT.glob(f"{_FOLDER_PREFIX}*"):
        try:
            with (path / "lock").open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for semaphore in left_shared_memory(path):
                    semaphore.unlink(missing_ok=True)
                shutil.rmtree(path, ignore_errors=True)
                num_removed += 1
        except (FileNotFoundError, BlockingIOError, PermissionError):
            continue  # being made or removed now, in use, or another user's
    return num_removed


class EngineProcess:
    """A running server. Make it with `start`, end it with `stop`."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        port: int,
        folder: TemporaryFolder,
        log_path: Path,
    ) -> None:
        self.port = port
        self.log_path = log_path
        self.ended = asyncio.Event()
        self._process = process
        self._folder = folder
        self._shared_memory: set[Path] = set()
        self._waiter = asyncio.create_task(self._wait())

    @classmethod
    async def start(cls, config: EngineConfig, port: int, log_path: Path) -> EngineProcess:
        """Spawns a server on `port` (0: a free one); its output is appended to `log_path`.

        Raises OSError when the interpreter or the log cannot be opened.
        """
        port = port or free_ports(1)[0]
        folder = TemporaryFolder()
        try:
            with log_path.open("ab") as log:
                process = await asyncio.create_subprocess_exec(
                    *engine_command(config, port),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=engine_environment(config, os.environ, folder.path),
                    start_new_session=True,
                )
        except OSError:
            folder.close()
            raise
        return cls(process, port, folder, log_path)

    @property
    def pid(self) -> int:
        """Process id, which is also that of its group."""
        return self._process.pid

    def describe_end(self, num_lines: int) -> str:
        """How the process ended, with the last lines of its log."""
        code = self._process.returncode
        how = f"killed by signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        try:
            with self.log_path.open(errors="replace") as log:
                tail = "".join(collections.deque(log, maxlen=num_lines))
        except OSError as error:
            tail = f"(log unreadable: {error})"
        return f"{how}; last lines of {self.log_path}:\n{tail}"

    async def stop(self, timeout_s: float) -> None:
        """Ends the whole group: SIGTERM, then SIGKILL after `timeout_s`. Safe to repeat."""
        self.note_shared_memory()
        if timeout_s > 0 and not self.ended.is_set():
            self._signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.ended.wait(), timeout_s)
        self._signal(signal.SIGKILL)
        await self._waiter
        await self._wait_for_group()
        for path in self._shared_memory | left_shared_memory(self._folder.path):
            path.unlink(missing_ok=True)
        self._folder.close()

    def note_shared_memory(self) -> None:
        """Remembers the group's semaphores and queues of ranks, which outlive a SIGKILL."""
        for name in os.listdir("/proc"):
            with contextlib.suppress(ValueError, OSError):  # no process, or it ended meanwhile
                if os.getpgid(int(name)) == self.pid:
                    maps = Path("/proc", name, "maps").read_text()
                    self._shared_memory.update(
                        Path(path) for path in re.findall(r"/dev/shm/(?:sem\.|sgl_shm_)\S+", maps)
                    )

    async def _wait(self) -> None:
        await self._process.wait()
        self.ended.set()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # the group is gone
            os.killpg(self.pid, number)

    async def _wait_for_group(self) -> None:
        """Orphans of the group end a moment after their parent."""
        deadline = asyncio.get_running_loop().time() + _GROUP_END_S
        while asyncio.get_running_loop().time() < deadline:
            try:
                os.killpg(self.pid, 0)
            except (ProcessLookupError, PermissionError):
                return
            await asyncio.sleep(0.02)


def left_shared_memory(folder: Path) -> set[Path]:
    """Semaphores of multiprocessing, and queues between ranks where cpu_shim names them, that the
    engine with this folder left behind.

    Their name is the only sign of whose they are: any process of the machine may have some, and
    /proc shows only the processes of one's own namespace.
    """
    places = (f"sem.{folder.name}-*", f"sgl_shm_{folder.name}-*")
    return {path for place in places for path in Path("/dev/shm").glob(place)}
