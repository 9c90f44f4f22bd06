"""Latency and CPU of creating, running in and killing sandboxes, beside plain `unshare`.

    ./bazelw run //sandbox:sandbox_bench -- --quick --json out.json

Baseline of create + exec + kill: `unshare` with the same namespaces running `bash -c true`, with
no root file system, limits or output cap of its own. Baseline of exec: a plain subprocess.
CPU is the whole machine's, user and system, so it includes what the kernel does afterwards; on a
machine that does other work it is an upper bound.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from proto import serving
from sandbox import server
from sandbox.backends.local import LocalBackend
from sandbox.broker import SandboxBroker
from sandbox.client import SandboxClient
from sandbox.config import BrokerConfig

Row = dict[str, object]

_UNSHARE = ["unshare", "--pid", "--fork", "--kill-child", "--mount", "--net", "--ipc", "--uts"]
_COMMAND = "true"


def busy_cpu_s() -> float:
    """CPU that the machine has spent so far, in seconds."""
    user, nice, system, _, _, irq, soft = (
        int(value) for value in Path("/proc/stat").read_text().split()[1:8]
    )
    return (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK")


def percentile(values: list[float], share: float) -> float:
    """The value below which `share` of the values lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def rows_of(metric: str, values_ms: list[float], baseline_ms: list[float] | None) -> list[Row]:
    """p50 and p99 of one metric, with the baseline's when there is one."""
    rows: list[Row] = []
    for label, share in (("p50", 0.5), ("p99", 0.99)):
        value = percentile(values_ms, share)
        baseline = percentile(baseline_ms, share) if baseline_ms else None
        rows.append(
            {
                "metric": f"{metric}_{label}",
                "value": round(value, 3),
                "unit": "ms",
                "baseline": None if baseline is None else round(baseline, 3),
                "ratio": None if baseline is None else round(value / baseline, 3),
                "repeats": len(values_ms),
                "min": round(min(values_ms), 3),
                "max": round(max(values_ms), 3),
            }
        )
    return rows


def cpu_row(metric: str, cpu_ms: float, baseline_ms: float, repeats: int) -> Row:
    """CPU of one operation."""
    return {
        "metric": metric,
        "value": round(cpu_ms, 2),
        "unit": "ms",
        "baseline": round(baseline_ms, 2),
        "ratio": round(cpu_ms / baseline_ms, 3) if baseline_ms else None,
        "repeats": repeats,
        "min": None,
        "max": None,
    }


async def timed(times_ms: list[float], work: Awaitable[object]) -> object:
    """Awaits work and appends how long it took."""
    started = time.perf_counter()
    result = await work
    times_ms.append((time.perf_counter() - started) * 1e3)
    return result


def baseline(command: list[str], repeats: int) -> tuple[list[float], float]:
    """Latencies of a subprocess and the machine's CPU a run, both in ms."""
    times_ms: list[float] = []
    cpu = busy_cpu_s()
    for _ in range(repeats):
        started = time.perf_counter()
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
        times_ms.append((time.perf_counter() - started) * 1e3)
    return times_ms, (busy_cpu_s() - cpu) / repeats * 1e3


async def measure(client: SandboxClient, repeats: int, concurrency: int) -> list[Row]:
    """All rows against a running broker."""
    create: list[float] = []
    execute: list[float] = []
    kill: list[float] = []
    cpu = busy_cpu_s()
    for _ in range(repeats):
        started = time.perf_counter()
        lease = await client.acquire("host")
        create.append((time.perf_counter() - started) * 1e3)
        await timed(execute, client.exec(lease, _COMMAND))
        await timed(kill, client.release(lease))
    cycle_cpu_ms = (busy_cpu_s() - cpu) / repeats * 1e3
    cycle = [a + b + c for a, b, c in zip(create, execute, kill, strict=True)]

    lease = await client.acquire("host")
    repeated: list[float] = []
    cpu = busy_cpu_s()
    for _ in range(repeats):
        await timed(repeated, client.exec(lease, _COMMAND))
    exec_cpu_ms = (busy_cpu_s() - cpu) / repeats * 1e3
    python: list[float] = []
    for _ in range(max(5, repeats // 10)):
        await timed(python, client.exec(lease, "python3 -c pass"))
    await client.release(lease)

    plain, plain_cpu_ms = baseline(["bash", "-c", _COMMAND], repeats)
    bare, bare_cpu_ms = baseline([*_UNSHARE, "bash", "-c", _COMMAND], repeats)
    plain_python, _ = baseline(["/usr/bin/python3", "-c", "pass"], len(python))
    rate = await throughput(client, repeats, concurrency)
    return [
        *rows_of("create", create, None),
        *rows_of("first_exec", execute, None),
        *rows_of("kill", kill, None),
        *rows_of("create_exec_kill", cycle, bare),
        *rows_of("exec", repeated, plain),
        *rows_of("exec_python", python, plain_python),
        cpu_row("create_exec_kill_cpu", cycle_cpu_ms, bare_cpu_ms, repeats),
        cpu_row("exec_cpu", exec_cpu_ms, plain_cpu_ms, repeats),
        {
            "metric": f"sandboxes_per_s_at_{concurrency}",
            "value": round(rate, 1),
            "unit": "1/s",
            "baseline": round(1e3 / percentile(bare, 0.5), 1),
            "ratio": round(rate * percentile(bare, 0.5) / 1e3, 3),
            "repeats": repeats,
            "min": None,
            "max": None,
        },
    ]


async def throughput(client: SandboxClient, repeats: int, concurrency: int) -> float:
    """Whole cycles a second with `concurrency` callers."""
    left = iter(range(repeats))

    async def caller() -> None:
        for _ in left:
            lease = await client.acquire("host")
            await client.exec(lease, _COMMAND)
            await client.release(lease)

    started = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(concurrency)))
    return repeats / (time.perf_counter() - started)


async def with_broker(
    config: BrokerConfig, work: Callable[[SandboxClient], Awaitable[list[Row]]]
) -> list[Row]:
    """Runs work against a broker in this process."""
    broker = SandboxBroker(config, LocalBackend(config))
    await broker.start()
    running = server.make_server(broker, serving.ServingConfig())
    try:
        address = await running.start()
        async with serving.dial(address) as channel:
            return await work(SandboxClient(channel))
    finally:
        await running.stop(0)
        await broker.close()


def main(argv: list[str] | None = None) -> int:
    """Prints the table and writes the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="fewer repeats, well under a minute")
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--init-binary", type=Path, help="sandbox_init, if not the built one")
    args = parser.parse_args(argv)
    repeats = 100 if args.quick else 1000
    config = BrokerConfig(init_binary=args.init_binary)
    rows = asyncio.run(with_broker(config, lambda client: measure(client, repeats, 8)))
    print(f"device: {os.cpu_count()} x {platform.machine()}, load {os.getloadavg()[0]:.1f}")
    print(f"baseline: {' '.join(_UNSHARE)} bash -c {_COMMAND}; for exec: bash -c {_COMMAND}")
    header = ("metric", "value", "unit", "baseline", "ratio", "repeats", "min", "max")
    print("{:28} {:>9} {:4} {:>9} {:>7} {:>7} {:>8} {:>8}".format(*header))
    for row in rows:
        cells = ["" if row[key] is None else str(row[key]) for key in header]
        print("{:28} {:>9} {:4} {:>9} {:>7} {:>7} {:>8} {:>8}".format(*cells))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
