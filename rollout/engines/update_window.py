"""The update window: the one interval in which engines take new weights.

Purpose: pauses engines, lets one sender write weights, and either commits the new
weight_version or puts each engine back into a known state. Owner: RolloutManager. Phases, each
saved through WindowStore before its calls go out:

    pause -> begin -> buckets (the sender's) -> commit -> closed

In `commit`, an engine by what happened to it:
  * complete: end, flush the KV cache under the policy `flush`, set weight_version (the last call
    that changes anything), continue. A failure on the way: restart.
  * not complete and no bucket sent: end, continue with the old version. A failure: restart.
  * not complete and a bucket sent, or not known: restart; its weights are neither old nor new.
  * its process was replaced meanwhile: nothing; it is stale already.

Invariants: one window at a time; an epoch never repeats, and a close that names another epoch
than the open one is fenced; a window whose sender fell silent is ended after window_timeout_s;
the engines of a manager that died died with it, so a window found open in the store at
start is only marked closed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from rollout.engines.config import EngineConfig
from rollout.engines.engine_pool import Engine, EnginePool
from rollout.engines.errors import EngineError
from rollout.errors import BadRequestError, FencedError, RolloutError, UnavailableError

logger = logging.getLogger(__name__)


class WindowStore(Protocol):
    """Where windows outlive the manager."""

    def save_window(
        self, epoch: int, weight_version: int, phase: str, engines: dict[str, str]
    ) -> None:
        """Saves a window's phase and each engine's; durable on return."""

    def load_open_window(self) -> object | None:
        """The window that is not closed: its epoch, weight_version, phase and engines."""

    def next_window_epoch(self) -> int:
        """A number above every one given before, over restarts too."""


@dataclass(frozen=True, slots=True)
class WindowTarget:
    """An engine that waits for buckets."""

    engine: str
    url: str
    weight_version: int
    """What it served until now."""
    tensor_parallel: int = 1
    """Ranks, each of which receives for itself."""


@dataclass(frozen=True, slots=True)
class OpenedWindow:
    """What a sender needs."""

    epoch: int
    targets: tuple[WindowTarget, ...]


@dataclass(frozen=True, slots=True)
class TransferResult:
    """What a sender says of one engine."""

    engine: str
    complete: bool
    """Every bucket was acknowledged, and the receiver verified the whole."""
    touched: bool
    """Its first bucket was sent."""
    error: str = ""


@dataclass(frozen=True, slots=True)
class ClosedWindow:
    """How a window ended."""

    epoch: int
    engines_serving: tuple[str, ...]
    """At the new version."""
    engines_restarting: tuple[str, ...]
    paused_s: float
    """First pause to last continue."""


@dataclass(slots=True)
class _Window:
    epoch: int
    weight_version: int
    phase: str
    started_s: float
    incarnations: dict[str, int] = field(default_factory=dict)
    old: dict[str, tuple[str, int]] = field(default_factory=dict)
    """State and weight_version before the window."""
    engines: dict[str, str] = field(default_factory=dict)
    """Each engine's phase."""
    watchdog: asyncio.Task[None] | None = None


class UpdateWindows:
    """Opens and closes update windows over the engines of a pool."""

    def __init__(
        self,
        pool: EnginePool,
        store: WindowStore,
        config: EngineConfig,
        clock: Callable[[], float],
    ) -> None:
        """`clock` counts seconds and times the pauses; deadlines are the event loop's."""
        self._pool = pool
        self._store = store
        self._config = config
        self._clock = clock
        self._flushes = config.kv_policy == "flush"
        self._window: _Window | None = None
        self._closed: ClosedWindow | None = None
        self._any_published = False
        self._recover()

    @property
    def phase(self) -> str:
        """The open window's phase; empty: none is open."""
        return self._window.phase if self._window else ""

    async def open(
        self, weight_version: int, plan_digest: str, num_tensors: int, total_bytes: int
    ) -> OpenedWindow:
        """Pauses every live engine and begins an update on each.

        Waits while no engine is live, and before the first publication for all that start. A
        window that is still open is ended first, as one whose sender is gone.

        Raises BadRequestError for an impossible plan, UnavailableError when no engine could be
        made ready.
        """
        if len(plan_digest) != 64 or num_tensors <= 0 or total_bytes <= 0:
            raise BadRequestError(
                f"update window for weight_version {weight_version}: wanted a SHA-256 plan digest "
                f"in hex and a plan with tensors, got digest of {len(plan_digest)} characters, "
                f"{num_tensors} tensors, {total_bytes} bytes"
            )
        async with self._pool.control_lock:
            await self._end_open_window()
        await self._wait_for_engines()
        async with self._pool.control_lock:
            await self._end_open_window()
            window = _Window(
                epoch=self._store.next_window_epoch(),
                weight_version=weight_version,
                phase="",
                started_s=self._clock(),
            )
            self._window = window
            live = self._live()
            for engine in live:
                window.incarnations[engine.name] = engine.incarnation
                window.old[engine.name] = (engine.state, engine.weight_version)
                window.engines[engine.name] = "pausing"
            self._enter(window, "pause")
            for engine in live:
                self._pool.set_state(engine.name, "updating", engine.incarnation)
            await self._each(window, list(window.engines), self._pause, "paused")
            self._enter(window, "begin")
            await self._each(window, self._in_phase(window, "paused"), self._begin, "begun")
            begun = self._in_phase(window, "begun")
            if not begun:
                await self._end(window, [], "no engine could begin")
                raise UnavailableError(
                    f"update window {window.epoch} for weight_version {weight_version}: no engine "
                    f"could begin an update (live: {[e.name for e in live]}); retry when one is up"
                )
            self._enter(window, "buckets")
            window.watchdog = asyncio.create_task(self._watch(window))
            return OpenedWindow(
                epoch=window.epoch,
                targets=tuple(
                    WindowTarget(
                        name,
                        self._pool.engines[name].url,
                        window.old[name][1],
                        self._config.tensor_parallel,
                    )
                    for name in begun
                ),
            )

    async def close(
        self, epoch: int, weight_version: int, results: Iterable[TransferResult]
    ) -> ClosedWindow:
        """Ends the window of `epoch`; an engine without a result counts as touched.

        Idempotent for the last closed epoch. Raises FencedError for any other that is not open,
        BadRequestError when `weight_version` is not the window's.
        """
        async with self._pool.control_lock:
            if self._closed is not None and self._closed.epoch == epoch:
                return self._closed
            window = self._window
            if window is None or window.epoch != epoch:
                raise FencedError(
                    f"update window {epoch} is not open (open: "
                    f"{window.epoch if window else 'none'}): it timed out or a newer one "
                    "replaced it; publish again in a new window"
                )
            if window.weight_version != weight_version:
                raise BadRequestError(
                    f"update window {epoch} is for weight_version {window.weight_version}, "
                    f"got {weight_version}"
                )
            return await self._end(window, list(results), "")

    def _recover(self) -> None:
        left: object | None = self._store.load_open_window()
        if left is None:
            return
        epoch = int(getattr(left, "epoch"))  # noqa: B009 (the store's own record type)
        version = int(getattr(left, "weight_version"))  # noqa: B009
        logger.warning("update window %d was open when the manager died: closed", epoch)
        self._store.save_window(epoch, version, "closed", {})

    async def _end_open_window(self) -> None:
        if self._window is not None:
            await self._end(self._window, [], "a newer window was opened")

    def _live(self) -> list[Engine]:
        return [e for e in self._pool.engines.values() if e.state in ("serving", "stale")]

    async def _wait_for_engines(self) -> None:
        deadline = asyncio.get_running_loop().time() + self._config.start_timeout_s
        while True:
            states = [engine.state for engine in self._pool.engines.values()]
            is_live = any(state not in ("starting", "failed") for state in states)
            if "starting" not in states or (is_live and self._any_published):
                break
            if asyncio.get_running_loop().time() >= deadline:
                break
            await asyncio.sleep(0.05)

    async def _watch(self, window: _Window) -> None:
        await asyncio.sleep(self._config.window_timeout_s)
        async with self._pool.control_lock:
            if self._window is window:
                window.watchdog = None
                await self._end(
                    window,
                    [],
                    f"its sender was silent for {self._config.window_timeout_s} s "
                    "(engines.window_timeout_s)",
                )

    def _enter(self, window: _Window, phase: str) -> None:
        window.phase = phase
        self._store.save_window(window.epoch, window.weight_version, phase, dict(window.engines))

    @staticmethod
    def _in_phase(window: _Window, phase: str) -> list[str]:
        return [name for name, at in window.engines.items() if at == phase]

    async def _each(
        self,
        window: _Window,
        names: Iterable[str],
        step: Callable[[_Window, str], Awaitable[None]],
        done: str,
    ) -> None:
        """Runs `step` on engines at once; one that fails is put back, or else restarted."""

        async def guarded(name: str) -> None:
            try:
                await step(window, name)
                window.engines[name] = done
            except RolloutError as error:
                logger.warning("update window %d: %s", window.epoch, error)
                await self._put_back(window, name, str(error))

        await asyncio.gather(*(guarded(name) for name in names))

    async def _pause(self, _window: _Window, name: str) -> None:
        # A cache can only be flushed when nothing holds entries of it.
        await self._pool.client(name).pause("retract" if self._flushes else "in_place")

    async def _begin(self, _window: _Window, name: str) -> None:
        await self._pool.client(name).begin_update()

    async def _put_back(self, window: _Window, name: str, why: str) -> None:
        """An engine that no bucket reached goes on with its old weights."""
        try:
            client = self._pool.client(name)
            if window.engines[name] == "begun":
                await client.end_update()
            await client.resume()
        except RolloutError as error:
            await self._restart(window, name, f"{why}; then {error}")
            return
        state, version = window.old[name]
        window.engines[name] = "kept_old"
        self._pool.set_state(
            name, "serving" if state == "serving" else "stale", window.incarnations[name], version
        )

    async def _restart(self, window: _Window, name: str, why: str) -> None:
        window.engines[name] = "restarting"
        if self._pool.engines[name].incarnation == window.incarnations[name]:
            await self._pool.restart(name, f"update window {window.epoch}: {why}")

    async def _commit(self, window: _Window, name: str) -> None:
        client = self._pool.client(name)
        await client.end_update()
        if self._flushes:
            await client.flush_cache()
        await client.set_weight_version(window.weight_version)
        await client.resume()
        self._pool.set_state(name, "serving", window.incarnations[name], window.weight_version)

    async def _end(
        self, window: _Window, results: list[TransferResult], abandoned: str
    ) -> ClosedWindow:
        """Brings every engine of the window into a known state, then marks it closed."""
        if window.watchdog is not None:
            window.watchdog.cancel()
        if abandoned:
            logger.warning("update window %d is ended: %s", window.epoch, abandoned)
        by_engine = {result.engine: result for result in results}
        self._enter(window, "commit")

        async def settle(name: str) -> None:
            result = by_engine.get(name)
            if self._pool.engines[name].incarnation != window.incarnations[name]:
                window.engines[name] = "restarting"
            elif result is not None and result.complete:
                try:
                    await self._commit(window, name)
                    window.engines[name] = "committed"
                except EngineError as error:
                    await self._restart(window, name, str(error))
            elif result is not None and not result.touched:
                await self._put_back(window, name, result.error)
            else:
                why = result.error if result else abandoned or "its sender gave no result"
                await self._restart(window, name, f"weights are incomplete: {why}")

        await asyncio.gather(*(settle(name) for name in self._in_phase(window, "begun")))
        self._window = None
        self._closed = ClosedWindow(
            epoch=window.epoch,
            engines_serving=tuple(self._in_phase(window, "committed")),
            engines_restarting=tuple(self._in_phase(window, "restarting")),
            paused_s=self._clock() - window.started_s,
        )
        self._any_published = self._any_published or bool(self._closed.engines_serving)
        self._enter(window, "closed")
        return self._closed
