"""How fast weights are packed and sent, beside what the machine can copy at all.

`--quick` stays under a minute; `--json PATH` writes rows {metric, value, unit, baseline, ratio,
repeats, min, max}. Rows: packing against one memcpy of as many bytes; a transfer through shared memory
and over TCP to one and to two processes; torch's gloo broadcast to one process, as the baseline that
needs no code of ours. Tensors have the sizes of Qwen3-30B-A3B's experts.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

_NUM_BUFFERS = 2
_BUCKET_BYTES = 64 * 2**20
_EXPERT_ELEMENTS = 768 * 2048
_TIMEOUT_S = 60.0


def _plan(total_bytes: int) -> Any:
    from weightsync.plan import TensorSpec, make_plan

    count = max(1, total_bytes // (_EXPERT_ELEMENTS * 2))
    specs = [TensorSpec(f"expert.{i}", (_EXPERT_ELEMENTS,), "bfloat16") for i in range(count)]
    return make_plan(specs, _BUCKET_BYTES)


def _tensors(plan: Any) -> list[Any]:
    import torch

    return [torch.ones(spec.shape, dtype=torch.bfloat16) for spec in plan.tensors]


def _times(call: Callable[[], float], repeats: int) -> list[float]:
    call()  # first touch of the memory
    return [call() for _ in range(repeats)]


def _timed(call: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    call()
    return time.perf_counter() - started_s


def _row(
    metric: str, num_bytes: int, times_s: list[float], base: tuple[str, float]
) -> dict[str, Any]:
    rates = sorted(num_bytes / t / 1e9 for t in times_s)
    value = statistics.median(rates)
    return {
        "metric": metric,
        "value": round(value, 3),
        "unit": "GB/s",
        "baseline": f"{base[0]} {base[1]:.2f} GB/s" if base[1] else "",
        "ratio": round(value / base[1], 3) if base[1] else 1.0,
        "repeats": len(rates),
        "min": round(rates[0], 3),
        "max": round(rates[-1], 3),
    }


def _bench_packing(total_bytes: int, repeats: int) -> list[dict[str, Any]]:
    """Packing every bucket of a plan, against memcpy of the same bytes in bucket-sized pieces."""
    import torch

    from weightsync import _core
    from weightsync.transports import pieces_of

    plan = _plan(total_bytes)
    tensors = _tensors(plan)
    bucket = torch.zeros(plan.largest_bucket, dtype=torch.uint8)
    view = memoryview(bucket.numpy())
    source = torch.ones(plan.largest_bucket, dtype=torch.uint8)

    def memcpy() -> float:
        return sum(_timed(lambda: bucket.copy_(source)) for _ in plan.buckets)

    def pack(with_checksum: bool) -> float:
        return _timed(
            lambda: [
                _core.pack(pieces_of(plan, tensors, i), view, with_checksum)
                for i in range(len(plan.buckets))
            ]
        )

    base = _times(memcpy, repeats)
    memcpy_bytes = plan.largest_bucket * len(plan.buckets)
    rate = statistics.median(memcpy_bytes / t / 1e9 for t in base)
    total = plan.total_bytes
    plain = _times(lambda: pack(False), repeats)
    summed = _times(lambda: pack(True), repeats)
    return [
        _row("memcpy", memcpy_bytes, base, ("", 0.0)),
        _row("pack", total, plain, ("memcpy", rate)),
        _row("pack_with_checksum", total, summed, ("memcpy", rate)),
    ]


def _receive(index: int, total_bytes: int, endpoints: Any, ready: Barrier) -> None:
    """A receiving process: copies every bucket into tensors of its own, as a loader does."""
    import torch

    from weightsync.transports import open_receiver, tensors_of

    torch.set_num_threads(1)
    plan = _plan(total_bytes)
    own = _tensors(plan)
    epoch = 0
    while (endpoint := endpoints.get(timeout=_TIMEOUT_S)) is not None:
        epoch += 1
        receiver = open_receiver(endpoint, epoch, index, _TIMEOUT_S)
        ready.wait(_TIMEOUT_S)
        for number, bucket in enumerate(plan.buckets):
            data = receiver.next(plan.label(number), _TIMEOUT_S)
            mine = own[bucket.first : bucket.first + len(bucket.offsets)]
            for tensor, (_, source) in zip(mine, tensors_of(plan, number, data), strict=True):
                tensor.copy_(source)
            receiver.release()
        receiver.verified()
        del receiver, data, source


def _bench_transport(
    transport: str, total_bytes: int, repeats: int, num_receivers: int, memcpy_rate: float
) -> dict[str, Any]:
    """From the first bucket's packing to the last receiver's word, checksums on."""
    from weightsync.config import WeightSyncConfig
    from weightsync.transports import open_sender, pieces_of

    config = WeightSyncConfig(
        transport=transport, bucket_bytes=_BUCKET_BYTES, num_buffers=_NUM_BUFFERS
    )
    plan = _plan(total_bytes)
    tensors = _tensors(plan)
    context = multiprocessing.get_context("spawn")
    ready = context.Barrier(num_receivers + 1)
    endpoints = [context.Queue() for _ in range(num_receivers)]
    receivers = [
        context.Process(target=_receive, args=(index, total_bytes, endpoints[index], ready))
        for index in range(num_receivers)
    ]
    for process in receivers:
        process.start()
    times_s = []
    for epoch in range(1, repeats + 2):
        sender, endpoint = open_sender(config, plan, epoch, num_receivers)
        for queue in endpoints:
            queue.put(endpoint)
        ready.wait(_TIMEOUT_S)
        started_s = time.perf_counter()
        for index in range(len(plan.buckets)):
            sender.send(pieces_of(plan, tensors, index), plan.label(index), _TIMEOUT_S)
        sender.finish(_TIMEOUT_S)
        times_s.append(time.perf_counter() - started_s)
        failed = [sender.error(i) for i in range(num_receivers) if sender.error(i)]
        sender.close()
        if failed:
            raise RuntimeError(f"a receiver failed: {failed}")
    for queue in endpoints:
        queue.put(None)
    for process in receivers:
        process.join(_TIMEOUT_S)
    return _row(
        f"{transport}_to_{num_receivers}", plan.total_bytes, times_s[1:], ("memcpy", memcpy_rate)
    )


def _gloo(rank: int, path: str, total_bytes: int, rounds: int, results: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    tensors = _tensors(_plan(total_bytes))
    times_s = []
    for _ in range(rounds):
        dist.barrier()
        started_s = time.perf_counter()
        for tensor in tensors:
            dist.broadcast(tensor, src=0)
        dist.barrier()
        times_s.append(time.perf_counter() - started_s)
    if rank == 0:
        results.put(times_s[1:])
    dist.destroy_process_group()


def _bench_gloo(total_bytes: int, repeats: int, memcpy_rate: float) -> dict[str, Any]:
    """What update_weights_from_distributed would use on a machine without an accelerator."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (str(Path(folder, "store")), total_bytes, repeats + 1, results)
        ranks = [context.Process(target=_gloo, args=(rank, *arguments)) for rank in range(2)]
        for process in ranks:
            process.start()
        times_s = results.get(timeout=_TIMEOUT_S)
        for process in ranks:
            process.join(_TIMEOUT_S)
    return _row(
        "gloo_broadcast_to_1", _plan(total_bytes).total_bytes, times_s, ("memcpy", memcpy_rate)
    )


def main() -> None:
    """Prints the table, and writes it where --json says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="256 MB instead of 1 GB")
    parser.add_argument("--json", type=Path, help="write the rows there")
    arguments = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    total_bytes, repeats = (2**28, 3) if arguments.quick else (2**30, 5)
    rows = _bench_packing(total_bytes, repeats)
    rate = rows[0]["value"]
    rows += [
        _bench_transport(transport, total_bytes, repeats, count, rate)
        for transport in ("shm", "tcp")
        for count in (1, 2)
    ]
    rows.append(_bench_gloo(total_bytes, repeats, rate))
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, 1 thread a process; "
        f"bfloat16[{_EXPERT_ELEMENTS}] x {len(_plan(total_bytes).tensors)}, "
        f"buckets of {_BUCKET_BYTES >> 20} MiB, Python {platform.python_version()}"
    )
    for row in rows:
        print(
            f"{row['metric']:22} {row['value']:7.2f} {row['unit']}  x{row['ratio']:.2f} of memcpy "
            f"({row['repeats']} repeats, {row['min']:.2f}..{row['max']:.2f})"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
