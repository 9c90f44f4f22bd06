"""The line to a manager that is gone: waited for, unless the trainer itself is ending; a window that
went with it is a lost publication, not the end of the stage."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import grpc.aio
import pytest

from proto import rollout_pb2
from rollout.client import ConflictError, FencedError, RolloutClient, UnavailableError
from trainer.errors import PublishFailedError
from trainer.manager_link import ManagerLink


class RefusedPublisher:
    """Its publications end with `refusal`."""

    refusal: Exception

    async def publish(self, *_: Any) -> Any:
        raise self.refusal


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
    yield ManagerLink(loop, RolloutClient(channel), RefusedPublisher(), retry_s=120.0)
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


def test_a_window_that_died_with_the_manager_is_a_lost_publication(link: ManagerLink) -> None:
    RefusedPublisher.refusal = FencedError("update window 3 is not open")
    with pytest.raises(PublishFailedError, match="weight_version 4: update window 3"):
        link.publish([], 4)
    RefusedPublisher.refusal = ConflictError("weight_version 4 was used before")
    with pytest.raises(ConflictError):
        link.publish([], 4)
