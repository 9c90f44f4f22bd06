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
    wanted = r"called off: rank 1: it wants version 1, sent is 2; rank 2: it wants version 1"
    with pytest.raises(errors.PublishError, match=wanted):
        broadcaster.broadcast(make_tensors(2), 2)
    for _ in range(2):
        rank, said = results.get(timeout=START_S)
        assert said == f"EpochFencedError: rank {rank}: rank 0 sends version 2, wanted 1"


def test_another_plan_is_refused_on_every_rank(ranks: Any) -> None:
    broadcaster, results = ranks([1])
    why = "tensor 0 is layer.0.weight float32(50, 40), at rank 0 LAYER.0.WEIGHT float32(50, 40)"
    with pytest.raises(errors.PlanMismatchError) as raised:
        plan(broadcaster, [name.upper() for name in NAMES])
    differ = f"the ranks' plans differ: rank 1: {why}; rank 2: {why}"
    assert str(raised.value) == f"rank 0: {differ}"
    for _ in range(2):
        rank, said = results.get(timeout=START_S)
        assert said == f"PlanMismatchError: rank {rank}: {differ}"


def at_each_rank(port: int, act: Any, world: int = WORLD, **settings: Any) -> list[str]:
    """What `act(broadcaster, rank)` raises at each rank, in threads; empty: nothing."""
    said = [""] * world

    def run(rank: int) -> None:
        try:
            store = torch.distributed.TCPStore("127.0.0.1", port, None, False)
            more = {"bucket_bytes": BUCKET_BYTES, "timeout_s": START_S} | settings
            act(Broadcaster(rank, world, "shm", store, **more), rank)
        except (ValueError, errors.WeightSyncError) as error:
            said[rank] = f"{type(error).__name__}: {error}"

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return said


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda names, shapes, dtypes: dtypes.__setitem__(2, "int32"),
         "tensor 2 is layer.2.weight int32(52, 40), at rank 0 layer.2.weight float32(52, 40)"),
        (lambda names, shapes, dtypes: shapes.__setitem__(3, (53, 41)),
         "tensor 3 is layer.3.weight float32(53, 41), at rank 0 layer.3.weight float32(53, 40)"),
        (lambda names, shapes, dtypes: [part.pop() for part in (names, shapes, dtypes)],
         "tensor 29 is missing, at rank 0 layer.29.weight float32(79, 40)"),
        (lambda names, shapes, dtypes: dtypes.__setitem__(0, "float3"),
         "it has no plan: tensor layer.0.weight has dtype float3"),
        (lambda names, shapes, dtypes: dtypes.pop(), "it has no plan: zip() argument 3 is shorter"),
    ],
    ids=["dtype", "shape", "missing", "unplannable", "short_list"],
)  # fmt: skip
def test_every_rank_hears_what_differs_at_which(port: int, change: Any, why: str) -> None:
    def act(broadcaster: Broadcaster, rank: int) -> None:
        given = (list(NAMES), list(SHAPES), ["float32"] * len(NAMES))
        if rank == 1:
            change(*given)
        broadcaster.plan(*given)

    said = at_each_rank(port, act)
    for rank in (0, 2):
        assert (
            f"PlanMismatchError: rank {rank}: the ranks' plans differ: rank 1: {why}"
            in (said[rank])
        )
    assert said[1].startswith(("PlanMismatchError: rank 1", "ValueError: "))


def test_another_bucket_size_is_named(port: int) -> None:
    def act(broadcaster: Broadcaster, rank: int) -> None:
        if rank == 2:
            store = torch.distributed.TCPStore("127.0.0.1", port, None, False)
            broadcaster = Broadcaster(2, WORLD, "shm", store, bucket_bytes=65536)
        plan(broadcaster)

    for rank, said in enumerate(at_each_rank(port, act)):
        assert said == (
            f"PlanMismatchError: rank {rank}: the ranks' plans differ: "
            "rank 2: bucket_bytes is 65536, at rank 0 32768"
        )


def test_a_rank_that_never_comes_ends_the_wait(port: int) -> None:
    with pytest.raises(
        errors.TransferTimeoutError, match="plan of rank 1 did not come within 0.3 s"
    ):
        plan(make(0, "shm", port, timeout_s=0.3))


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_bad_call_at_one_rank_is_heard_by_all_and_costs_that_broadcast_only(
    port: int, culprit: int
) -> None:
    heard: list[list[str]] = [[] for _ in range(WORLD)]

    def act(broadcaster: Broadcaster, rank: int) -> None:
        plan(broadcaster)
        for version in (1, 2):
            tensors = make_tensors(version if rank == 0 else 0)
            if version == 1 and rank == culprit:
                tensors[0] = tensors[0].double()
            before = [tensor.clone() for tensor in tensors]
            try:
                broadcaster.broadcast(tensors, version)
                wanted = make_tensors(version)
            except (ValueError, errors.WeightSyncError) as error:
                heard[rank].append(f"{type(error).__name__}: {error}")
                wanted = before
            assert all(torch.equal(a, b) for a, b in zip(tensors, wanted, strict=True))

    assert at_each_rank(port, act) == [""] * WORLD
    own = "ValueError: tensor layer.0.weight is float64(50, 40), planned as float32(50, 40)"
    for rank in range(WORLD):
        (said,) = heard[rank]
        who = "" if rank == 0 else f"rank {rank}: "
        off = f"PublishError: {who}version 1 was called off: rank {culprit}: {own}"
        assert said == (own if rank == culprit else off)


def test_a_rank_that_stays_away_is_named_to_the_others(port: int) -> None:
    def act(broadcaster: Broadcaster, rank: int) -> None:
        plan(broadcaster)
        if rank != 1:
            broadcaster.broadcast(make_tensors(1), 1)

    said = at_each_rank(port, act, timeout_s=6.0)
    assert said[0] == (
        "PublishError: version 1 was called off: rank 1: it did not come within 6.0 s"
    )
    assert said[2] == f"PublishError: rank 2: {said[0].removeprefix('PublishError: ')}"


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
        (lambda t: [t[0].to("meta"), *t[1:]], "layer.0.weight is on meta"),
        (lambda t: [b"weights", *t[1:]], "layer.0.weight is a bytes"),
    ],
    ids=["missing", "dtype", "shape", "strided", "meta", "no_tensor"],
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
    with pytest.raises((ValueError, TypeError), match=message):
        one.broadcast(change(make_tensors(1)), 1)
    for version in (-1, 2**63, 1.5):
        with pytest.raises((ValueError, TypeError), match=f"version is {version}"):
            one.broadcast(make_tensors(1), version)  # type: ignore[arg-type]


def test_a_rank_outside_the_world_is_refused(port: int) -> None:
    store = torch.distributed.TCPStore("127.0.0.1", port, None, False)
    with pytest.raises(ValueError, match="rank 3 of 3"):
        Broadcaster(3, 3, "tcp", store)


def test_an_unknown_transport_is_refused(port: int) -> None:
    store = torch.distributed.TCPStore("127.0.0.1", port, None, False)
    with pytest.raises(ValueError, match="transport is 'rdma', wanted one of shm, tcp, rccl"):
        Broadcaster(0, 2, "rdma", store)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bucket_bytes": 0}, "bucket_bytes is 0: Input should be greater than 0"),
        ({"num_buffers": 9}, "num_buffers is 9"),
        ({"timeout_s": 0.0}, "timeout_s is 0.0, wanted above 0"),
        ({"world": 66}, "world is 66: tcp serves 64 ranks beside rank 0"),
    ],
    ids=["bucket", "buffers", "timeout", "world"],
)
def test_settings_out_of_range_are_refused(
    port: int, settings: dict[str, Any], message: str
) -> None:
    store = torch.distributed.TCPStore("127.0.0.1", port, None, False)
    with pytest.raises(ValueError, match=message):
        Broadcaster(0, settings.pop("world", 2), "tcp", store, **settings)
