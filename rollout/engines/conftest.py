"""Engines that fail on command, under the real pool."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rollout.engines.config import EngineConfig
from rollout.engines.engine_pool import EnginePool


class FakeFleet:
    """A pool of fake engines in real processes."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.config = EngineConfig(
            **{
                "python": Path(sys.executable),
                "launcher": "rollout.engines.fake_engine",
                "model_path": folder,
                "num_engines": 2,
                "poll_interval_s": 0.05,
                "control_timeout_s": 20.0,
                "start_timeout_s": 30.0,
                "stop_timeout_s": 0.0,
                **settings,
            }
        )
        self.now_s = 0.0
        self.pool = EnginePool(self.config, folder, folder / "logs", time.monotonic)
        self.history: list[tuple[str, str]] = []
        self.pool.on_change = lambda engine: self.history.append((engine.name, engine.state))

    async def wait(self, done: Callable[[], bool], timeout_s: float = 30.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not done():  # noqa: ASYNC110 (what is waited for sets no event)
                await asyncio.sleep(0.02)

    async def wait_for(self, state: str, *names: str) -> None:
        engines = [self.pool.engines[n] for n in names or self.pool.engines]
        await self.wait(lambda: all(e.state == state for e in engines))

    async def fail(self, name: str, path: str, action: str) -> None:
        url = self.pool.engines[name].url + "/fault"
        body = {"path": path, "action": action}
        async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
            assert response.status == 200

    async def state(self, name: str) -> dict[str, Any]:
        url = self.pool.engines[name].url + "/state"
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            return dict(await response.json())


@pytest.fixture
async def make_fleet(tmp_path: Path):
    fleets: list[FakeFleet] = []

    async def make(**settings: Any) -> FakeFleet:
        fleet = FakeFleet(tmp_path, **settings)
        fleets.append(fleet)
        await fleet.pool.start()
        return fleet

    yield make
    for fleet in fleets:
        await fleet.pool.close()
