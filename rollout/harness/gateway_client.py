"""Chat completions at a gateway: one call, its bounded repeats, its typed failures.

Owner: the worker (one client, one connection pool). A repeat is safe: the gateway makes a
turn durable before it answers, so a resent history is answered from what was recorded, or
sampled anew when nothing was; no turn is recorded twice. Nothing is decided by message text:
HTTP status and `error.code` only.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from dataclasses import dataclass
from typing import Any

import aiohttp

from rollout.harness.causes import AgentEnd
from rollout.harness.config import HarnessConfig
from rollout.harness.errors import (
    EngineFailedError,
    EnginesAwayError,
    GatewayRejectedError,
    SessionFencedError,
)

DECODE_HEADER = "x-swe-rl-decode-ms"
"""Milliseconds inside the engine without update windows, set by the gateway."""
CAP_CODES = {
    "context_length_exceeded": AgentEnd.TOKEN_CAP,
    "turn_limit_exceeded": AgentEnd.TURN_CAP,
}
_FENCED_STATUS = frozenset({401, 403, 404, 409, 410})
_RETRIED_STATUS = frozenset({429, 502, 503, 504})
_RETRIED_CODES = frozenset({"session_moved", "draining", "no_engine", "manager_unavailable"})
ENGINE_FAILED_CODE = "engine_failed"


@dataclass(frozen=True)
class Completion:
    """One answered model call."""

    content: str
    finish_reason: str
    decode_s: float
    wall_s: float


class CapReachedError(Exception):
    """The gateway refused the call because a cap of the attempt is reached; not a failure."""

    def __init__(self, end: AgentEnd, message: str) -> None:
        super().__init__(message)
        self.end = end


class GatewayClient:
    """Calls gateways over one pool. `close` it."""

    def __init__(self, config: HarnessConfig) -> None:
        self._config = config
        # Calls wait long and one attempt makes one at a time: the attempts bound the connections.
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=config.model_call_timeout_s, connect=10.0),
        )

    async def close(self) -> None:
        """Closes the pool."""
        await self._http.close()

    async def complete(
        self, attempt_id: str, session_key: str, messages: list[dict[str, Any]]
    ) -> Completion:
        """Asks for the next assistant message.

        Raises CapReachedError at a cap, EngineFailedError when no turn can be had within the
        bounds (EnginesAwayError when nothing served), SessionFencedError when the session is no longer ours, GatewayRejectedError.
        """
        body = {"model": self._config.model_name, "messages": messages}
        headers = {"Authorization": f"Bearer {session_key}"}
        urls = self._config.gateway_urls
        # One gateway serves an attempt while it can: its memory holds the session.
        first = int.from_bytes(hashlib.sha256(attempt_id.encode()).digest()[:4], "big")
        pause, last = 0.1, ""
        for number in range(self._config.model_retries + 1):
            url = f"{urls[(first + number) % len(urls)]}/v1/chat/completions"
            started = time.monotonic()
            try:
                async with self._http.post(url, json=body, headers=headers) as response:
                    payload = await _json(response)
                    if response.status == 200:
                        return _completion(payload, response, time.monotonic() - started)
                    last = _refusal(response.status, payload, attempt_id, url)
                    wait_s = _retry_after(response)
            except aiohttp.ClientError as error:  # before TimeoutError: one to connect is both
                last, wait_s = f"{url}: {type(error).__name__} {error}", 0.0
            except TimeoutError as error:
                raise EngineFailedError(
                    f"attempt {attempt_id}: no answer from {url} within "
                    f"{self._config.model_call_timeout_s:g} s"
                ) from error
            if number < self._config.model_retries:
                await asyncio.sleep(min(max(pause, wait_s), self._config.model_retry_max_s))
                pause *= 2
        raise EnginesAwayError(
            f"attempt {attempt_id}: {self._config.model_retries + 1} calls failed, the last: {last}"
        )


async def _json(response: aiohttp.ClientResponse) -> dict[str, Any]:
    try:
        payload = await response.json(content_type=None)
    except ValueError:
        return {}
    return payload if isinstance(payload, dict) else {}


def _completion(
    payload: dict[str, Any], response: aiohttp.ClientResponse, wall_s: float
) -> Completion:
    try:
        choice = payload["choices"][0]
        content, finish = choice["message"].get("content") or "", choice.get("finish_reason") or ""
    except (KeyError, IndexError, TypeError) as error:
        raise GatewayRejectedError(f"{response.url} answered 200 without a choice") from error
    header = response.headers.get(DECODE_HEADER, "")
    decode_s = float(header) / 1000 if header.replace(".", "", 1).isdigit() else wall_s
    return Completion(content, finish, min(decode_s, wall_s), wall_s)


def _refusal(status: int, payload: dict[str, Any], attempt_id: str, url: str) -> str:
    """Words for a refusal that is worth a repeat; raises for every other."""
    error = payload.get("error")
    error = error if isinstance(error, dict) else {}
    code, text = error.get("code"), str(error.get("message", ""))[:500]
    words = f"attempt {attempt_id}: {url} answered {status} {code or ''} {text}"
    if status == 400 and code in CAP_CODES:
        raise CapReachedError(CAP_CODES[code], text)
    if code == ENGINE_FAILED_CODE:
        raise EngineFailedError(words)
    if code in _RETRIED_CODES or status in _RETRIED_STATUS:
        return words
    if status in _FENCED_STATUS:
        raise SessionFencedError(words)
    raise GatewayRejectedError(words)


def _retry_after(response: aiohttp.ClientResponse) -> float:
    value = response.headers.get("Retry-After", "")
    return float(value) if value.isdigit() else 0.0
