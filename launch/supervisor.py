"""Starts the processes of a run, watches them, restarts them and takes them down.

Owner of every local process (engines belong to the rollout manager, sandboxes to the broker):

    start(spec) --spawn--> process --ready()?--> watched --exit--> restart within the policy
                              |                                       `--> failure: the run ends
                              `-- stdout+stderr --> logs/NAME.log
    close(): SIGTERM in reverse order of start, SIGKILL after stop_timeout_s, then every
             descendant that is left.

Nothing here blocks the loop; every wait has a deadline. A process that fails names its
reason: the last `error:` line of its log, else its last lines.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeVar

from launch import descendants
from launch.errors import ProcessFailed

T = TypeVar("T")


@dataclass(frozen=True)
class RestartPolicy:
    """How often a process may be started again after it exited by itself."""

    max_restarts: int = 3
    """Restarts allowed within window_s; 0: the first exit is a failure."""
    window_s: float = 600.0
    """Restarts older than this no longer count."""
    backoff_s: float = 0.5
    """Wait before the n-th restart: backoff_s * 2 ** (n - 1)."""


@dataclass(frozen=True)
class ProcessSpec:
    """One process: what to run, when it counts as up, and how patient to be."""

    name: str
    argv: list[str]
    log_path: Path
    ready: Callable[[], Awaitable[bool]]
    """Polled until true; must have a deadline of its own."""
    env: dict[str, str] = field(default_factory=dict)
    start_timeout_s: float = 120.0
    stop_timeout_s: float = 15.0
    restart: RestartPolicy = RestartPolicy()


class _Watched:
    """A process that was started, and the task that watches it."""

    def __init__(self, spec: ProcessSpec) -> None:
        self.spec = spec
        self.process: asyncio.subprocess.Process | None = None
        self.watcher: asyncio.Task[None] | None = None
        self.restarts: list[float] = []
        self.log: IO[bytes] | None = None


class Supervisor:
    """Owns local processes; create it inside a running loop and close() it."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        poll_interval_s: float = 0.1,
        notify: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Args: notify is told, in one line, of each process that died and is started again."""
        self._notify = notify
        self._clock = clock
        self._poll_interval_s = poll_interval_s
        self._watched: dict[str, _Watched] = {}
        self._failure: asyncio.Future[ProcessFailed] = asyncio.get_running_loop().create_future()
        self._closing = False
        self.exit_codes: dict[str, int] = {}
        """How processes that were taken down had ended; negative: by that signal."""
        descendants.become_subreaper()

    async def start(self, spec: ProcessSpec) -> None:
        """Spawns spec and returns once it is ready. Raises ProcessFailed with the reason."""
        watched = _Watched(spec)
        self._watched[spec.name] = watched
        await self._spawn(watched)
        try:
            await self._wait_ready(watched)
        except ProcessFailed:
            await self._stop(watched)
            raise
        watched.watcher = asyncio.create_task(self._watch(watched), name=f"watch {spec.name}")

    async def guard(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs work until it ends or a process fails for good; then raises ProcessFailed."""
        task = asyncio.create_task(work)
        waited: set[asyncio.Future[Any]] = {task, self._failure}
        try:
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if self._failure.done() and not task.done():
                raise self._failure.result()
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    def restarts(self) -> dict[str, int]:
        """Restarts so far, by process."""
        return {name: len(watched.restarts) for name, watched in self._watched.items()}

    def pid(self, name: str) -> int | None:
        """Process id of a running process; None when it is not running."""
        process = self._watched[name].process
        return process.pid if process is not None and process.returncode is None else None

    async def stop(self, name: str) -> None:
        """Stops one process and forgets it."""
        await self._stop(self._watched.pop(name))

    async def close(self) -> None:
        """Takes everything down, in reverse order of start. Never raises."""
        self._closing = True
        for watched in reversed(list(self._watched.values())):
            await self._stop(watched)
        self._watched.clear()
        descendants.end_descendants()

    async def _spawn(self, watched: _Watched) -> None:
        spec = watched.spec
        if watched.log is not None:
            watched.log.close()
        try:
            watched.log = spec.log_path.open("ab")
            watched.process = await asyncio.create_subprocess_exec(
                *descendants.dying_with_parent(spec.argv),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=watched.log,
                stderr=watched.log,
                env={**os.environ, **spec.env},
                start_new_session=True,
            )
        except OSError as error:
            # A log that cannot be opened, no memory for a process, no such program.
            raise ProcessFailed(f"{spec.name} cannot be started: {error}") from error

    async def _wait_ready(self, watched: _Watched) -> None:
        spec, process = watched.spec, watched.process
        assert process is not None
        deadline = self._clock() + spec.start_timeout_s
        while True:
            if process.returncode is not None:
                raise ProcessFailed(
                    f"{spec.name} did not start: {_reason(spec, process.returncode)}"
                )
            if await spec.ready():
                return
            if self._clock() > deadline:
                raise ProcessFailed(
                    f"{spec.name} was not ready within {spec.start_timeout_s:.0f} s; see {spec.log_path}"
                )
            await asyncio.sleep(self._poll_interval_s)

    async def _watch(self, watched: _Watched) -> None:
        spec = watched.spec
        while True:
            assert watched.process is not None
            code = await watched.process.wait()
            if self._closing:
                return
            reason = _reason(spec, code)
            now = self._clock()
            recent = [t for t in watched.restarts if now - t < spec.restart.window_s]
            if len(recent) >= spec.restart.max_restarts:
                self._fail(f"{spec.name} died: {reason}")
                return
            watched.restarts.append(now)
            self._notify(f"{spec.name} died and is started again: {reason}")
            await asyncio.sleep(spec.restart.backoff_s * 2 ** len(recent))
            try:
                await self._spawn(watched)
                await self._wait_ready(watched)
            except ProcessFailed as failure:
                self._fail(f"{failure} (restarted after: {reason})")
                return

    def _fail(self, message: str) -> None:
        if not self._failure.done():
            self._failure.set_result(ProcessFailed(message))

    async def _stop(self, watched: _Watched) -> None:
        if watched.watcher is not None:
            watched.watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watched.watcher
        process = watched.process
        if process is not None:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.terminate()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), watched.spec.stop_timeout_s)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            if process.returncode is None:
                await process.wait()
            self.exit_codes[watched.spec.name] = process.returncode or 0
        if watched.log is not None:
            watched.log.close()
            watched.log = None


def _reason(spec: ProcessSpec, code: int) -> str:
    """Why a process ended, from its exit code and its log."""
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    lines = _tail(spec.log_path)
    for line in reversed(lines):
        if line.startswith("error: "):
            return f"{line[len('error: ') :]} ({how}; log: {spec.log_path})"
    last = lines[-1] if lines else "its log is empty"
    return f"{last} ({how}; log: {spec.log_path})"


def _tail(path: Path, max_bytes: int = 16_384) -> list[str]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - max_bytes))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [line.strip() for line in text.splitlines() if line.strip()]
