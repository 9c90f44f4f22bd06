"""A broadcast by the real library between the GPUs that there are.

With one GPU the world is one rank: that shows that the library is driven without an error and that
packing reads the right bytes, and says nothing about links. Needs a GPU; not part of CI.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from weightsync import _core
from weightsync.plan import Plan, TensorSpec, make_plan
from weightsync.transports import pieces_of

TIMEOUT_S = 60.0
SHAPES = [(1000, 257), (3,), (2048, 300), (1,), (777, 513)] * 4


def make_tensors(device: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(shape, generator=generator).to(torch.bfloat16) for shape in SHAPES]
    return [tensor.to(f"cuda:{device}") for tensor in tensors]


def buckets(plan: Plan, tensors: list[torch.Tensor]) -> list[Any]:
    return [
        (pieces_of(plan, tensors, index), bucket.num_bytes, plan.label(index))
        for index, bucket in enumerate(plan.buckets)
    ]


def test_every_gpu_gets_the_tensors_of_the_first() -> None:
    world = torch.cuda.device_count()
    assert world > 0, "no GPU: this test is tagged gpu"
    plan = make_plan(
        [TensorSpec(f"t{i}", shape, "bfloat16") for i, shape in enumerate(SHAPES)], 4 * 2**20
    )
    api = _core.RcclApi()
    unique_id = api.unique_id()
    found: dict[int, list[torch.Tensor]] = {}
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            own = make_tensors(rank, seed=1 if rank == 0 else 2)
            torch.cuda.synchronize(rank)
            group = _core.RcclGroup(
                api,
                unique_id=unique_id,
                rank=rank,
                world=world,
                device=rank,
                bucket_bytes=plan.largest_bucket,
                num_buffers=2,
                with_checksums=True,
                timeout_s=TIMEOUT_S,
            )
            group.agree(bytes.fromhex(plan.digest), TIMEOUT_S)
            for version in (1, 2, 3):
                times = group.broadcast(buckets(plan, own), version, TIMEOUT_S)
                assert [t[0] for t in times] == [b.num_bytes for b in plan.buckets]
            found[rank] = [tensor.cpu() for tensor in own]
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    wanted = [tensor.cpu() for tensor in make_tensors(0, seed=1)]
    for rank in range(world):
        assert all(torch.equal(a, b) for a, b in zip(found[rank], wanted, strict=True)), rank
