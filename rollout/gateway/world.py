"""A gateway on a real socket between its two doubles."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from proto.serving import dial
from rollout.client import RolloutClient
from rollout.gateway.app import Gateway
from rollout.gateway.chat_template import ChatTemplate
from rollout.gateway.config import GatewayConfig
from rollout.gateway.engine_client import EngineClient
from rollout.gateway.fakes import FakeEngine, FakeManager


class World:
    """One gateway (more with `another`), one manager, two engines, one client."""

    def __init__(
        self,
        chat: ChatTemplate,
        manager: FakeManager,
        client: aiohttp.ClientSession,
        stack: contextlib.AsyncExitStack,
    ) -> None:
        self.chat = chat
        self.manager = manager
        self.client = client
        self._stack = stack
        self.gateway: Gateway
        self.url = ""

    @property
    def engines(self) -> list[FakeEngine]:
        return self.manager.engines

    async def another(self, **settings: Any) -> tuple[Gateway, str]:
        """Starts one more gateway."""
        values: dict[str, Any] = {
            "manager_address": self.manager.address,
            "model_dir": Path("unused"),
            "manager_retry_pause_s": 0.01,
            "turn_deadline_s": 20.0,
            "admission_wait_s": 5.0,
            **settings,
        }
        config = GatewayConfig(**values)
        channel = await self._stack.enter_async_context(dial(config.manager_address))
        engines = await self._stack.enter_async_context(
            EngineClient(max_connections=0, connect_s=2.0, abort_timeout_s=2.0)
        )
        gateway = Gateway(config, RolloutClient(channel), engines, self.chat)
        runner = web.AppRunner(
            gateway.app(), handler_cancellation=True, shutdown_timeout=0.2, access_log=None
        )
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self._stack.push_async_callback(gateway.runner.close)
        self._stack.push_async_callback(runner.cleanup)
        return gateway, f"http://127.0.0.1:{runner.addresses[0][1]}"

    async def ask(
        self, key: str, messages: list[dict[str, Any]], url: str = "", **fields: Any
    ) -> tuple[int, dict[str, Any]]:
        """One completion: status and body."""
        async with self.client.post(
            f"{url or self.url}/v1/chat/completions",
            json={"model": "m", "messages": messages, **fields},
            headers={"Authorization": f"Bearer {key}"},
        ) as response:
            return response.status, await response.json()

    async def say(self, key: str, messages: list[dict[str, Any]], url: str = "") -> str:
        """One completion that must succeed; appends and returns the answer."""
        status, body = await self.ask(key, messages, url)
        assert status == 200, body
        message = body["choices"][0]["message"]
        messages.append(message)
        return str(message["content"])


async def until(condition: Callable[[], bool], what: str) -> None:
    """Lets the loop run until the condition holds."""
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"never happened: {what}")


@contextlib.asynccontextmanager
async def open_world(chat: ChatTemplate, **settings: Any) -> AsyncIterator[World]:
    """A running world."""
    alphabet = [i for i in range(chat.vocab_size) if i not in chat.special_ids]
    async with contextlib.AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(FakeEngine(alphabet, i)) for i in range(2)]
        manager = await stack.enter_async_context(FakeManager(engines))
        client = await stack.enter_async_context(aiohttp.ClientSession())
        world = World(chat, manager, client, stack)
        world.gateway, world.url = await world.another(**settings)
        yield world


def user(text: str) -> dict[str, str]:
    """A user message."""
    return {"role": "user", "content": text}
