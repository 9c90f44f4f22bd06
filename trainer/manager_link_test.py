"""The line to a manager that is gone: waited for, unless the trainer itself is ending."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import grpc.aio
import pytest

from proto import rollout_pb2
from rollout.client import RolloutClient, UnavailableError
from trainer.manager_link import ManagerLink


@pytest.fixture(name="link")
def link_fixture():
    """A link to a port that nothing listens on, with two minutes of patience."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def call(coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result()

    async def dial() -> grpc.aio.Channel:
        return grpc.aio.insecure_channel("127.0.0.1:1")

    channel = call(dial())
    publisher: Any = None
    yield ManagerLink(loop, RolloutClient(channel), publisher, retry_s=120.0)
    call(channel.close())
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_a_trainer_that_ends_does_not_wait_for_a_dead_manager(link: ManagerLink) -> None:
    started = time.monotonic()
    threading.Timer(1.0, link.stop_retrying).start()
    with pytest.raises(UnavailableError):
        link.ack(rollout_pb2.AckBatchRequest(batch_id="b", step=1))
    waited = time.monotonic() - started
    assert 1.0 <= waited < 30.0
