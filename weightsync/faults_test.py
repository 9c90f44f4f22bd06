"""What a publication does when something breaks around it; README.md's table names each test.

The publisher, the transports and the loader are real, engines are plain processes, and the manager is
a list. The manager's own death is rollout/engines/manager_killed_test.py's.
"""

from __future__ import annotations

import asyncio
import base64
import multiprocessing
import pickle
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace

import aiohttp
import pytest
import torch
from aiohttp import web

from weightsync import errors, loader_path
from weightsync.config import TcpConfig, WeightSyncConfig
from weightsync.descriptor import Descriptor
from weightsync.fake_engine import make_weights
from weightsync.publisher import WeightPublisher
from weightsync.testbed import Engine, Manager, digests

CONFIG = WeightSyncConfig(
    bucket_bytes=16 * 1024,
    bucket_timeout_s=2.0,
    verify_timeout_s=10.0,
    attach_timeout_s=5.0,
    tcp=TcpConfig(stall_timeout_s=0.5),
)
DEADLINE_S = 60.0
"""Of whole steps on a busy machine; each of the waits below is far shorter."""


@pytest.fixture(params=["shm", "tcp"])
def config(request):
    return CONFIG.model_copy(update={"transport": request.param})


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    with ExitStack() as stack:
        yield [stack.enter_context(Engine()) for _ in range(2)]


async def loaders_end(engine: Engine) -> None:
    """No loader waits for ever: in SGLang it would hold the engine's only thread."""
    async with asyncio.timeout(DEADLINE_S):
        while (await engine.progress())["running"]:
            await asyncio.sleep(0.05)


def publish_alone(config: WeightSyncConfig, urls: list[str], version: int) -> None:
    """A sender's process."""
    publisher = WeightPublisher(config, Manager(urls))
    asyncio.run(publisher.publish(make_weights(20, 1000, version).items(), version))


@pytest.mark.parametrize("transport", ["shm", "tcp", "distributed"])
async def test_a_sender_killed_in_mid_bucket_ends_every_wait_and_the_next_one_publishes(transport):
    config = CONFIG.model_copy(update={"transport": transport})
    with Engine("--bucket-s=0.5") as slow, Engine("--bucket-s=0.5") as other:
        urls = [slow.url, other.url]
        context = multiprocessing.get_context("spawn")
        sender = context.Process(target=publish_alone, args=(config, urls, 1))
        sender.start()
        async with asyncio.timeout(DEADLINE_S):
            while (await slow.progress())["buckets"] < 1:
                await asyncio.sleep(0.02)
        assert sender.pid is not None
        sender.kill()
        sender.join()
        for engine in (slow, other):
            await loaders_end(engine)
            assert await engine.weights() != digests(make_weights(20, 1000, 1))
        # Its engines are not committed: only the sender's word makes the manager do that. The next
        # sender has a newer window.
        manager = Manager(urls)
        manager.epoch = 10
        publisher = WeightPublisher(config.model_copy(update={"bucket_timeout_s": 30.0}), manager)
        result = await publisher.publish(make_weights(20, 1000, 2).items(), 2)
        assert set(result.engines) == {"engine0", "engine1"}
        for engine in (slow, other):
            assert await engine.weights() == digests(make_weights(20, 1000, 2))
        await publisher.close()


async def test_a_slow_receiver_is_waited_for_within_its_deadline(engines, config):
    with Engine("--bucket-s=0.3") as slow:
        manager = Manager([slow.url, engines[0].url])
        weights = make_weights(20, 1000, 1)
        result = await WeightPublisher(config, manager).publish(weights.items(), 1)
        assert result.engines == ("engine0", "engine1")
        assert result.duration_s > 5 * 0.3
        for engine in (slow, engines[0]):
            assert await engine.weights() == digests(weights)


async def test_one_that_is_too_slow_is_left_out(engines, config):
    with Engine("--bucket-s=7") as slow:
        manager = Manager([slow.url, engines[0].url])
        weights = make_weights(20, 1000, 1)
        result = await WeightPublisher(config, manager).publish(weights.items(), 1)
        assert result.engines == ("engine1",)
        assert manager.flags() == [(False, True), (True, True)]
        assert await engines[0].weights() == digests(weights)


async def test_an_engine_restarted_between_windows_gets_the_whole(engines, config):
    manager = Manager([e.url for e in engines])
    publisher = WeightPublisher(config, manager)
    await publisher.publish(make_weights(20, 1000, 1).items(), 1)
    with Engine() as restarted:
        manager.urls[0] = restarted.url
        weights = make_weights(20, 1000, 2)
        result = await publisher.publish(weights.items(), 2)
        assert result.engines == ("engine0", "engine1")
        assert await restarted.weights() == digests(weights)


async def test_versions_may_be_skipped_but_windows_only_grow(engines, config):
    manager = Manager([engines[0].url])
    publisher = WeightPublisher(config, manager)
    await publisher.publish(make_weights(20, 1000, 1).items(), 1)
    await publisher.publish(make_weights(20, 1000, 3).items(), 3)
    served = digests(make_weights(20, 1000, 3))
    assert await engines[0].weights() == served
    manager.epoch = 0  # a sender of a window that is over: its epoch is 1 again
    with pytest.raises(errors.PublishError, match="EpochFencedError: window 1 is older than 2"):
        await publisher.publish(make_weights(20, 1000, 4).items(), 4)
    assert manager.flags() == [(False, False)]
    assert await engines[0].weights() == served


@pytest.mark.parametrize("change", ["name", "shape"])
async def test_a_plan_that_changed_between_windows_never_completes(engines, config, change):
    manager = Manager([engines[0].url])
    publisher = WeightPublisher(config, manager)
    first = make_weights(20, 1000, 1)
    await publisher.publish(first.items(), 1)
    changed = make_weights(20, 1000, 2)
    if change == "name":
        del changed["layer.19.weight"]
    else:
        changed["layer.19.weight"] = changed["layer.19.weight"].reshape(-1, 5)
    says = {"name": "it lacks layer.19.weight;", "shape": r"tensor layer\.19\.weight has shape \["}
    with pytest.raises(errors.PublishError, match=says[change]):
        await publisher.publish(changed.items(), 2)
    # Untouched, it goes on with version 1.
    assert manager.flags() == [(False, False)]
    assert await engines[0].weights() == digests(first)
    third = make_weights(20, 1000, 3)
    await publisher.publish(third.items(), 3)
    assert await engines[0].weights() == digests(third)


class Relay:
    """TCP between receivers and their sender, cut on command."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._forwards = asyncio.Event()
        self._forwards.set()
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._left: int | None = None
        self._action = ""

    async def start(self) -> int:
        """Listens; returns the port."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    def cut_after(self, num_bytes: int, action: str) -> None:
        """After so many bytes from the sender: `silent` forwards nothing more, `close` hangs up."""
        self._left, self._action = num_bytes, action

    async def close(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        self._hang_up()

    def _hang_up(self) -> None:
        for writer in self._writers:
            writer.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, out = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers += [writer, out]
        self._tasks += [
            asyncio.create_task(self._forward(reader, out, counted=False)),
            asyncio.create_task(self._forward(there, writer, counted=True)),
        ]

    async def _forward(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, counted: bool
    ) -> None:
        try:
            while data := await reader.read(4096):
                if counted and self._left is not None:
                    self._left -= len(data)
                    if self._left <= 0:
                        self._forwards.clear()
                        if self._action == "close":
                            self._hang_up()
                await self._forwards.wait()
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        if self._forwards.is_set():
            writer.close()


@asynccontextmanager
async def behind_a_relay(engine: Engine, num_bytes: int, action: str) -> AsyncIterator[str]:
    """The engine's URL as seen by a sender whose buckets go to it through a relay."""
    relays: list[Relay] = []

    async def forward(request: web.Request) -> web.Response:
        order = await request.json()
        ((_, tensor),) = pickle.loads(base64.b64decode(order["serialized_named_tensors"][0]))
        descriptor = Descriptor.decode(bytes(tensor.numpy()))
        relays.append(relay := Relay(descriptor.endpoint["port"]))
        relay.cut_after(num_bytes, action)
        endpoint = descriptor.endpoint | {"port": await relay.start()}
        order["serialized_named_tensors"] = [
            loader_path._serialize(replace(descriptor, endpoint=endpoint))
        ]
        async with aiohttp.ClientSession() as session:
            async with session.post(engine.url + request.path, json=order) as answer:
                return web.Response(status=answer.status, text=await answer.text())

    app = web.Application(client_max_size=2**30)
    app.add_routes([web.post("/update_weights_from_tensor", forward)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        for relay in relays:
            await relay.close()
        await runner.cleanup()


@pytest.mark.parametrize("num_bytes", [1, 30_000], ids=["at_once", "in_mid_bucket"])
@pytest.mark.parametrize("action", ["silent", "close"])
async def test_a_network_that_is_cut_costs_the_engine_behind_it_and_no_other(
    engines, action, num_bytes
):
    config = CONFIG.model_copy(update={"transport": "tcp"})
    weights = make_weights(20, 1000, 1)
    async with behind_a_relay(engines[0], num_bytes, action) as url:
        manager = Manager([url, engines[1].url])
        publisher = WeightPublisher(config, manager)
        async with asyncio.timeout(DEADLINE_S):
            result = await publisher.publish(weights.items(), 1)
        assert result.engines == ("engine1",)
        assert await engines[1].weights() == digests(weights)
        assert not manager.flags()[0][0]
        assert result.per_engine["engine0"].error
        await loaders_end(engines[0])  # a silent network: by the loader's own deadline
        touched = manager.flags()[0][1]
        assert touched or await engines[0].weights() == digests(
            {n: torch.zeros_like(t) for n, t in weights.items()}
        )
    # Connected again, it takes the next version whole.
    manager.urls[0] = engines[0].url
    weights = make_weights(20, 1000, 2)
    result = await publisher.publish(weights.items(), 2)
    assert result.engines == ("engine0", "engine1")
    assert await engines[0].weights() == digests(weights)
