"""HTTP client of one SGLang server: control calls, load figures and health.

Owner: EnginePool makes one an engine, and UpdateWindows borrows it. Invariants: every call
has a deadline; every failure is an EngineError that names the engine and the call; nothing is
retried here, because only the caller knows whether a repeat is safe.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp

from rollout.engines.errors import (
    EngineError,
    EngineRefusedError,
    EngineTimeoutError,
    EngineUnreachableError,
)


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """An engine's own figures at one moment."""

    kv_usage: float
    """Share of the KV cache that holds tokens, 0..1, evictable prefixes included."""
    num_running: int
    num_waiting: int
    num_requests: int
    """Generate calls finished since the server started."""
    num_generated_tokens: int
    """Tokens sampled in those calls."""


_COUNTERS = {
    "sglang:num_requests_total": "num_requests",
    "sglang:generation_tokens_total": "num_generated_tokens",
}
_GAUGES = {
    "sglang:full_token_usage": "kv_usage",
    "sglang:num_running_reqs": "num_running",
    "sglang:num_queue_reqs": "num_waiting",
}


def parse_metrics(text: str) -> EngineLoad:
    """Reads the figures we use from a Prometheus page; those that are missing count as 0."""
    figures: dict[str, float] = dict.fromkeys((*_COUNTERS.values(), *_GAUGES.values()), 0.0)
    for line in text.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        field = _COUNTERS.get(name) or _GAUGES.get(name)
        if field is not None:
            figures[field] += float(line.rpartition(" ")[2])
    return EngineLoad(
        kv_usage=figures["kv_usage"],
        num_running=int(figures["num_running"]),
        num_waiting=int(figures["num_waiting"]),
        num_requests=int(figures["num_requests"]),
        num_generated_tokens=int(figures["num_generated_tokens"]),
    )


class SGLangClient:
    """Control calls to the server at `url`, each bounded by `timeout_s`."""

    def __init__(
        self, engine: str, url: str, timeout_s: float, session: aiohttp.ClientSession
    ) -> None:
        self.engine = engine
        self.url = url
        self._timeout_s = timeout_s
        self._session = session

    async def health(self, timeout_s: float | None = None) -> None:
        """Returns when the server is up; generates nothing."""
        await self._call("GET", "/health", timeout_s=timeout_s)

    async def freeze_gc(self) -> None:
        """Leaves all that the server's processes have loaded to no garbage collection."""
        await self._call("POST", "/freeze_gc")

    async def load(self, timeout_s: float | None = None) -> EngineLoad:
        """The engine's load figures."""
        return parse_metrics(await self._call("GET", "/metrics", timeout_s=timeout_s))

    async def pause(self, mode: Literal["retract", "in_place"]) -> None:
        """Stops generation. `retract`: running requests go back to the queue, keep what they
        sampled and lose their KV entries; `in_place`: they are frozen as they are.
        """
        await self._call("POST", "/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        """Lets paused requests go on. Harmless when not paused."""
        await self._call("POST", "/continue_generation", {})

    async def begin_update(self) -> None:
        """Opens a weight update; refused while one is open."""
        await self._call("POST", "/begin_weight_update", {})

    async def end_update(self) -> None:
        """Closes a weight update; refused when none is open."""
        await self._call("POST", "/end_weight_update", {})

    async def flush_cache(self, wait_s: float = 0.0) -> None:
        """Empties the KV cache; waits up to `wait_s` for requests unless paused."""
        await self._call(
            "POST", f"/flush_cache?timeout={wait_s}", {}, timeout_s=self._timeout_s + wait_s
        )

    async def set_weight_version(self, weight_version: int) -> None:
        """Names the weights that tokens sampled from now on come from."""
        await self._call(
            "POST",
            "/update_weight_version",
            {"new_version": str(weight_version), "abort_all_requests": False},
        )

    async def abort(self, rid: str) -> None:
        """Ends a request early; its caller gets what was sampled. Unknown ids are ignored."""
        await self._call("POST", "/abort_request", {"rid": rid})

    async def _call(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> str:
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        timeout = aiohttp.ClientTimeout(total=limit_s)
        try:
            async with self._session.request(
                method, self.url + path, json=body, timeout=timeout
            ) as response:
                text = await response.text()
        except TimeoutError as error:
            raise EngineTimeoutError(self.engine, path, f"no answer in {limit_s} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineUnreachableError(
                self.engine, path, f"{type(error).__name__}: {error}"
            ) from error
        if response.status != 200:
            raise EngineRefusedError(self.engine, path, response.status, text)
        return text


async def wait_until_healthy(
    client: SGLangClient, ended: asyncio.Event, timeout_s: float, interval_s: float = 0.1
) -> None:
    """Polls health until the server answers.

    Raises EngineUnreachableError when `ended` is set (the process is gone), and
    EngineTimeoutError after `timeout_s`.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while not ended.is_set():
        try:
            await client.health(timeout_s=min(5.0, timeout_s))
            return
        except EngineError:
            if loop.time() >= deadline:
                raise EngineTimeoutError(
                    client.engine,
                    "start",
                    f"not healthy after {timeout_s} s; see its log, or raise engines.start_timeout_s",
                ) from None
        try:
            await asyncio.wait_for(ended.wait(), interval_s)
        except TimeoutError:
            continue
    raise EngineUnreachableError(client.engine, "start", "its process ended before it was healthy")
