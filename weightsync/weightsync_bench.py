"""How fast weights are packed and sent, beside what the machine can copy at all, and beside others.

Rows: packing against one memcpy of as many bytes; a whole broadcast over `shm` and over `tcp` to 1, 2
and 4 processes, checksums on, its connections and buffers included; both without checksums, and tcp
without the local sockets that it takes within a host; the same by torch's gloo, and
through a safetensors file in memory, which is the least that an update from disk does; the cost of
more and smaller tensors at equal bytes, in buckets twice as large, which the largest of them need. Tensors have the size of one of Qwen3-30B-A3B's experts,
where their number is not what varies. Every figure is from tensors of the sender to tensors of the
receivers, and what they received was compared.

`--quick` sends 256 MB instead of 1 GiB and stays under a minute; `--json PATH` writes rows {metric,
value, unit, baseline, ratio, repeats, min, max}.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weightsync.transfer_bench import Way

_BUCKET_BYTES = 8 * 2**20
_EXPERT_BYTES = 768 * 2048 * 2
_RECEIVERS = (1, 2, 4)
_TENSORS = (100, 1000, 5000, 20_000)


def _timed(call: Callable[[], object]) -> float:
    started_s = time.process_time()
    call()
    return time.process_time() - started_s


def _times(call: Callable[[], float], repeats: int) -> list[float]:
    call()  # first touch of the memory
    return [call() for _ in range(repeats)]


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


def bench_packing(total_bytes: int, repeats: int) -> list[dict[str, Any]]:
    """Packing every bucket of a plan, against memcpy of the same bytes; CPU seconds of both."""
    import torch

    from weightsync import _core
    from weightsync.plan import make_plan
    from weightsync.transfer_bench import specs_of, tensors_in
    from weightsync.transports import pieces_of

    specs = specs_of(total_bytes, max(1, total_bytes // _EXPERT_BYTES))
    plan = make_plan(specs, _BUCKET_BYTES)
    arena = torch.ones(total_bytes // 2, dtype=torch.bfloat16)
    tensors = tensors_in(arena, specs)
    target = torch.zeros_like(arena)
    view = memoryview(target.view(torch.uint8).numpy())
    ends = [0]
    for bucket in plan.buckets:
        ends.append(ends[-1] + bucket.num_bytes)

    def pack(with_checksum: bool) -> float:
        return _timed(
            lambda: [
                _core.pack(pieces_of(plan, tensors, i), view[ends[i] : ends[i + 1]], with_checksum)
                for i in range(len(plan.buckets))
            ]
        )

    def pack_row(name: str, with_checksum: bool) -> dict[str, Any]:
        times_s = _times(lambda: pack(with_checksum), repeats)
        return _row(name, plan.total_bytes, times_s, ("memcpy", rate))

    base = _times(lambda: _timed(lambda: target.copy_(arena)), repeats)
    rate = statistics.median(arena.nbytes / t / 1e9 for t in base)
    return [
        _row("memcpy", arena.nbytes, base, ("", 0.0)),
        pack_row("pack", False),
        pack_row("pack_with_checksum", True),
    ]


def bench_transfers(
    total_bytes: int, repeats: int, memcpy_rate: float, only: re.Pattern[str]
) -> list[dict[str, Any]]:
    """Every way to 1, 2 and 4 receivers, then ours with more and smaller tensors."""
    from weightsync.transfer_bench import Job, run, specs_of

    experts = total_bytes // _EXPERT_BYTES
    jobs: dict[str, Job] = {}
    ours: tuple[Way, ...] = ("shm", "tcp")
    others: tuple[Way, ...] = ("gloo", "disk")
    for count in _RECEIVERS:
        for way in ours + others:
            jobs[f"{way}_to_{count}"] = Job(way, count, experts, _BUCKET_BYTES)
        for way in ours:
            name = f"{way}_to_{count}_without_checksums"
            jobs[name] = Job(way, count, experts, _BUCKET_BYTES, checksums=False)
        name = f"tcp_to_{count}_without_local_sockets"
        jobs[name] = Job("tcp", count, experts, _BUCKET_BYTES, local_sockets=False)
    for count in _TENSORS:
        for way in ours + others:
            jobs[f"{way}_to_1_of_{count}_tensors"] = Job(way, 1, count, 2 * _BUCKET_BYTES)
    jobs = {name: job for name, job in jobs.items() if only.search(name)}
    rows = []
    for (name, job), measured in zip(
        jobs.items(), run(list(jobs.values()), total_bytes, repeats), strict=True
    ):
        num_bytes = sum(spec.num_bytes for spec in specs_of(total_bytes, job.num_tensors))
        rows.append(_row(name, num_bytes, measured.times_s, ("memcpy", memcpy_rate)))
    return rows


def bench_engine(repeats: int) -> list[dict[str, Any]]:
    """A real SGLang server by every transport, whole publications: ours against its own from disk."""
    import asyncio

    from weightsync.engine_bench import TRANSPORTS, run

    num_bytes, times = asyncio.run(run(repeats))
    rate = statistics.median(num_bytes / t / 1e9 for t in times["disk"].publish_s)
    rows = []
    for transport in TRANSPORTS:
        measured = times[transport]
        for suffix, times_s in (("", measured.publish_s), ("_paused", measured.paused_s)):
            base = ("engine_disk", rate)
            rows.append(_row(f"engine_{transport}{suffix}", num_bytes, times_s, base))
    return rows


def bench_largest(reserve_gib: float) -> list[dict[str, Any]]:
    """The largest weights that a trainer can send to 1 and to 2 engines here, sent once.

    Each process holds them once, and nothing else grows with them: what is free, less the reserve for
    the rest of a run, is divided among the processes.
    """
    from weightsync.transfer_bench import PROCESS_BYTES, Job, free_bytes, run

    rows = []
    for count in (1, 2):
        free = free_bytes() - int(reserve_gib * 2**30) - (count + 1) * PROCESS_BYTES
        total_bytes = free // (count + 1) // 2**28 * 2**28
        if total_bytes <= 0:
            raise SystemExit(f"error: {free_bytes() >> 20} MiB are free: lower --reserve")
        jobs = [
            Job(way, count, total_bytes // _EXPERT_BYTES, _BUCKET_BYTES) for way in ("shm", "tcp")
        ]
        for job, measured in zip(jobs, run(jobs, total_bytes, 1), strict=True):
            seconds = round(measured.times_s[0], 2)
            rows.append(
                {
                    "metric": f"largest_by_{job.way}_to_{count}",
                    "value": round(total_bytes / 2**30, 2),
                    "unit": "GiB",
                    "baseline": f"sent in {seconds} s; {reserve_gib} GiB left to the rest",
                    "ratio": 1.0,
                    "repeats": 1,
                    "min": round(total_bytes / 2**30, 2),
                    "max": round(total_bytes / 2**30, 2),
                }
            )
    return rows


def main() -> None:
    """Prints the table, and writes it where --json says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="256 MB instead of 1 GiB")
    parser.add_argument(
        "--engine", action="store_true", help="instead: a real SGLang server, by every transport"
    )
    parser.add_argument(
        "--largest", action="store_true", help="instead: the largest weights that fit here"
    )
    parser.add_argument(
        "--reserve", type=float, default=4.0, help="GiB that --largest leaves to the rest"
    )
    parser.add_argument("--only", default="", help="transfers whose row's name matches this")
    parser.add_argument("--json", type=Path, help="write the rows there")
    arguments = parser.parse_args()
    if arguments.engine:
        rows = bench_engine(repeats=3)
        what = "one SGLang server, Qwen3-MoE of 1.3 GB in float32"
    elif arguments.largest:
        rows = bench_largest(arguments.reserve)
        what = "the largest that fits"
    else:
        import torch

        torch.set_num_threads(1)
        total_bytes, repeats = (2**28, 3) if arguments.quick else (2**30, 5)
        rows = bench_packing(total_bytes, repeats)
        only = re.compile(arguments.only)
        rows += bench_transfers(total_bytes, repeats, rows[0]["value"], only)
        what = f"{total_bytes >> 20} MiB"
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, 1 thread a process; {what} in buckets of "
        f"{_BUCKET_BYTES >> 20} MiB, Python {platform.python_version()}"
    )
    for row in rows:
        print(
            f"{row['metric']:30} {row['value']:7.2f} {row['unit']}  x{row['ratio']:.2f} of "
            f"{row['baseline'] or 'itself'} ({row['repeats']} repeats, {row['min']:.2f}.."
            f"{row['max']:.2f})"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
