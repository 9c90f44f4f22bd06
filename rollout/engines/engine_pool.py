"""The inference engines of one RolloutManager: started, watched, restarted, ended.

Purpose: owns every engine's process and the record of its state. Owner: RolloutManager, on
whose event loop all of this runs. One task an engine:

    spawn -> starting -> healthy: stale (meaningless weights) -> [window] -> serving <-> updating
      ^                                                                         |
      `---------- restart within the bound <- process ended | unresponsive <----'

UpdateWindows moves engines between stale, updating and serving; this module alone moves them to
starting and failed. Invariants: an engine that was (re)started serves nothing until a window
closed over it; `incarnation` grows with each process, so that a decision taken about an older
process is never applied to a newer one; a failed engine's `detail` quotes its log.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import aiohttp

from rollout.engines.config import EngineConfig
from rollout.engines.engine_process import EngineProcess, sweep_folders
from rollout.engines.errors import EngineError
from rollout.engines.sglang_client import EngineLoad, SGLangClient, wait_until_healthy
from rollout.errors import NotFoundError

logger = logging.getLogger(__name__)

EngineState = Literal["starting", "serving", "updating", "stale", "failed"]


@dataclass(slots=True)
class Engine:
    """What the manager knows of one engine. Only this package writes it."""

    name: str
    token_budget: int
    url: str = ""
    state: EngineState = "starting"
    weight_version: int = 0
    """What it serves; 0: the weights that it started with."""
    kv_usage: float = 0.0
    num_running: int = 0
    num_requests: int = 0
    """Finished generate calls, over all its processes."""
    num_generated_tokens: int = 0
    num_restarts: int = 0
    detail: str = ""
    """Why it last restarted or failed; empty: it never did."""
    incarnation: int = 0


@dataclass(slots=True)
class _Runner:
    """The moving parts behind one Engine."""

    engine: Engine
    port: int
    client: SGLangClient | None = None
    task: asyncio.Task[None] | None = None
    restart_asked: asyncio.Event = field(default_factory=asyncio.Event)
    restart_reason: str = ""
    restarts_at: deque[float] = field(default_factory=deque)
    past_requests: int = 0
    past_tokens: int = 0


class EnginePool:
    """All engines of a run. `start`, then watch `engines` and `on_change`; `close` at the end."""

    def __init__(
        self, config: EngineConfig, run_dir: Path, log_dir: Path, clock: Callable[[], float]
    ) -> None:
        """`clock` counts seconds, and bounds restarts and silence; `run_dir` is not written."""
        self.engines: dict[str, Engine] = {}
        self.on_change: Callable[[Engine], None] = lambda _engine: None
        self.control_lock = asyncio.Lock()
        """Held by whoever pauses and resumes engines: one window or flush at a time."""
        self._config = config
        self._run_dir = run_dir
        self._log_dir = log_dir
        self._clock = clock
        self._runners: dict[str, _Runner] = {}
        self._session: aiohttp.ClientSession | None = None
        self._closing = False
        ports = config.ports or (0,) * config.num_engines
        for index, port in enumerate(ports):
            engine = Engine(f"engine{index}", token_budget=config.max_total_tokens)
            self.engines[engine.name] = engine
            self._runners[engine.name] = _Runner(engine, port)

    async def start(self) -> None:
        """Begins to start every engine and returns at once."""
        self._log_dir.mkdir(parents=True, exist_ok=True)
        if num_removed := sweep_folders():
            logger.info("removed %d folders of engines whose owner was killed", num_removed)
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        for runner in self._runners.values():
            runner.task = asyncio.create_task(self._run(runner))

    async def close(self) -> None:
        """Ends every engine. No process, folder or task of the pool is left."""
        self._closing = True
        tasks = [runner.task for runner in self._runners.values() if runner.task]
        for runner in self._runners.values():
            runner.restart_asked.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    def client(self, name: str) -> SGLangClient:
        """The client of an engine's present process. Raises NotFoundError when it has none."""
        runner = self._runner(name)
        if runner.client is None:
            raise NotFoundError(
                f"engine {name} has no running server (state {runner.engine.state})"
            )
        return runner.client

    def set_state(
        self, name: str, state: EngineState, incarnation: int, weight_version: int | None = None
    ) -> None:
        """Changes an engine's state unless its process was replaced since `incarnation`."""
        engine = self._runner(name).engine
        if engine.incarnation != incarnation or engine.state in ("starting", "failed"):
            return
        engine.state = state
        if weight_version is not None:
            engine.weight_version = weight_version
        self.on_change(engine)

    async def report_failure(self, name: str, detail: str) -> None:
        """Tells that a call to an engine failed; restarts it if it does not answer now."""
        runner = self._runner(name)
        if runner.client is None or runner.engine.state in ("starting", "failed"):
            return
        try:
            await runner.client.health(timeout_s=5.0)
        except EngineError as error:
            await self.restart(name, f"{detail}; then {error}")

    async def restart(self, name: str, reason: str) -> None:
        """Kills an engine's process; a new one starts while the bound on restarts allows."""
        runner = self._runner(name)
        if runner.engine.state in ("starting", "failed"):
            return
        runner.restart_reason = reason
        runner.engine.detail = reason
        runner.engine.weight_version = 0
        self._enter(runner, "starting")
        runner.restart_asked.set()

    async def flush_cache(self) -> None:
        """Empties the KV cache of every engine outside a window; requests are prefilled again.

        Raises EngineError when an engine refused; the others are flushed all the same.
        """
        async with self.control_lock:
            live = [e.name for e in self.engines.values() if e.state in ("serving", "stale")]
            results = await asyncio.gather(
                *(self._flush(self.client(name)) for name in live), return_exceptions=True
            )
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _flush(self, client: SGLangClient) -> None:
        await client.pause("retract")
        try:
            await client.flush_cache()
        finally:
            await client.resume()

    def _runner(self, name: str) -> _Runner:
        try:
            return self._runners[name]
        except KeyError:
            raise NotFoundError(
                f"no engine is named {name}: there are {sorted(self._runners)}"
            ) from None

    def _enter(self, runner: _Runner, state: EngineState) -> None:
        runner.engine.state = state
        self.on_change(runner.engine)

    async def _run(self, runner: _Runner) -> None:
        """An engine's life: one process after another until closed or out of restarts."""
        engine = runner.engine
        while not self._closing:
            runner.restart_asked.clear()
            engine.incarnation += 1
            engine.weight_version = 0
            self._enter(runner, "starting")
            reason = await self._run_process(runner)
            runner.client = None
            runner.past_requests = engine.num_requests
            runner.past_tokens = engine.num_generated_tokens
            engine.num_running, engine.kv_usage = 0, 0.0
            if self._closing:
                return
            engine.detail = reason
            logger.warning("engine %s ended: %s", engine.name, reason)
            if not self._take_restart(runner):
                engine.detail = (
                    f"gave up after {self._config.max_restarts} restarts in "
                    f"{self._config.restart_window_s} s (engines.max_restarts): {reason}"
                )
                self._enter(runner, "failed")
                return
            engine.num_restarts += 1

    def _take_restart(self, runner: _Runner) -> bool:
        now_s = self._clock()
        while runner.restarts_at and now_s - runner.restarts_at[0] > self._config.restart_window_s:
            runner.restarts_at.popleft()
        if len(runner.restarts_at) >= self._config.max_restarts:
            return False
        runner.restarts_at.append(now_s)
        return True

    async def _run_process(self, runner: _Runner) -> str:
        """Runs one process to its end; returns why it ended."""
        engine = runner.engine
        log_path = self._log_dir / f"{engine.name}.log"
        try:
            process = await EngineProcess.start(self._config, runner.port, log_path)
        except OSError as error:
            return f"cannot start {self._config.python}: {error}"
        reason = ""
        try:
            engine.url = f"http://127.0.0.1:{process.port}"
            assert self._session is not None
            runner.client = SGLangClient(
                engine.name, engine.url, self._config.control_timeout_s, self._session
            )
            logger.info("engine %s starts at %s, pid %d", engine.name, engine.url, process.pid)
            reason = await self._watch(runner, runner.client, process)
        finally:
            timeout_s = self._config.stop_timeout_s if self._closing else 0.0
            await process.stop(timeout_s)
        return reason or process.describe_end(self._config.num_log_lines)

    async def _watch(self, runner: _Runner, client: SGLangClient, process: EngineProcess) -> str:
        """Waits for health, then polls; returns why to end the process ('': it ended itself)."""
        stop = asyncio.ensure_future(_first(process.ended, runner.restart_asked))
        healthy = asyncio.ensure_future(self._come_up(client, process))
        try:
            await asyncio.wait({stop, healthy}, return_when=asyncio.FIRST_COMPLETED)
            if not healthy.done() or process.ended.is_set():
                return runner.restart_reason if not process.ended.is_set() else ""
            if error := healthy.exception():
                return str(error)
            process.note_shared_memory()
            self._enter(runner, "stale")
            answered_s = self._clock()
            while not stop.done():
                if await self._poll(runner, client):
                    answered_s = self._clock()
                silent_s = self._clock() - answered_s
                if silent_s > self._silence_limit_s(runner.engine):
                    return f"answered no load poll for {silent_s:.1f} s (engines.health_timeout_s)"
                await asyncio.wait({stop}, timeout=self._config.poll_interval_s)
            return "" if process.ended.is_set() else runner.restart_reason
        finally:
            for task in (stop, healthy):
                task.cancel()
            await asyncio.gather(stop, healthy, return_exceptions=True)

    async def _come_up(self, client: SGLangClient, process: EngineProcess) -> None:
        await wait_until_healthy(client, process.ended, self._config.start_timeout_s)
        try:
            # Each update and flush collects garbage, over the whole of SGLang unless it is frozen;
            # the server would do so by itself after the warm-up that it is not given.
            await client.freeze_gc()
        except EngineError as error:
            logger.warning("%s; its weight updates take longer", error)

    def _silence_limit_s(self, engine: Engine) -> float:
        if engine.state == "updating":
            return max(self._config.window_timeout_s, self._config.health_timeout_s)
        return self._config.health_timeout_s

    async def _poll(self, runner: _Runner, client: SGLangClient) -> bool:
        """Reads the engine's figures; False when it did not answer."""
        try:
            load: EngineLoad = await client.load(timeout_s=min(5.0, self._config.health_timeout_s))
        except EngineError:
            return False
        engine = runner.engine
        engine.kv_usage = load.kv_usage
        engine.num_running = load.num_running
        engine.num_requests = runner.past_requests + load.num_requests
        engine.num_generated_tokens = runner.past_tokens + load.num_generated_tokens
        return True


async def _first(*events: asyncio.Event) -> None:
    """Returns when one of the events is set."""
    tasks = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
