"""Validates tasks: the gold patch must earn 1.0 and the empty one 0.0, every time.

Owner: rollout/tasks.
  python -m rollout.tasks.validate --index FILE --broker HOST:PORT --json REPORT

Each task runs `--repeats` times with each patch, in fresh sandboxes, `--concurrency` at once.
Whatever else happens quarantines the task with its reason. A failure of the broker or of a
sandbox is tried again, at most twice: runs have no side effects, so that is safe.
Exit status: 0 all valid; 1 some quarantined; 2 nothing could be validated.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from proto import serving
from rollout.tasks.grading import Grade
from rollout.tasks.harbor_task import IndexEntry, TaskError, read_index
from rollout.tasks.trial_run import PATCHES, InfrastructureError, load_task, run_task
from sandbox.client import SandboxClient

WANTED = {"gold": 1.0, "empty": 0.0}
_MAX_RETRIES = 2
_BROKER_TIMEOUT_S = 10.0

Run = Callable[[str], Awaitable[Grade]]


@dataclass(frozen=True)
class Verdict:
    """What the runs of one task say."""

    task_id: str
    valid: bool
    reason: str
    """Empty for a valid task."""
    rewards: dict[str, list[float | None]]
    """By patch, in order of the runs."""
    duration_s: float


async def judge(
    task_id: str, run: Run, repeats: int, clock: Callable[[], float] = time.monotonic
) -> Verdict:
    """Runs a task `repeats` times with each patch; `run(patch)` gives one grade."""
    started = clock()
    rewards: dict[str, list[float | None]] = {patch: [] for patch in PATCHES}
    reason = ""
    for patch in PATCHES:
        for number in range(1, repeats + 1):
            try:
                grade = await _with_retries(run, patch)
            except InfrastructureError as error:
                grade = Grade(None, f"infrastructure: {error}")
            except TaskError as error:
                grade = Grade(None, str(error))
            rewards[patch].append(grade.reward)
            if grade.reward != WANTED[patch] and not reason:
                reason = (
                    f"{patch} patch, run {number}: reward {grade.reward}, wanted {WANTED[patch]}: "
                    f"{grade.detail}"
                )
    return Verdict(task_id, not reason, reason, rewards, clock() - started)


async def validate(
    entries: Sequence[IndexEntry], broker: str, repeats: int, concurrency: int
) -> list[Verdict]:
    """Verdicts in the order of `entries`. Raises TaskError if the broker does not serve."""
    if not await serving.is_serving(broker, timeout_s=_BROKER_TIMEOUT_S):
        raise TaskError(f"no sandbox broker serves at {broker}; start one, or correct --broker")
    slots = asyncio.Semaphore(concurrency)

    async with serving.dial(broker) as channel:
        client = SandboxClient(channel)

        async def one(entry: IndexEntry) -> Verdict:
            async with slots:
                try:
                    task = load_task(entry)
                except TaskError as error:
                    return Verdict(entry.task_id, False, str(error), {}, 0.0)
                verdict = await judge(
                    entry.task_id, lambda patch: run_task(client, task, patch), repeats
                )
            state = "valid" if verdict.valid else f"QUARANTINED: {verdict.reason}"
            print(f"{verdict.task_id}: {state} ({verdict.duration_s:.1f} s)", flush=True)
            return verdict

        return list(await asyncio.gather(*map(one, entries)))


def write_report(path: Path, verdicts: Sequence[Verdict], repeats: int) -> None:
    """Writes the JSON report that quarantine.py reads, atomically."""
    report = {
        "repeats": repeats,
        "num_valid": sum(v.valid for v in verdicts),
        "num_quarantined": sum(not v.valid for v in verdicts),
        "tasks": [
            {
                "task_id": v.task_id,
                "valid": v.valid,
                "reason": v.reason,
                "rewards": v.rewards,
                "duration_s": round(v.duration_s, 3),
            }
            for v in verdicts
        ],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_name(path.name + ".new")
    staging.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    os.replace(staging, path)


async def _with_retries(run: Run, patch: str) -> Grade:
    for _ in range(_MAX_RETRIES):
        try:
            return await run(patch)
        except InfrastructureError as error:
            print(f"again: {error}", file=sys.stderr)
    return await run(patch)


def main(argv: list[str] | None = None) -> int:
    """Command line; prints a line a task, then the sum."""
    parser = argparse.ArgumentParser(prog="python -m rollout.tasks.validate", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--index", type=Path, required=True, help="index.json of the tasks")
    parser.add_argument("--broker", required=True, help="HOST:PORT of a sandbox broker")
    parser.add_argument("--json", type=Path, required=True, help="report to write")
    parser.add_argument("--repeats", type=int, default=3, help="runs with each patch")
    parser.add_argument("--concurrency", type=int, default=2, help="tasks at once")
    args = parser.parse_args(argv)
    if args.repeats < 1 or args.concurrency < 1:
        parser.error("--repeats and --concurrency must be at least 1")
    try:
        entries = read_index(args.index)
        verdicts = asyncio.run(validate(entries, args.broker, args.repeats, args.concurrency))
        write_report(args.json, verdicts, args.repeats)
    except (TaskError, serving.ServingError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    bad = [verdict for verdict in verdicts if not verdict.valid]
    print(f"{len(verdicts) - len(bad)} of {len(verdicts)} tasks are valid: {args.json}")
    if bad:
        first = f"{bad[0].task_id}: {bad[0].reason}"
        print(f"error: {len(bad)} tasks are quarantined; first {first}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
