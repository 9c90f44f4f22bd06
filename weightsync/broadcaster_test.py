"""Broadcasts between ranks: over shm and tcp between processes, over the fake RCCL in threads."""

from __future__ import annotations

import multiprocessing
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed

from weightsync import errors
from weightsync.broadcaster import Broadcaster, BroadcastResult

WORLD = 3
FAKE = "weightsync/core/libfake_rccl.so"
NAMES = [f"layer.{i}.weight" for i in range(30)]
SHAPES = [(50 + i, 40) for i in range(30)]
BUCKET_BYTES = 32 * 1024
START_S = 90.0
"""For a process to start and import torch, on a busy machine with cold caches."""


def make_tensors(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def make(rank: int, transport: Any, port: int, **more: Any) -> Broadcaster:
    store = torch.distributed.TCPStore("127.0.0.1", port, None, False)
    settings = {"bucket_bytes": BUCKET_BYTES, "timeout_s": START_S} | more
    return Broadcaster(rank, WORLD, transport, store, **settings)


def plan(broadcaster: Broadcaster, names: list[str] = NAMES) -> None:
    broadcaster.plan(names, SHAPES, ["float32"] * len(names))


def serve_rank(rank: int, transport: str, port: int, versions: list[int], results: Any) -> None:
    """A receiving process: takes the versions and tells what it has after each."""
    try:
        broadcaster = make(rank, transport, port)
        plan(broadcaster)
        tensors = make_tensors(0)
        for version in versions:
            broadcaster.broadcast(tensors, version)
            wanted = make_tensors(version)
            results.put(
                (rank, all(torch.equal(a, b) for a, b in zip(tensors, wanted, strict=True)))
            )
        broadcaster.close()
    except errors.WeightSyncError as error:
        results.put((rank, f"{type(error).__name__}: {error}"))


@pytest.fixture
def port() -> Any:
    store = torch.distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    yield store.port
    del store  # it serves until here


@pytest.fixture(params=["shm", "tcp"])
def ranks(request: Any, port: int) -> Any:
    """start(versions) -> rank 0's broadcaster, and a queue of what the others say."""
    context = multiprocessing.get_context("spawn")
    started: list[Any] = []

    def start(versions: list[int]) -> tuple[Broadcaster, Any]:
        results = context.Queue()
        for rank in range(1, WORLD):
            process = context.Process(
                target=serve_rank, args=(rank, request.param, port, versions, results)
            )
            process.start()
            started.append(process)
        return make(0, request.param, port), results

    yield start
    for process in started:
        process.join(START_S)
        assert process.exitcode == 0


def test_every_rank_gets_every_version(ranks: Any) -> None:
    broadcaster, results = ranks([1, 2, 3])
    plan(broadcaster)
    for version in (1, 2, 3):
        result = broadcaster.broadcast(make_tensors(version), version)
        assert result.num_bytes == sum(4 * a * b for a, b in SHAPES)
        assert len(result.buckets) > 3
        assert all(b.begun_s < b.done_s <= result.duration_s for b in result.buckets)
    assert (
        sorted(results.get(timeout=START_S) for _ in range(6)) == [(1, True)] * 3 + [(2, True)] * 3
    )


def test_a_skipped_version_is_refused_at_both_ends(ranks: Any) -> None:
    broadcaster, results = ranks([1])
    plan(broadcaster)
    with pytest.raises(errors.PublishError, match=r"rank 1: EpochFencedError.*rank 2"):
        broadcaster.broadcast(make_tensors(2), 2)
    for _ in range(2):
        rank, said = results.get(timeout=START_S)
        assert said == f"EpochFencedError: rank {rank}: rank 0 sends version 2, wanted 1"


def test_another_plan_is_refused_on_every_rank(ranks: Any) -> None:
    broadcaster, results = ranks([1])
    with pytest.raises(errors.PlanMismatchError, match="differs from that of rank 1, 2"):
        plan(broadcaster, [name.upper() for name in NAMES])
    for _ in range(2):
        rank, said = results.get(timeout=START_S)
        assert said.startswith(
            f"PlanMismatchError: rank {rank}: the plan differs from that of rank 0"
        )


def test_a_rank_that_never_comes_ends_the_wait(port: int) -> None:
    with pytest.raises(
        errors.TransferTimeoutError, match="plan of rank 1 did not come within 0.3 s"
    ):
        plan(make(0, "shm", port, timeout_s=0.3))


def test_a_bad_call_at_one_rank_costs_that_broadcast_only(port: int) -> None:
    said: dict[int, list[str]] = {0: [], 1: []}

    def run(rank: int) -> None:
        store = torch.distributed.TCPStore("127.0.0.1", port, None, False)
        one = Broadcaster(rank, 2, "shm", store, bucket_bytes=BUCKET_BYTES, timeout_s=6.0)
        plan(one)
        for version in (1, 2, 3):
            tensors = make_tensors(version if rank == 0 else 0)
            if version == rank + 1:  # rank 0 errs at version 1, rank 1 at version 2
                tensors[0] = tensors[0].double()
            try:
                one.broadcast(tensors, version)
                wanted = make_tensors(version)
                same = all(torch.equal(a, b) for a, b in zip(tensors, wanted, strict=True))
                said[rank].append("right" if same else "wrong")
            except (ValueError, errors.WeightSyncError) as error:
                said[rank].append(type(error).__name__)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert said == {
        0: ["ValueError", "PublishError", "right"],
        1: ["TransferTimeoutError", "ValueError", "right"],
    }


def test_over_rccl_ranks_agree_and_receive(port: int) -> None:
    found: dict[int, Any] = {}

    def run(rank: int) -> None:
        broadcaster = make(rank, "rccl", port, rccl_library=FAKE, rccl_runtime=FAKE)
        plan(broadcaster)
        tensors = make_tensors(7 if rank == 0 else 0)
        found[rank] = (broadcaster.broadcast(tensors, 7), tensors)
        broadcaster.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(WORLD)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Path(FAKE).exists()
    for rank in range(WORLD):
        result, tensors = found[rank]
        assert isinstance(result, BroadcastResult)
        assert result.num_bytes == sum(4 * a * b for a, b in SHAPES)
        assert all(torch.equal(a, b) for a, b in zip(tensors, make_tensors(7), strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t[:-1], "got 29 tensors, the plan has 30"),
        (lambda t: [t[0].double(), *t[1:]], "layer.0.weight is float64"),
        (lambda t: [t[0].T.contiguous(), *t[1:]], r"layer.0.weight is float32\(40, 50\)"),
        (lambda t: [torch.zeros(40, 50).T, *t[1:]], "layer.0.weight is not contiguous"),
    ],
    ids=["missing", "dtype", "shape", "strided"],
)
def test_tensors_that_are_not_the_plans_are_refused(port: int, change: Any, message: str) -> None:
    one = Broadcaster(
        0,
        1,
        "rccl",
        torch.distributed.TCPStore("127.0.0.1", port, None, False),
        rccl_library=FAKE,
        rccl_runtime=FAKE,
    )
    with pytest.raises(ValueError, match="without a plan"):
        one.broadcast(make_tensors(1), 1)
    plan(one)
    with pytest.raises(ValueError, match=message):
        one.broadcast(change(make_tensors(1)), 1)


def test_a_rank_outside_the_world_is_refused(port: int) -> None:
    store = torch.distributed.TCPStore("127.0.0.1", port, None, False)
    with pytest.raises(ValueError, match="rank 3 of 3"):
        Broadcaster(3, 3, "tcp", store)


def test_an_unknown_transport_is_refused(port: int) -> None:
    store = torch.distributed.TCPStore("127.0.0.1", port, None, False)
    with pytest.raises(ValueError, match="transport is 'rdma', wanted one of shm, tcp, rccl"):
        Broadcaster(0, 2, "rdma", store)  # type: ignore[arg-type]
