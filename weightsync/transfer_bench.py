"""What weightsync_bench measures of transfers: jobs that several processes run in step.

Owner: `run` starts rank 0, which sends, and the ranks that receive; every rank holds `total_bytes`
in one arena and makes each job's tensors as views of it. Rank 0 times from a barrier of the job's
ranks to their next one, so that each way is timed to the last receiver's last byte in its tensors.

Invariants: the ways send the same bytes from tensors to tensors; receivers clear theirs before a
job and compare a checksum with the sender's after it: a transfer that was wrong is no figure.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

    from weightsync.plan import TensorSpec

Way = Literal["shm", "tcp", "gloo", "disk"]

_TIMEOUT_S = 120.0
ALIGNMENT = 64
PROCESS_BYTES = 400 * 2**20
"""A rank without its weights: the interpreter, torch, buffers."""


@dataclass(frozen=True, slots=True)
class Job:
    """One way to send all bytes in `num_tensors` tensors of one size to `num_receivers` ranks."""

    way: Way
    num_receivers: int
    num_tensors: int
    bucket_bytes: int
    checksums: bool = True
    local_sockets: bool = True


@dataclass(frozen=True, slots=True)
class Measured:
    """Wall seconds of each repeat, and the CPU seconds that all ranks together spent on one."""

    times_s: list[float]
    cpu_s: float


def free_bytes() -> int:
    """Memory that this machine can still give without swapping anything out."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    (kib,) = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(kib) * 1024


def specs_of(total_bytes: int, num_tensors: int) -> list[TensorSpec]:
    """bfloat16 tensors that together are as near below `total_bytes` as alignment allows."""
    from weightsync.plan import TensorSpec

    elements = total_bytes // num_tensors // ALIGNMENT * ALIGNMENT // 2
    return [TensorSpec(f"layer.{i}.weight", (elements,), "bfloat16") for i in range(num_tensors)]


def tensors_in(arena: torch.Tensor, specs: Sequence[TensorSpec]) -> list[torch.Tensor]:
    """Views of a flat bfloat16 arena, one behind the other."""
    size = specs[0].num_elements
    return [arena[i * size : (i + 1) * size] for i in range(len(specs))]


def run(jobs: Sequence[Job], total_bytes: int, repeats: int) -> list[Measured]:
    """Runs the jobs one after the other; each is done once before it is measured.

    Raises RuntimeError when a rank failed.
    """
    world = 1 + max(job.num_receivers for job in jobs)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(
                target=_rank, args=(r, world, folder, jobs, total_bytes, repeats, results)
            )
            for r in range(world)
        ]
        for process in ranks:
            process.start()
        measured: list[Measured] = []
        while len(measured) < len(jobs):
            try:
                measured.append(results.get(timeout=1.0))
            except multiprocessing.queues.Empty:  # type: ignore[attr-defined]
                if any(process.exitcode for process in ranks):
                    break
        for process in ranks:
            process.join(_TIMEOUT_S if len(measured) == len(jobs) else 0)
            process.kill()
    if len(measured) < len(jobs):
        raise RuntimeError(f"a rank failed in {jobs[len(measured)]}; its error is above")
    return measured


def _rank(
    rank: int,
    world: int,
    folder: str,
    jobs: Sequence[Job],
    total_bytes: int,
    repeats: int,
    results: Any,
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=_TIMEOUT_S),
    )
    counts = sorted({job.num_receivers for job in jobs})
    groups = {count: dist.new_group(list(range(count + 1))) for count in counts}
    arena = torch.zeros(total_bytes // 2, dtype=torch.bfloat16)
    for number, job in enumerate(jobs):
        if rank <= job.num_receivers:
            arena.view(torch.uint8).fill_(0 if rank else number + 1)
            way = _way(job, rank, folder, arena, groups[job.num_receivers], number)
            measured = _measure(way, groups[job.num_receivers], repeats)
            _compare(arena, rank, groups[job.num_receivers], job)
            if rank == 0:
                results.put(measured)
        dist.barrier()
    dist.destroy_process_group()


def _measure(way: Callable[[], None], group: Any, repeats: int) -> Measured:
    import torch
    import torch.distributed as dist

    times_s: list[float] = []
    cpu_s = 0.0
    for repeat in range(repeats + 1):
        dist.barrier(group)
        if repeat == 1:
            cpu_s = _cpu_s()
        started_s = time.perf_counter()
        way()
        dist.barrier(group)
        times_s.append(time.perf_counter() - started_s)
    total = torch.tensor([(_cpu_s() - cpu_s) / repeats], dtype=torch.float64)
    dist.all_reduce(total, group=group)
    return Measured(times_s[1:], float(total))


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _compare(arena: torch.Tensor, rank: int, group: Any, job: Job) -> None:
    import torch
    import torch.distributed as dist

    from weightsync import _core

    used = job.num_tensors * specs_of(arena.nbytes, job.num_tensors)[0].num_bytes
    own = _core.checksum(memoryview(arena.view(torch.uint8)[:used].numpy())) >> 1
    wanted = torch.tensor([own])
    dist.broadcast(wanted, 0, group=group)
    if int(wanted) != own:
        raise RuntimeError(f"rank {rank} received other bytes than rank 0 sent: {job}")


def _way(
    job: Job, rank: int, folder: str, arena: torch.Tensor, group: Any, number: int
) -> Callable[[], None]:
    """What one repeat does at this rank."""
    specs = specs_of(arena.nbytes, job.num_tensors)
    tensors = tensors_in(arena, specs)
    if job.way == "gloo":
        return lambda: _gloo(tensors, group)
    if job.way == "disk":
        return lambda: _disk(specs, tensors, rank, group)
    return _ours(job, rank, folder, specs, tensors, number)


def _ours(
    job: Job,
    rank: int,
    folder: str,
    specs: Sequence[TensorSpec],
    tensors: Sequence[torch.Tensor],
    number: int,
) -> Callable[[], None]:
    import torch.distributed as dist

    from weightsync.broadcaster import Broadcaster
    from weightsync.config import TcpConfig

    world = job.num_receivers + 1
    assert job.way in ("shm", "tcp")
    broadcaster = Broadcaster(
        rank,
        world,
        job.way,
        dist.FileStore(f"{folder}/job{number}", world),
        bucket_bytes=job.bucket_bytes,
        checksums=job.checksums,
        tcp=TcpConfig(local_sockets=job.local_sockets),
        timeout_s=_TIMEOUT_S,
    )
    broadcaster.plan([s.name for s in specs], [s.shape for s in specs], [s.dtype for s in specs])
    return lambda: _discard(broadcaster.broadcast(tensors, 1))


def _discard(_result: object) -> None:
    """Makes a call one that returns nothing."""


def _gloo(tensors: Sequence[torch.Tensor], group: Any) -> None:
    import torch.distributed as dist

    for tensor in tensors:
        dist.broadcast(tensor, 0, group=group)


def _disk(
    specs: Sequence[TensorSpec], tensors: Sequence[torch.Tensor], rank: int, group: Any
) -> None:
    """safetensors in memory (/dev/shm), the fastest disk there is, and read as SGLang reads it."""
    import torch.distributed as dist
    from safetensors import safe_open
    from safetensors.torch import save_file

    path = Path("/dev/shm", f"weightsync_bench_{os.getuid()}.safetensors")
    if rank == 0:
        save_file({s.name: t for s, t in zip(specs, tensors, strict=True)}, path)
    dist.barrier(group)
    if rank != 0:
        with safe_open(path, framework="pt") as file:
            for spec, tensor in zip(specs, tensors, strict=True):
                tensor.copy_(file.get_tensor(spec.name))
    dist.barrier(group)
    if rank == 0:
        path.unlink()
