"""Test doubles for the manager: engines without processes, and turns from plain lists.

Owner: rollout's tests. The pool follows EnginePool's interface, so that the real
UpdateWindows runs over it; its clients record the calls that they would have sent.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import grpc.aio
import numpy as np

from proto import rollout_pb2 as pb
from proto import rollout_pb2_grpc as pb_grpc
from proto import trajectory_pb2 as tpb
from proto.serving import ServingConfig, dial, make_server
from rollout.attempt_table import Attempt
from rollout.client import RolloutClient
from rollout.config import RolloutConfig
from rollout.engines.engine_pool import Engine, EnginePool, EngineState
from rollout.ledger import Ledger
from rollout.manager import RolloutManager
from rollout.servicer import SERVICE_NAME, RolloutServicer
from rollout.token_store import TokenStore


class FakeEngineClient:
    """Records control calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def pause(self, mode: str) -> None:
        self.calls.append("pause")

    async def begin_update(self) -> None:
        self.calls.append("begin")

    async def end_update(self) -> None:
        self.calls.append("end")

    async def flush_cache(self) -> None:
        self.calls.append("flush")

    async def set_weight_version(self, weight_version: int) -> None:
        self.calls.append(f"version {weight_version}")

    async def resume(self) -> None:
        self.calls.append("resume")


class FakeEnginePool:
    """Engines that are healthy from the start, with the weights that they started with."""

    def __init__(self, num_engines: int, token_budget: int = 4096) -> None:
        self.engines = {
            f"engine{i}": Engine(f"engine{i}", token_budget, url=f"http://127.0.0.1:{i + 1}")
            for i in range(num_engines)
        }
        self.clients = {name: FakeEngineClient() for name in self.engines}
        self.on_change: Callable[[Engine], None] = lambda engine: None
        self.control_lock = asyncio.Lock()
        self.failures: list[tuple[str, str]] = []
        self.num_flushes = 0

    async def start(self) -> None:
        for engine in self.engines.values():
            engine.state, engine.incarnation = "stale", 1
            self.on_change(engine)

    async def close(self) -> None:
        return None

    def client(self, name: str) -> FakeEngineClient:
        return self.clients[name]

    def set_state(
        self, name: str, state: EngineState, incarnation: int, weight_version: int | None = None
    ) -> None:
        engine = self.engines[name]
        if engine.incarnation != incarnation:
            return
        engine.state = state
        if weight_version is not None:
            engine.weight_version = weight_version
        self.on_change(engine)

    async def report_failure(self, name: str, detail: str) -> None:
        self.failures.append((name, detail))

    async def restart(self, name: str, reason: str) -> None:
        engine = self.engines[name]
        engine.incarnation += 1
        engine.num_restarts += 1
        engine.state, engine.weight_version = "stale", 0
        self.on_change(engine)

    async def flush_cache(self) -> None:
        self.num_flushes += 1


class Clock:
    """A clock that tests move."""

    def __init__(self) -> None:
        self.now_s = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now_s


class Testbed:
    """A manager over a fake pool behind a real in-process gRPC server, and its client."""

    __test__ = False

    def __init__(
        self,
        run_dir: Path,
        num_engines: int = 1,
        *,
        real_time: bool = False,
        servicer: Callable[[RolloutManager], RolloutServicer] = RolloutServicer,
        **settings: Any,
    ) -> None:
        """`real_time`: the manager's clocks are the machine's instead of the test's."""
        engines = {"python": "/usr/bin/python3", "model_path": "/nowhere"}
        engines |= settings.pop("engines", {})
        defaults: dict[str, Any] = {"group_size": 2, "batch_groups": 2, "max_staleness": 0}
        self.config = RolloutConfig.model_validate(
            {"run_dir": run_dir, "engines": engines, **defaults, **settings}
        )
        self.clock = Clock()
        self.fake_pool = FakeEnginePool(num_engines)
        numbers = itertools.count()
        self.manager = RolloutManager(
            self.config,
            Ledger(run_dir / "ledger.db", fsync=False),
            TokenStore(run_dir / "tokens", fsync=False),
            cast("EnginePool", self.fake_pool),
            clock=time.time if real_time else self.clock,
            monotonic=time.monotonic if real_time else self.clock,
            make_key=lambda: f"key-{next(numbers):032d}-{id(self)}",
        )
        self.address = ""
        self._servicer = servicer
        self.channel: grpc.aio.Channel | None = None

    async def __aenter__(self) -> RolloutClient:
        self.server = make_server(
            ServingConfig(),
            lambda s: pb_grpc.add_RolloutManagerServicer_to_server(self._servicer(self.manager), s),
            [SERVICE_NAME],
        )
        self.manager.recover()
        self.address = await self.server.start()
        await self.manager.start()
        self.channel = dial(self.address)
        return RolloutClient(self.channel, call_timeout_s=10.0)

    async def __aexit__(self, *exc_info: object) -> None:
        assert self.channel is not None
        await self.channel.close()
        self.manager.waiters.close()
        await self.server.stop(0)
        await self.manager.close()


def make_turn(
    attempt_id: str,
    index: int,
    prompt: Sequence[int],
    sampled: Sequence[int],
    *,
    parent: int | None = None,
    history: int = 0,
    version: int = 1,
    kind: int = tpb.TURN_KIND_AGENT,
) -> tpb.TurnRecord:
    """A turn whose parent is the one before unless told otherwise."""
    turn = tpb.TurnRecord(
        attempt_id=attempt_id,
        turn_index=index,
        parent_turn_index=index - 1 if parent is None else parent,
        history_length=history,
        prompt_ids=np.asarray(prompt, "<i4").tobytes(),
        sampled_ids=np.asarray(sampled, "<i4").tobytes(),
        rollout_logprobs=np.asarray([-0.5] * len(sampled), "<f4").tobytes(),
        finish_reason=tpb.FINISH_REASON_STOP,
        kind=tpb.TurnKind.ValueType(kind),
        sampling=tpb.SamplingParams(temperature=1.0),
    )
    if sampled:
        turn.version_spans.add(weight_version=version, start=0, end=len(sampled))
    return turn


async def publish(client: RolloutClient, weight_version: int) -> pb.CloseUpdateWindowReply:
    """Opens and closes a window as a trainer whose transfers all succeed."""
    opened = await client.open_update_window(
        pb.OpenUpdateWindowRequest(
            weight_version=weight_version, plan_digest="0" * 64, num_tensors=1, total_bytes=4
        )
    )
    return await client.close_update_window(
        pb.CloseUpdateWindowRequest(
            epoch=opened.epoch,
            weight_version=weight_version,
            results=[
                pb.EngineUpdateResult(engine=t.engine, complete=True, touched=True)
                for t in opened.targets
            ],
        )
    )


async def play(
    client: RolloutClient,
    leased: pb.LeasedAttempt | Attempt,
    reward: float | None,
    *,
    cause: int = tpb.CAUSE_SUBMITTED,
    num_turns: int = 2,
    version: int = 1,
) -> pb.FinishAttemptReply:
    """Plays gateway and worker for one attempt: turns, then its end."""
    history = 0
    for index in range(num_turns):
        ticket = f"{leased.attempt_id}/{leased.epoch}/{index}"
        await client.admit_turn(
            pb.AdmitTurnRequest(
                ticket_id=ticket,
                attempt_id=leased.attempt_id,
                epoch=leased.epoch,
                prompt_tokens=history + 3,
                max_new_tokens=8,
            )
        )
        turn = make_turn(
            leased.attempt_id, index, [1, 2, 3], [7, 8], history=history, version=version
        )
        await client.append_turn(
            pb.AppendTurnRequest(ticket_id=ticket, epoch=leased.epoch, turn=turn)
        )
        history += 5
    request = pb.FinishAttemptRequest(
        attempt_id=leased.attempt_id, epoch=leased.epoch, cause=tpb.Cause.ValueType(cause)
    )
    if reward is not None:
        request.reward = reward
    return await client.finish_attempt(request)


async def add_tasks(client: RolloutClient, num: int, pool: int = pb.POOL_TRAIN) -> None:
    """Adds tasks POOL0, POOL1, ... to a pool."""
    name = pb.Pool.Name(pb.Pool.ValueType(pool)).removeprefix("POOL_").lower()
    tasks = [pb.Task(task_id=f"{name}{i}", path=f"/tasks/{name}{i}") for i in range(num)]
    await client.add_tasks(pb.AddTasksRequest(pool=pb.Pool.ValueType(pool), tasks=tasks))


async def begin(client: RolloutClient, num_tasks: int = 4) -> None:
    """Training tasks, version 1 on the engines, admission open."""
    await add_tasks(client, num_tasks)
    await publish(client, 1)
    await client.set_admission(pb.SetAdmissionRequest(open=True))


async def lease(
    client: RolloutClient, num: int, worker: str = "w", timeout_s: float = 5.0
) -> list[pb.LeasedAttempt]:
    """Up to `num` attempts; fewer, or none, when that is all there is within `timeout_s`."""
    request = pb.LeaseAttemptsRequest(worker=worker, max_attempts=num)
    return list((await client.lease_attempts(request, timeout_s=timeout_s)).attempts)


def admit(
    leased: pb.LeasedAttempt, ticket: str, prompt: int = 3, new: int = 8
) -> pb.AdmitTurnRequest:
    """A ticket request for the next turn of a leased attempt."""
    return pb.AdmitTurnRequest(
        ticket_id=ticket,
        attempt_id=leased.attempt_id,
        epoch=leased.epoch,
        prompt_tokens=prompt,
        max_new_tokens=new,
    )


async def next_batch(client: RolloutClient, step: int, num_groups: int = 2) -> pb.NextBatchReply:
    """The batch of a step, by a trainer at weight_version 1."""
    request = pb.NextBatchRequest(step=step, weight_version=1, num_groups=num_groups)
    return await client.next_batch(request, timeout_s=5.0)
