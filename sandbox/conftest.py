"""A real broker on this host for tests: in this process, with a client on a real channel."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from proto import serving
from sandbox import server
from sandbox.backends.local import LocalBackend, default_init_binary
from sandbox.broker import SandboxBroker
from sandbox.client import AcquiredLease, SandboxClient
from sandbox.config import BrokerConfig


def init_binary() -> Path:
    """The binary under test; SWE_RL_SANDBOX_INIT names one that was built by hand."""
    return Path(os.environ.get("SWE_RL_SANDBOX_INIT", default_init_binary()))


@dataclass
class Rig:
    """A running broker and a client of it."""

    broker: SandboxBroker
    client: SandboxClient

    @asynccontextmanager
    async def lease(self, image: str = "host", **request: object) -> AsyncIterator[AcquiredLease]:
        lease = await self.client.acquire(image, **request)  # type: ignore[arg-type]
        try:
            yield lease
        finally:
            await self.client.release(lease)

    async def text(self, lease: AcquiredLease, command: str, **request: object) -> str:
        """What a command prints, stderr merged in, stripped."""
        result = await self.client.exec(
            lease,
            command,
            merge_output=True,
            **request,  # type: ignore[arg-type]
        )
        return result.stdout.decode().strip()


@asynccontextmanager
async def run_rig(**config: object) -> AsyncIterator[Rig]:
    config.setdefault("init_binary", init_binary())
    resolved = BrokerConfig.model_validate(config)
    broker = SandboxBroker(resolved, LocalBackend(resolved))
    await broker.start()
    running = server.make_server(broker, serving.ServingConfig())
    try:
        address = await running.start()
        async with serving.dial(address) as channel:
            yield Rig(broker, SandboxClient(channel))
    finally:
        await running.stop(0)
        await broker.close()


RunRig = Callable[..., AbstractAsyncContextManager[Rig]]


@pytest.fixture
def rig_factory() -> RunRig:
    """Starts a broker with a given configuration."""
    return run_rig


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    """A broker with its defaults."""
    async with run_rig() as running:
        yield running


@pytest.fixture
def sandbox_init() -> Path:
    """The native binary."""
    return init_binary()
