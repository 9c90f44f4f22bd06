"""Doubles of the gateway's two neighbours, for tests: real servers, scripted behaviour.

`FakeEngine` speaks SGLang's HTTP and answers planned or made-up ids. It proves what the
gateway sends and how it reads answers; it does not prove that an engine samples, masks
banned ids, or behaves so in an update window (rollout/engines tests do, on the real one).
`FakeManager` speaks the RolloutManager's gRPC for the gateway's calls, with the same checks
of turns (rollout.sequences) and the same idempotency; it has no scheduler and no disk.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import random
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import grpc
import grpc.aio
from aiohttp import web

from proto import rollout_pb2 as pb
from proto import rollout_pb2_grpc as pb_grpc
from proto import trajectory_pb2 as tpb
from rollout.errors import CAP_METADATA_KEY
from rollout.sequences import check_turn

Hook = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse | None]]


def generation(
    ids: list[int],
    finish: str = "stop",
    versions: list[tuple[int, int, int]] | None = None,
    experts: Sequence[int] | None = None,
) -> dict[str, Any]:
    """An answer of /generate: log-prob of the i-th id is -(i + 1) / 8."""
    spans = versions if versions is not None else [(1, 0, len(ids))]
    routed = {}
    if experts is not None:
        packed = struct.pack(f"<{len(experts)}i", *experts)
        routed = {"routed_experts": base64.b64encode(packed).decode()}
    return {
        "text": "never read",
        "output_ids": ids,
        "meta_info": {
            "finish_reason": {"type": finish},
            "output_token_logprobs": [[-(i + 1) / 8, token, None] for i, token in enumerate(ids)],
            "cached_tokens": 0,
            "queue_time": 0.0,
            "request_received_ts": 1000.0,
            "first_token_latency": 0.25,
            **routed,
            "weight_version": str(spans[-1][0]) if spans else "1",
            "weight_versions": [
                {"version": str(v), "start": s, "end": e} for v, s, e in spans if e > s
            ],
        },
    }


class FakeEngine:
    """Answers `plans` in order, then random text that ends with a stop id."""

    def __init__(self, alphabet: list[int], seed: int = 0) -> None:
        """`alphabet`: ids to make answers of."""
        self.plans: list[dict[str, Any] | Hook] = []
        self.requests: list[dict[str, Any]] = []
        self.aborted: list[str] = []
        self.url = ""
        self._alphabet = alphabet
        self._random = random.Random(seed)
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=2**26)
        app.add_routes(
            [web.post("/generate", self._generate), web.post("/abort_request", self._abort)]
        )
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        body = await http.json()
        self.requests.append(body)
        plan = self.plans.pop(0) if self.plans else self._made_up(body)
        if callable(plan):
            return await plan(http, body) or web.json_response(self._made_up(body))
        return web.json_response(plan)

    async def _abort(self, http: web.Request) -> web.Response:
        self.aborted.append((await http.json())["rid"])
        return web.Response()

    def _made_up(self, body: dict[str, Any]) -> dict[str, Any]:
        params = body["sampling_params"]
        limit = params["max_new_tokens"]
        wanted = self._random.randint(1, 9)
        ids = [self._random.choice(self._alphabet) for _ in range(min(wanted, limit))]
        if wanted <= limit:
            ids[-1] = params["stop_token_ids"][0]
            return generation(ids)
        return generation(ids, "length")


async def drop_connection(http: web.Request, _: dict[str, Any]) -> web.StreamResponse | None:
    """A plan: the engine dies under the call."""
    assert http.transport is not None
    http.transport.abort()
    await asyncio.sleep(3600)
    return None


async def hang(_: web.Request, __: dict[str, Any]) -> web.StreamResponse | None:
    """A plan: no answer, ever."""
    await asyncio.sleep(3600)
    return None


@dataclass
class FakeAttempt:
    """What a session key stands for."""

    attempt_id: str
    epoch: int = 1
    caps: tpb.TokenCaps = field(
        default_factory=lambda: tpb.TokenCaps(
            max_new_tokens_per_turn=64, max_total_tokens=4096, max_turns=50
        )
    )
    sampling: tpb.SamplingParams = field(
        default_factory=lambda: tpb.SamplingParams(
            temperature=1.0, banned_token_ids=[0, 1], stop_token_ids=[2]
        )
    )
    expert_layout: tpb.ExpertLayout | None = None
    turns: list[tpb.TurnRecord] = field(default_factory=list)
    experts: dict[int, bytes] = field(default_factory=dict)  # by turn
    lengths: list[int] = field(default_factory=list)


class FakeManager(pb_grpc.RolloutManagerServicer):
    """The gateway's five calls."""

    def __init__(self, engines: list[FakeEngine]) -> None:
        self.engines = engines
        self.attempts: dict[str, FakeAttempt] = {}
        self.open_tickets: set[str] = set()
        self.failed_tickets: list[str] = []
        self.extra_key = ""
        self.admit_codes: list[grpc.StatusCode] = []  # failures to answer with first
        self.admit_cap = ""  # refuses admission with this cap
        self.append_codes: list[grpc.StatusCode] = []  # likewise, after storing the turn
        self.append_gate: asyncio.Event | None = None  # AppendTurn waits for it
        self.append_reached = asyncio.Event()
        self.num_session_loads = 0
        self.address = ""
        self._server: grpc.aio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = grpc.aio.server()
        pb_grpc.add_RolloutManagerServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            await self._server.stop(0)

    def add_attempt(self, attempt_id: str = "a", **fields: Any) -> str:
        """A new attempt; returns its session key."""
        key = f"{attempt_id:-<40}"
        self.attempts[key] = FakeAttempt(attempt_id, **fields)
        return key

    async def GetSession(
        self, request: pb.GetSessionRequest, context: Any
    ) -> AsyncIterator[pb.GetSessionReply]:
        self.num_session_loads += 1
        attempt = self.attempts.get(request.session_key)
        if attempt is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such session")
            raise AssertionError
        yield pb.GetSessionReply(
            header=pb.GetSessionReply.Header(
                attempt_id=attempt.attempt_id,
                epoch=attempt.epoch,
                sampling=attempt.sampling,
                caps=attempt.caps,
                expert_layout=attempt.expert_layout,
            )
        )
        for turn in attempt.turns:
            yield pb.GetSessionReply(turn=turn)

    async def AdmitTurn(self, request: pb.AdmitTurnRequest, context: Any) -> pb.AdmitTurnReply:
        if self.admit_codes:
            await context.abort(self.admit_codes.pop(0), "planned")
        attempt = await self._held(request.attempt_id, request.epoch, context)
        cap = self.admit_cap
        if request.prompt_tokens + request.max_new_tokens > attempt.caps.max_total_tokens:
            cap = "max_total_tokens"
        if cap:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "planned",
                trailing_metadata=((CAP_METADATA_KEY, cap),),
            )
        self.open_tickets.add(request.ticket_id)
        index = len(self.failed_tickets) % len(self.engines)
        return pb.AdmitTurnReply(
            engine=f"e{index}",
            engine_url=self.engines[index].url,
            extra_key=self.extra_key,
            kv_version_lower_bound=1,
        )

    async def AppendTurn(self, request: pb.AppendTurnRequest, context: Any) -> pb.AppendTurnReply:
        self.append_reached.set()
        if self.append_gate is not None:
            await self.append_gate.wait()
        turn = request.turn
        attempt = await self._held(turn.attempt_id, request.epoch, context)
        if turn.turn_index < len(attempt.turns):
            digests = [
                hashlib.sha256(t.SerializeToString(deterministic=True)).digest()
                for t in (turn, attempt.turns[turn.turn_index])
            ]
            if digests[0] != digests[1]:
                await context.abort(grpc.StatusCode.ALREADY_EXISTS, "another turn")
        elif turn.turn_index > len(attempt.turns):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a turn is missing")
        else:
            parent = turn.parent_turn_index
            summary = check_turn(turn, attempt.lengths[parent] if parent >= 0 else 0)
            attempt.turns.append(turn)
            attempt.lengths.append(summary.total_length)
        self.open_tickets.discard(request.ticket_id)
        if self.append_codes:
            await context.abort(self.append_codes.pop(0), "planned, after storing")
        return pb.AppendTurnReply()

    async def AppendRoutedTurn(
        self, requests: AsyncIterator[pb.AppendRoutedTurnRequest], context: Any
    ) -> pb.AppendTurnReply:
        parts = [request async for request in requests]
        turn = parts[0].turn.turn
        experts = b"".join(part.expert_ids for part in parts[1:])
        attempt = await self._held(turn.attempt_id, parts[0].turn.epoch, context)
        attempt.experts[turn.turn_index] = experts
        return await self.AppendTurn(parts[0].turn, context)

    async def ReleaseTicket(
        self, request: pb.ReleaseTicketRequest, context: Any
    ) -> pb.ReleaseTicketReply:
        self.open_tickets.discard(request.ticket_id)
        if request.engine_failed:
            self.failed_tickets.append(request.ticket_id)
        return pb.ReleaseTicketReply()

    async def _held(self, attempt_id: str, epoch: int, context: Any) -> FakeAttempt:
        for attempt in self.attempts.values():
            if attempt.attempt_id == attempt_id and attempt.epoch == epoch:
                return attempt
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "fenced")
        raise AssertionError
