"""Brings what the services counted and recorded into `metrics/`, for the report.

Owner of `counters.json`, `restarts.json` and `overlap.json` there; `attempt_rows` owns
`attempts.jsonl`.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp

from launch.attempt_rows import write_attempt_rows
from launch.evaluation import load_evaluations
from launch.overlap import DecodedTurn, Timeline, measure
from launch.report.data import load_steps
from launch.run_directory import write_json
from proto import rollout_pb2, trajectory_pb2
from rollout.client import RolloutClient

if TYPE_CHECKING:
    from launch.deploy import Deployment

_HTTP_TIMEOUT_S = 10.0
_SETTLE_S = 2.5
"""More than twice the default interval at which the manager polls its engines."""
_SETTLE_TIMEOUT_S = 20.0
_ATTEMPTS_PER_FETCH = 1000


async def attempts(rollout: RolloutClient, metrics: Path) -> None:
    """Writes the finished training attempts."""
    write_attempt_rows(metrics, await rollout.list_attempts())


def rl_steps(metrics: Path) -> list[dict[str, Any]]:
    """Rows of metrics/rl.jsonl, those of the surviving lineage."""
    return load_steps(metrics / "rl.jsonl")


async def overlap(rollout: RolloutClient, metrics: Path, max_staleness: int) -> None:
    """Writes metrics/overlap.json (launch/overlap.py defines it) from every attempt's turns."""
    steps = rl_steps(metrics)
    timeline = Timeline(steps)
    summaries = await every_attempt(rollout, load_evaluations(metrics))
    ids = [
        s.ref.attempt_id
        for s in summaries
        if timeline.touches(
            s.ref.started_at.ToNanoseconds() / 1e9, s.ref.finished_at.ToNanoseconds() / 1e9
        )
    ]
    turns = []
    for start in range(0, len(ids), _ATTEMPTS_PER_FETCH):
        part = ids[start : start + _ATTEMPTS_PER_FETCH]
        turns += [decoded_turn(t) async for t in rollout.fetch_turns(part, omit_content=True)]
    write_json(metrics / "overlap.json", measure(steps, turns, max_staleness))


def decoded_turn(turn: trajectory_pb2.TurnRecord) -> DecodedTurn:
    """When a durable turn was in an engine, and what it sampled."""
    timings = turn.timings
    received_at = timings.received_at.ToNanoseconds() / 1e9
    began_at = received_at + timings.queued.ToNanoseconds() / 1e9
    ended_at = began_at + timings.generating.ToNanoseconds() / 1e9
    return DecodedTurn(began_at, ended_at, max((s.end for s in turn.version_spans), default=0))


async def counters(rollout: RolloutClient, deployment: Deployment, metrics: Path) -> None:
    """Writes what each side counted: {what: {side: count}}."""
    write_json(
        metrics / "counters.json",
        await compare_counters(rollout, deployment, load_evaluations(metrics)),
    )


async def restarts(rollout: RolloutClient, deployment: Deployment, metrics: Path) -> None:
    """Writes what makes the counts of counters.json differ: {processes: {name: times started again},
    num_attempts_tried_again}. A process counts from its own start, and the harness only tells the
    calls of the try that ended an attempt.
    """
    again = dict(deployment.supervisor.restarts())
    again |= {e.name: e.num_restarts for e in (await rollout.get_status()).engines}
    summaries = await every_attempt(rollout, load_evaluations(metrics))
    write_json(
        metrics / "restarts.json",
        {
            "processes": {name: times for name, times in again.items() if times},
            "num_attempts_tried_again": sum(s.num_tries > 1 for s in summaries),
        },
    )


async def compare_counters(
    rollout: RolloutClient, deployment: Deployment, evaluations: dict[str, Any]
) -> dict[str, dict[str, int]]:
    """Model calls, sampled tokens and execs as gateway, engine, manager, harness and broker saw them.

    A process counts from its own start, so what the ledger holds from before a resume is left out.
    """
    manager = await _settled_status(rollout)
    summaries = [
        s
        for s in await every_attempt(rollout, evaluations)
        if s.ref.finished_at.ToMicroseconds() > 1e6 * deployment.started_at
    ]
    before = deployment.at_start
    broker = (await deployment.sandbox_status()).counters
    execs = {
        "broker": broker.num_execs,
        "harness": sum(s.report.num_execs for s in summaries),
    }
    if not deployment.serves_model:
        return {"execs": execs}
    gateways = [await _gateway_counters(url) for url in deployment.gateway_urls]
    gateway = {
        key: sum(int(counts[key]) for counts in gateways)
        for key in ("num_generate_calls", "num_sampled_tokens", "num_answered")
    }
    return {
        "model calls": {
            "gateway": gateway["num_generate_calls"],
            "engines": sum(e.num_requests for e in manager.engines),
            "manager (durable turns)": manager.num_turns - before.num_turns,
        },
        "sampled tokens": {
            "gateway": gateway["num_sampled_tokens"],
            "engines": sum(e.num_generated_tokens for e in manager.engines),
            "manager (durable turns)": manager.num_sampled_tokens - before.num_sampled_tokens,
        },
        "answered model calls": {
            "gateway": gateway["num_answered"],
            "harness": sum(s.report.num_model_calls for s in summaries),
        },
        "execs": execs,
    }


async def every_attempt(
    rollout: RolloutClient, evaluations: dict[str, Any]
) -> list[rollout_pb2.AttemptSummary]:
    """Finished training attempts, then those of each evaluation."""
    summaries = list(await rollout.list_attempts())
    for name in evaluations:
        summaries += await rollout.list_attempts(evaluation=name)
    return summaries


async def _settled_status(rollout: RolloutClient) -> rollout_pb2.GetStatusReply:
    """The manager's status once the engines' own counts, which it polls, stand still."""
    seen: list[tuple[int, int]] = []
    deadline = time.monotonic() + _SETTLE_TIMEOUT_S
    while True:
        status = await rollout.get_status()
        counts = [(e.num_requests, e.num_generated_tokens) for e in status.engines]
        if counts == seen or time.monotonic() > deadline:
            return status
        seen = counts
        await asyncio.sleep(_SETTLE_S)


async def _gateway_counters(url: str) -> dict[str, Any]:
    timeout = aiohttp.ClientTimeout(total=_HTTP_TIMEOUT_S)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.get(f"{url}/counters") as reply,
    ):
        return dict(await reply.json())
