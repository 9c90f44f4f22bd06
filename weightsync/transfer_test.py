"""Whole transfers between processes: the real publisher, ring and loader, engines that are plain.

The manager is a list of targets here; its windows are tested in rollout/engines.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from weightsync import _core, errors
from weightsync.config import TcpConfig, WeightSyncConfig
from weightsync.fake_engine import digest, make_weights
from weightsync.publisher import WeightPublisher
from weightsync.testbed import Engine, Manager
from weightsync.transports import SEGMENT_PREFIX
from weightsync.weight_digest import WeightDigest, tensor_checksum

CONFIG = WeightSyncConfig(
    bucket_bytes=16 * 1024,
    bucket_timeout_s=2.0,
    verify_timeout_s=2.0,
    attach_timeout_s=2.0,
    tcp=TcpConfig(stall_timeout_s=0.5),
)


@pytest.fixture(params=["shm", "tcp"])
def config(request):
    return CONFIG.model_copy(update={"transport": request.param})


def num_segments() -> int:
    """Segments that this process holds open, or left behind; others may have its pid elsewhere."""
    links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    left = _core.sweep(f"{SEGMENT_PREFIX}{os.getpid()}_")
    return left + sum(f"/dev/shm/{SEGMENT_PREFIX}" in link for link in links)


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    with ExitStack() as stack:
        yield [stack.enter_context(Engine()) for _ in range(2)]
    assert num_segments() == 0


async def test_every_engine_gets_every_tensor(engines, config):
    manager = Manager([e.url for e in engines])
    publisher = WeightPublisher(config, manager)
    for version in (1, 2):
        weights = make_weights(20, 1000, version)
        result = await publisher.publish(list(weights.items()), version)
        assert result.engines == ("engine0", "engine1")
        assert result.num_bytes == sum(t.nbytes for t in weights.values())
        assert all(r.complete for r in result.per_engine.values())
        (held,) = {r.digest for r in result.per_engine.values()}
        expected = WeightDigest()
        for name, tensor in weights.items():
            expected.add(name, tensor_checksum(tensor))
        assert held == expected.value
        for engine in engines:
            assert await engine.weights() == {n: digest(t) for n, t in weights.items()}


async def test_views_that_are_not_contiguous_arrive_as_they_read(engines, config):
    weights = make_weights(20, 1000, 1)
    strided = {n: torch.stack([t, t], dim=1)[:, 0] for n, t in weights.items()}
    assert not strided["layer.0.weight"].is_contiguous()
    publisher = WeightPublisher(config, Manager([engines[0].url]))
    await publisher.publish(strided.items(), 1)
    assert await engines[0].weights() == {n: digest(t) for n, t in weights.items()}


async def test_an_engine_that_dies_half_way_does_not_stop_the_other(engines, config):
    with Engine("--signal-in-update=SIGKILL") as dying:
        manager = Manager([dying.url, engines[0].url])
        weights = make_weights(20, 1000, 3)
        result = await WeightPublisher(config, manager).publish(weights.items(), 3)
    assert result.engines == ("engine1",)
    assert manager.flags() == [(False, True), (True, True)]
    assert dying.url in result.per_engine["engine0"].error
    assert await engines[0].weights() == {n: digest(t) for n, t in weights.items()}


async def test_engines_whose_parent_stops_half_way_take_the_rest_from_the_sender(engines):
    """A chain: the second and third engine get the first bucket through the first."""
    config = CONFIG.model_copy(update={"transport": "tcp"})
    with Engine("--signal-in-update=SIGSTOP") as stopping:
        manager = Manager([stopping.url, *(e.url for e in engines)])
        weights = make_weights(20, 1000, 8)
        result = await WeightPublisher(config, manager).publish(weights.items(), 8)
        assert result.engines == ("engine1", "engine2")
        for engine in engines:
            assert await engine.weights() == {n: digest(t) for n, t in weights.items()}
        assert manager.flags() == [(False, True), (True, True), (True, True)]
        assert "did not free a buffer" in result.per_engine["engine0"].error


async def test_an_engine_that_is_not_there_is_untouched(engines, config):
    manager = Manager(["http://127.0.0.1:1", engines[0].url])
    weights = make_weights(20, 1000, 4)
    result = await WeightPublisher(config, manager).publish(weights.items(), 4)
    assert result.engines == ("engine1",)
    assert manager.flags() == [(False, False), (True, True)]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("missing", "it lacks layer.3.weight;"),
        ("unknown", "it has unknown layer.99.weight;"),
        ("renamed", "it lacks layer.3.weight and has unknown layer.3.wait;"),
        ("shape", r"tensor layer.3.weight has shape \[1003, 1\], the engine wants \[1003\]"),
        ("dtype", "tensor layer.0.weight is bfloat16, the engine's layer.0.weight float32"),
    ],
)
async def test_tensors_that_are_not_the_models_are_refused_untouched(engines, config, change, said):
    weights = make_weights(20, 1000, 5)
    if change == "unknown":
        weights["layer.99.weight"] = torch.zeros(3)
    elif change == "shape":
        weights["layer.3.weight"] = weights["layer.3.weight"].unsqueeze(1)
    elif change == "dtype":
        weights = {n: t.to(torch.bfloat16) for n, t in weights.items()}
    else:
        tensor = weights.pop("layer.3.weight")
        if change == "renamed":  # as many elements as before
            weights["layer.3.wait"] = tensor
    before = await engines[0].weights()
    manager = Manager([engines[0].url])
    with pytest.raises(errors.PublishError, match=f"engine0: PlanMismatchError: .*{said}"):
        await WeightPublisher(config, manager).publish(weights.items(), 5)
    assert manager.flags() == [(False, False)]
    assert await engines[0].weights() == before


# The one of its shape that comes first: sizes repeat every 7 tensors.
@pytest.mark.parametrize(
    ("fault", "wrong"),
    [
        ("drop", "1 of 20 tensors .*: layer.19.weight in layer.19.weight;"),
        ("truncate", "1 of 20 tensors .*: layer.19.weight in layer.19.weight;"),
        ("swap", "2 of 20 tensors .*: layer.5.weight in layer.5.weight, layer.19.weight in"),
        ("overwrite", "1 of 20 tensors .*: layer.0.weight in layer.0.weight;"),
    ],
)
async def test_a_model_that_loads_wrongly_is_found_out(engines, fault, wrong):
    weights = make_weights(20, 1000, 9)
    with Engine(f"--fault={fault}") as faulty:
        manager = Manager([faulty.url, engines[0].url])
        result = await WeightPublisher(CONFIG, manager).publish(weights.items(), 9)
        assert result.engines == ("engine1",)
        assert manager.flags() == [(False, True), (True, True)]
        error = result.per_engine["engine0"].error
        assert re.search(wrong, error), error
        # Unasked, it says nothing: the transfer itself was right.
        trusting = CONFIG.model_copy(update={"verify_engine": False})
        result = await WeightPublisher(trusting, manager).publish(weights.items(), 10)
        assert result.engines == ("engine0", "engine1")


async def test_an_engine_whose_loader_reads_nothing_back_is_not_believed(engines):
    weights = make_weights(20, 1000, 11)
    with Engine("--fault=skip_check") as careless:
        manager = Manager([careless.url, engines[0].url])
        result = await WeightPublisher(CONFIG, manager).publish(weights.items(), 11)
    assert result.engines == ("engine1",)
    assert manager.flags() == [(False, True), (True, True)]
    error = result.per_engine["engine0"].error
    assert error.startswith("it holds weights of digest 0000000000000000, sent was "), error


async def test_each_rank_of_an_engine_takes_every_bucket_for_itself(config):
    weights = make_weights(20, 1000, 12)
    expected = {n: digest(t) for n, t in weights.items()}
    with Engine("--tensor-parallel=2") as first, Engine("--tensor-parallel=2") as second:
        manager = Manager([first.url, second.url], tensor_parallel=2)
        result = await WeightPublisher(config, manager).publish(weights.items(), 12)
        assert result.engines == ("engine0", "engine1")
        for engine in (first, second):
            assert [await engine.weights(rank) for rank in range(2)] == [expected, expected]


async def test_an_engine_is_complete_only_if_all_of_its_ranks_are():
    weights = make_weights(20, 1000, 13)
    with (
        Engine("--tensor-parallel=2", "--fault=drop") as faulty,
        Engine("--tensor-parallel=2") as right,
    ):
        manager = Manager([faulty.url, right.url], tensor_parallel=2)
        result = await WeightPublisher(CONFIG, manager).publish(weights.items(), 13)
        assert result.engines == ("engine1",)
        assert manager.flags() == [(False, True), (True, True)]
        error = result.per_engine["engine0"].error
        assert error.startswith("rank 1: ArrivalError: 1 of 20 tensors"), error


async def test_an_engine_of_fewer_ranks_than_said_is_left_out(engines):
    weights = make_weights(20, 1000, 14)
    with Engine("--tensor-parallel=2") as right:
        manager = Manager([engines[0].url, right.url], tensor_parallel=2)
        result = await WeightPublisher(CONFIG, manager).publish(weights.items(), 14)
    assert result.engines == ("engine1",)
    assert "got status 500" in result.per_engine["engine0"].error


async def test_an_engine_that_stops_reading_is_given_up_in_time(engines, config):
    manager = Manager([e.url for e in engines])
    publisher = WeightPublisher(config, manager)
    engines[0].process.send_signal(signal.SIGSTOP)
    try:
        result = await publisher.publish(make_weights(20, 1000, 6).items(), 6)
    finally:
        engines[0].process.send_signal(signal.SIGCONT)
    assert result.engines == ("engine1",)
    assert manager.flags() == [(False, False), (True, True)]
    said = {"shm": "bucket 2 (", "tcp": "did not attach"}
    assert said[config.transport] in result.per_engine["engine0"].error
    # Awake again, it finds the transfer over and stays as it was.
    assert await engines[0].weights() == {
        n: digest(torch.zeros_like(t)) for n, t in make_weights(20, 1000, 0).items()
    }


async def test_a_cancelled_publication_closes_its_window(engines, config):
    manager = Manager([engines[0].url])
    engines[0].process.send_signal(signal.SIGSTOP)
    task = asyncio.create_task(
        WeightPublisher(config, manager).publish(make_weights(20, 1000, 7).items(), 7)
    )
    await asyncio.sleep(0.3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    engines[0].process.send_signal(signal.SIGCONT)
    assert manager.flags() == [(False, False)]


@pytest.mark.parametrize(
    ("tensor", "version", "message"),
    [
        (torch.zeros(100_000), 1, "raise bucket_bytes"),
        (torch.zeros(4, device="meta"), 1, "tensor a is on meta"),
        (torch.zeros(4), 2**63, "weight_version is 9223372036854775808"),
        (torch.zeros(4), -1, "weight_version is -1"),
    ],
    ids=["large", "meta", "version", "negative"],
)
async def test_what_cannot_be_sent_opens_no_window(tensor, version, message):
    manager = Manager([])
    with pytest.raises(ValueError, match=message):
        await WeightPublisher(CONFIG, manager).publish([("a", tensor)], version)
    assert manager.epoch == 0


async def test_more_receivers_than_a_sender_serves_touch_no_engine(config):
    manager = Manager(["http://127.0.0.1:9"], tensor_parallel=65)
    weights = make_weights(20, 1000, 1)
    with pytest.raises(errors.PublishError, match=r"could not be sent: .*1\.\.64 receivers"):
        await WeightPublisher(config, manager).publish(weights.items(), 1)
    assert manager.flags() == [(False, False)]


def test_the_receiver_of_a_killed_sender_notices_and_its_segment_is_swept():
    script = f"""
        import array, os, signal, sys
        from weightsync import _core
        ring = _core.RingSender(name="{SEGMENT_PREFIX}killed", epoch=1, num_receivers=1,
                                num_buffers=2, buffer_bytes=64, with_checksums=True)
        data = bytearray(b"x" * 64)
        address = (array.array("Q", [0]).buffer_info())
        import ctypes
        at = ctypes.addressof(ctypes.c_char.from_buffer(data))
        ring.send(array.array("Q", [at, 64, 0]), "first", 1.0)
        print("ready", flush=True)
        sys.stdin.read()
        os.kill(os.getpid(), signal.SIGKILL)
    """
    command = [sys.executable, "-P", "-c", textwrap.dedent(script)]
    sender = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert sender.stdout is not None
    assert sender.stdin is not None
    assert sender.stdout.readline() == "ready\n"
    receiver = _core.RingReceiver(name=SEGMENT_PREFIX + "killed", epoch=1, index=0)
    view = receiver.next("first", 1.0)
    assert bytes(view) == b"x" * 64
    receiver.release()
    assert Path("/dev/shm", SEGMENT_PREFIX + "killed").exists()
    sender.stdin.close()
    sender.wait()
    sender.stdout.close()
    with pytest.raises(errors.PeerLostError, match="ended before bucket 1 \\(second\\)"):
        receiver.next("second", 30.0)
    WeightPublisher(CONFIG, Manager([]))  # a start of the next sender sweeps
    assert not Path("/dev/shm", SEGMENT_PREFIX + "killed").exists()


@pytest.mark.parametrize("code", sorted(errors.CODES))
def test_each_code_of_the_core_has_its_class(code):
    error = errors.from_code(code, "why")
    assert type(error) is errors.CODES[code]
    assert str(error) == "why"


def test_codes_reach_python_as_their_classes():
    with pytest.raises(errors.PeerLostError, match="cannot open the segment"):
        _core.RingReceiver(name=SEGMENT_PREFIX + "none", epoch=1, index=0)
    with pytest.raises(errors.RingArgumentError, match="receivers"):
        _core.RingSender(
            name=SEGMENT_PREFIX + "bad",
            epoch=1,
            num_receivers=0,
            num_buffers=2,
            buffer_bytes=64,
            with_checksums=True,
        )
    ring = _core.RingSender(
        name=f"{SEGMENT_PREFIX}{os.getpid()}_epoch",
        epoch=1,
        num_receivers=1,
        num_buffers=2,
        buffer_bytes=64,
        with_checksums=True,
    )
    with pytest.raises(errors.EpochFencedError, match="is of epoch 1, wanted 2"):
        _core.RingReceiver(name=ring.name, epoch=2, index=0)
    receiver = _core.RingReceiver(name=ring.name, epoch=1, index=0)
    with pytest.raises(errors.TransferTimeoutError, match="bucket 0 \\(late\\)"):
        receiver.next("late", 0.01)
    ring.close()
    assert ring.state(0) == _core.ReceiverState.FAILED
