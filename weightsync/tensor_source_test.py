"""Gathering a bucket ahead: how far it runs, what it refuses, and whole publications out of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from weightsync import errors
from weightsync.config import DiskConfig, WeightSyncConfig
from weightsync.fake_engine import make_weights
from weightsync.plan import Plan, make_plan
from weightsync.publisher import WeightPublisher
from weightsync.tensor_source import Gathering, gather_all, spec_of
from weightsync.testbed import Engine, Manager, digests

NUM_TENSORS = 12
WEIGHTS = make_weights(NUM_TENSORS, 1000, 1)
DEADLINE_S = 30.0


def plan_of(weights: dict[str, torch.Tensor]) -> Plan:
    """Three tensors a bucket."""
    return make_plan([spec_of(n, t) for n, t in weights.items()], 13_000)


class Iterated:
    """An iterator that counts, and may wait."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        self.count = 0
        self.ended = False
        self.go_on = threading.Event()
        self.go_on.set()
        self._items = list(weights.items())

    def run(self) -> Iterator[tuple[str, torch.Tensor]]:
        for item in self._items:
            self.go_on.wait(DEADLINE_S)
            self.count += 1
            yield item
        self.ended = True

    def wait_for(self, count: int) -> None:
        give_up_s = time.monotonic() + DEADLINE_S
        while self.count < count:
            assert time.monotonic() < give_up_s
            time.sleep(0.005)


def test_it_is_one_bucket_ahead_and_no_further():
    plan = plan_of(WEIGHTS)
    assert [len(b.offsets) for b in plan.buckets] == [3, 3, 3, 3]
    iterated = Iterated(WEIGHTS)
    source = Gathering(plan, iterated.run(), DEADLINE_S)
    found = []
    for index in range(4):
        iterated.wait_for(3 * (index + 1))
        time.sleep(0.05)
        assert iterated.count == 3 * (index + 1)  # it would have run on by now
        found += source.bucket(index)
    source.close()
    assert iterated.ended
    assert all(torch.equal(a, b) for a, b in zip(found, WEIGHTS.values(), strict=True))


def test_an_update_that_is_given_up_runs_the_iterator_to_its_end():
    iterated = Iterated(WEIGHTS)
    source = Gathering(plan_of(WEIGHTS), iterated.run(), DEADLINE_S)
    source.bucket(0)
    source.close()
    assert iterated.ended
    assert iterated.count == NUM_TENSORS


def changed(change: str) -> dict[str, torch.Tensor]:
    weights = dict(WEIGHTS)
    match change:
        case "missing":
            del weights["layer.11.weight"]
        case "more":
            weights["layer.12.weight"] = torch.zeros(3)
        case "shape":
            weights["layer.11.weight"] = weights["layer.11.weight"][1:]
        case "dtype":
            weights["layer.11.weight"] = weights["layer.11.weight"].to(torch.bfloat16)
    return weights


@pytest.mark.parametrize("change", ["missing", "more", "shape", "dtype"])
def test_what_is_not_the_plans_is_refused_and_run_to_its_end(change):
    iterated = Iterated(changed(change))
    source = Gathering(plan_of(WEIGHTS), iterated.run(), DEADLINE_S)
    for index in range(3):
        source.bucket(index)
    for _ in range(2):
        with pytest.raises(errors.PlanMismatchError, match="trainer's iterator"):
            source.bucket(3)
    source.close()
    assert iterated.ended


def test_an_iterator_that_is_late_is_a_timeout():
    iterated = Iterated(WEIGHTS)
    iterated.go_on.clear()
    source = Gathering(plan_of(WEIGHTS), iterated.run(), 0.1)
    with pytest.raises(errors.TransferTimeoutError, match="bucket 0 .* was not gathered"):
        source.bucket(0)
    iterated.go_on.set()
    source.close()
    assert iterated.ended


@pytest.mark.parametrize("transport", ["shm", "tcp", "distributed", "disk"])
async def test_publications_out_of_an_iterator(tmp_path, transport):
    config = WeightSyncConfig(
        transport=transport, bucket_bytes=13_000, disk=DiskConfig(directory=tmp_path / "updates")
    )
    with Engine(f"--num-tensors={NUM_TENSORS}") as engine:
        manager = Manager([engine.url])
        publisher = WeightPublisher(config, manager)
        for version in (1, 2, 3):
            iterated = Iterated(make_weights(NUM_TENSORS, 1000, version))
            # The first is not planned yet; the others are gathered on their way.
            await publisher.publish(iterated.run(), version)
            assert iterated.ended
            assert await engine.weights() == digests(make_weights(NUM_TENSORS, 1000, version))
        await publisher.close()


async def test_a_changed_model_fails_once_and_is_then_planned_anew(tmp_path):
    config = WeightSyncConfig(bucket_bytes=13_000)
    with Engine(f"--num-tensors={NUM_TENSORS}") as engine:
        manager = Manager([engine.url])
        publisher = WeightPublisher(config, manager)
        await publisher.publish(Iterated(WEIGHTS).run(), 1)
        with pytest.raises(errors.PublishError, match="publish again, which plans anew"):
            await publisher.publish(Iterated(changed("dtype")).run(), 2)
        assert manager.flags() == [(False, True)]  # the first buckets had gone out
        with pytest.raises(errors.PublishError, match=r"tensor layer\.11\.weight is bfloat16"):
            await publisher.publish(Iterated(changed("dtype")).run(), 3)
        assert manager.flags() == [(False, False)]  # planned anew, it is the engine that refuses
        await publisher.publish(Iterated(make_weights(NUM_TENSORS, 1000, 4)).run(), 4)
        assert await engine.weights() == digests(make_weights(NUM_TENSORS, 1000, 4))


@pytest.mark.parametrize(
    "bad", [("layer.0.weight", torch.zeros(2)), ("m", torch.zeros(2, device="meta"))]
)
def test_an_iterator_is_run_to_its_end_also_when_it_is_refused(bad):
    ended = []

    def run() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(WEIGHTS.items())[:1]
        yield bad
        yield from list(WEIGHTS.items())[1:]
        ended.append(True)

    with pytest.raises(ValueError, match=f"tensor {bad[0]} is"):
        gather_all(run())
    assert ended
