"""SGLang's own update calls as paths: over torch's real process group and real files, to engines that
are plain. What the real server does with them is rollout/engines/stock_update_test.py's.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from weightsync import errors
from weightsync.config import DiskConfig, DistributedConfig, WeightSyncConfig
from weightsync.disk_path import DiskPath
from weightsync.fake_engine import make_weights
from weightsync.plan import TensorSpec, make_plan
from weightsync.publisher import WeightPublisher
from weightsync.stock_calls import with_head
from weightsync.tensor_source import Gathered, spec_of
from weightsync.testbed import Engine, Manager, digests
from weightsync.update_group import flat_order
from weightsync.update_path import Update


@pytest.fixture
def settings(tmp_path):
    return WeightSyncConfig(
        bucket_bytes=16 * 1024,
        bucket_timeout_s=5.0,
        attach_timeout_s=10.0,
        disk=DiskConfig(directory=tmp_path / "updates", load_timeout_s=10.0),
    )


@pytest.fixture(params=["distributed", "disk"])
def config(request, settings):
    return settings.model_copy(update={"transport": request.param})


@pytest.fixture
def distributed(settings):
    return settings.model_copy(update={"transport": "distributed"})


@pytest.fixture(scope="module")
def engines() -> Iterator[list[Engine]]:
    """For all tests: each takes over what senders before it left in them."""
    with ExitStack() as stack:
        yield [stack.enter_context(Engine()) for _ in range(3)]


def left_over(config: WeightSyncConfig) -> list[Path]:
    directory = config.disk.directory
    assert directory is not None
    return list(directory.glob("*"))


async def publish(publisher: WeightPublisher, version: int, num_tensors: int = 20) -> None:
    await publisher.publish(make_weights(num_tensors, 1000, version).items(), version)


async def test_every_engine_gets_every_tensor(engines, config):
    manager = Manager([e.url for e in engines])
    publisher = WeightPublisher(config, manager)
    for version in (1, 2):
        weights = make_weights(20, 1000, version)
        result = await publisher.publish(weights.items(), version)
        assert result.engines == ("engine0", "engine1", "engine2")
        assert manager.flags() == [(True, True)] * 3
        for engine in engines:
            assert await engine.weights() == digests(weights)
        assert not left_over(config)
    await publisher.close()


async def test_a_set_of_engines_joins_once_until_one_is_replaced(engines, distributed):
    manager = Manager([e.url for e in engines[:2]])
    publisher = WeightPublisher(distributed, manager)
    path: Any = publisher._path
    await publish(publisher, 1)
    group = path._group
    await publish(publisher, 2)
    assert path._group is group
    manager.urls[1] = engines[2].url
    await publish(publisher, 3)
    assert path._group is not group
    for engine in (engines[0], engines[2]):
        assert await engine.weights() == digests(make_weights(20, 1000, 3))
    # One that was restarted at its old address has nothing: the manager says so.
    group = path._group
    manager.versions[engines[2].url] = 0
    await publish(publisher, 4)
    assert path._group is not group
    await publisher.close()


async def test_the_next_sender_takes_over_engines_of_a_killed_ones_group(engines, distributed):
    manager = Manager([e.url for e in engines])
    await publish(WeightPublisher(distributed, manager), 1)  # never closed
    publisher = WeightPublisher(distributed, manager)
    await publish(publisher, 2)
    assert manager.flags() == [(True, True)] * 3
    assert await engines[0].weights() == digests(make_weights(20, 1000, 2))
    await publisher.close()


@pytest.mark.parametrize("place", [0, 2])
async def test_an_engine_that_dies_half_way_costs_the_others_a_second_round(engines, config, place):
    with Engine("--signal-in-update=SIGKILL") as dying:
        urls = [e.url for e in engines[:2]]
        urls.insert(place, dying.url)
        manager = Manager(urls)
        publisher = WeightPublisher(config, manager)
        result = await publisher.publish(make_weights(20, 1000, 3).items(), 3)
    name = f"engine{place}"
    assert sorted(result.engines) == sorted({"engine0", "engine1", "engine2"} - {name})
    assert manager.flags()[place] == (False, True)
    assert dying.url in result.per_engine[name].error
    for engine in engines[:2]:
        assert await engine.weights() == digests(make_weights(20, 1000, 3))
    await publisher.close()
    assert not left_over(config)


async def test_an_engine_that_stops_half_way_is_left_out_in_time(engines, config):
    with Engine("--signal-in-update=SIGSTOP") as stopping:
        manager = Manager([stopping.url, *(e.url for e in engines[:2])])
        publisher = WeightPublisher(config, manager)
        result = await publisher.publish(make_weights(20, 1000, 3).items(), 3)
        assert set(result.engines) == {"engine1", "engine2"}
        assert manager.flags() == [(False, True), (True, True), (True, True)]
        assert "no answer in" in result.per_engine["engine0"].error
        await publisher.close()


async def test_an_engine_that_is_not_there_is_untouched(engines, config):
    manager = Manager(["http://127.0.0.1:1", engines[0].url])
    publisher = WeightPublisher(config, manager)
    result = await publisher.publish(make_weights(20, 1000, 4).items(), 4)
    assert result.engines == ("engine1",)
    assert manager.flags() == [(False, False), (True, True)]
    await publisher.close()


async def test_an_engine_that_refuses_before_a_byte_is_untouched(engines, distributed):
    """Its group is gone behind our back: it refuses the call at once, and the others go on."""
    patient = distributed.model_copy(update={"distributed": DistributedConfig(refusal_wait_s=10.0)})
    manager = Manager([e.url for e in engines[:2]])
    publisher = WeightPublisher(patient, manager)
    await publish(publisher, 1)
    gone = engines[0]
    await gone.post("/destroy_weights_update_group", {"group_name": "swe_rl_weight_update"})
    result = await publisher.publish(make_weights(20, 1000, 2).items(), 2)
    assert result.engines == ("engine1",)
    assert manager.flags() == [(False, False), (True, True)]
    assert await gone.weights() == digests(make_weights(20, 1000, 1))
    await publisher.close()


async def test_a_tensor_that_does_not_fit_touches(engines, config):
    weights = make_weights(20, 1000, 5)
    weights["layer.19.weight"] = torch.zeros(3, 5)
    manager = Manager([e.url for e in engines[:2]])
    publisher = WeightPublisher(config, manager)
    with pytest.raises(errors.PublishError, match="got status 400"):
        await publisher.publish(weights.items(), 5)
    assert manager.flags() == [(False, True)] * 2
    await publish(publisher, 6)
    assert await engines[0].weights() == digests(make_weights(20, 1000, 6))
    assert not left_over(config)
    await publisher.close()


async def test_a_cancelled_publication_closes_its_window(engines, config):
    manager = Manager([engines[0].url])
    publisher = WeightPublisher(config, manager)
    engines[0].process.send_signal(signal.SIGSTOP)
    task = asyncio.create_task(publish(publisher, 7))
    await asyncio.sleep(0.5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    engines[0].process.send_signal(signal.SIGCONT)
    assert [complete for complete, _ in manager.flags()] == [False]
    assert not left_over(config)
    await publisher.close()


async def test_a_publication_cancelled_while_it_writes_leaves_nothing(settings):
    gathered = threading.Event()

    class Slow(Gathered):
        def whole(self) -> Sequence[torch.Tensor]:
            gathered.wait(timeout=60.0)
            return super().whole()

    weights = make_weights(20, 1000, 1)
    specs = [spec_of(name, tensor) for name, tensor in weights.items()]
    plan = make_plan(specs, settings.bucket_bytes)
    path = DiskPath(settings.model_copy(update={"transport": "disk"}))
    task = asyncio.create_task(path.prepare(Update(plan, Slow(plan, list(weights.values())), 1)))
    async with asyncio.timeout(30.0):
        while not left_over(settings):
            await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.sleep(0.05)
    assert not task.done()  # the thread writes on, and its folder is still to come
    gathered.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [folder.name.startswith("swe_rl_ws_1_") for folder in left_over(settings)] == [True]
    await path.finish()
    assert not left_over(settings)


async def test_a_killed_trainers_folder_goes_when_the_next_starts(settings):
    config = settings.model_copy(update={"transport": "disk"})
    directory = config.disk.directory
    (directory / "swe_rl_ws_3_ab.unfinished").mkdir(parents=True)
    (directory / "of_others").mkdir()
    WeightPublisher(config, Manager([]))
    assert [path.name for path in left_over(config)] == ["of_others"]


async def test_a_disk_that_takes_nothing_opens_no_window(settings, tmp_path):
    config = settings.model_copy(update={"transport": "disk"})
    config.disk.directory.write_text("a file, where a folder is wanted")
    manager = Manager([])
    with pytest.raises(errors.PublishError, match="could not be sent"):
        await publish(WeightPublisher(config, manager), 1)
    assert manager.epoch == 0


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ({"transport": "disk"}, "needs weight_sync.disk.directory"),
        ({"distributed": {"host": "10.0.0.1"}}, "allow_unencrypted"),
    ],
    ids=["no_directory", "no_consent"],
)
def test_settings_that_cannot_work_are_refused(setting, says):
    with pytest.raises(ValueError, match=says):
        WeightSyncConfig(**setting)


def test_a_tied_head_is_sent_as_the_embedding():
    embedding = torch.arange(6.0).view(3, 2)
    plan = make_plan([TensorSpec("model.embed_tokens.weight", (3, 2), "float32")], 100)
    update = with_head(Update(plan, Gathered(plan, [embedding]), 1))
    assert [t.name for t in update.plan.tensors][1:] == ["lm_head.weight"]
    assert update.source.whole()[1] is embedding
    assert with_head(update) is update


def test_wide_elements_come_first_so_that_all_are_aligned():
    plan = make_plan([TensorSpec("a", (3,), "bfloat16"), TensorSpec("b", (2,), "float32")], 1000)
    assert flat_order(Update(plan, Gathered(plan, []), 1), 0) == [1, 0]
