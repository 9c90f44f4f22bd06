"""The real parts that causes_test runs on, and the hooks at which it makes their boundaries fail.

    worker process (harness environment) --HTTP--> gateway --HTTP--> ScriptedEngine
          |   `--gRPC--> FaultyBroker: real sandboxes       `--gRPC--.
          `--gRPC------------------------------------> RolloutManager (ledger on disk)

Manager, gateway and broker run in this process behind real servers; the worker is a process of
its own, which `kill` ends with SIGKILL. The engine answers what the script says.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from aiohttp import web

from bazel.environments import PYTHON
from proto import rollout_pb2 as pb
from proto.serving import ServingConfig
from rollout.client import RolloutClient
from rollout.config import RolloutConfig
from rollout.fakes import Testbed, publish
from rollout.gateway.app import Gateway
from rollout.gateway.chat_template import ChatTemplate
from rollout.gateway.config import GatewayConfig
from rollout.gateway.engine_client import EngineClient
from rollout.gateway.fakes import drop_connection, generation
from rollout.gateway.tiny_tokenizer import TINY, write_model
from rollout.harness.config import TOY_PROFILE, HarnessConfig
from rollout.manager import RolloutManager
from rollout.servicer import RolloutServicer
from sandbox import server as sandbox_server
from sandbox.backends.base import ExecOutcome, ExecSpec
from sandbox.backends.local import LocalBackend, default_init_binary
from sandbox.broker import Acquired, AcquireSpec, SandboxBroker
from sandbox.config import BrokerConfig
from sandbox.errors import SandboxDiedError
from tests import scripted_attempts as scripted
from tests.scripted_attempts import Failure, Script

_KILL_SIGNAL = 5  # to the sandbox's init, which ignores what it can


class Director:
    """Says what is to happen to the try that an attempt is in."""

    def __init__(self, manager: RolloutManager, scripts: dict[tuple[int, int], Script]) -> None:
        self._manager = manager
        self._scripts = scripts

    def script(self, attempt_id: str) -> Script:
        return self._scripts.get(scripted.parse(attempt_id), scripted.EXTRA)

    def failure(self, attempt_id: str) -> Failure | None:
        num_retries = self._manager.attempts.get(attempt_id).num_retries
        return scripted.failure_of(self.script(attempt_id), num_retries)

    def num_turns(self, attempt_id: str) -> int:
        return self._manager.attempts.get(attempt_id).num_turns

    def attempt_of(self, session_key: str) -> str:
        return self._manager.attempts.by_session(session_key).attempt_id


class FaultyBroker(SandboxBroker):
    """The real broker; sandboxes are really killed when the script says so."""

    director: Director

    async def acquire(self, spec: AcquireSpec, timeout_s: float) -> Acquired:
        failure = self.director.failure(spec.holder)
        starting = self.director.num_turns(spec.holder) == 0
        if failure is Failure.START and starting:
            raise SandboxDiedError("cannot make a sandbox: planned")
        return await super().acquire(spec, timeout_s)

    async def execute(self, lease_id: str, epoch: int, spec: ExecSpec) -> ExecOutcome:
        lease = self.lease(lease_id, epoch)
        failure = self.director.failure(lease.holder)
        turn = self.director.num_turns(lease.holder) - 1
        tests = spec.command == "/tests/test.sh"
        if failure is Failure.VERIFIER and tests:
            return await super().execute(lease_id, epoch, replace(spec, command="kill -9 $$"))
        dies_at = self.director.script(lease.holder).play.dies_at if failure is None else None
        dies = (
            (failure is Failure.AGENT and not tests)
            or (failure is Failure.VERIFY and tests)
            or (dies_at == turn and not tests)
        )
        if dies:
            await lease.sandbox._handle.kill(_KILL_SIGNAL)  # type: ignore[attr-defined]
        return await super().execute(lease_id, epoch, spec)


class TicketBook(RolloutServicer):
    """The real servicer; remembers whose call a ticket is, and lets no more groups start than the
    script has.
    """

    def __init__(self, manager: RolloutManager, tickets: dict[str, str]) -> None:
        super().__init__(manager)
        self._tickets = tickets

    async def AdmitTurn(self, request: pb.AdmitTurnRequest, context: Any) -> pb.AdmitTurnReply:
        self._tickets[request.ticket_id] = request.attempt_id
        return await super().AdmitTurn(request, context)

    async def LeaseAttempts(
        self, request: pb.LeaseAttemptsRequest, context: Any
    ) -> pb.LeaseAttemptsReply:
        reply = await super().LeaseAttempts(request, context)
        if self._manager.ledger.number("SELECT COUNT(*) FROM groups") >= scripted.NUM_GROUPS:
            self._manager.set_admission(False, "every group of the script has started")
        return reply


class ScriptedEngine:
    """SGLang's /generate, answered from the script."""

    def __init__(self, director: Director, tickets: dict[str, str], chat: ChatTemplate) -> None:
        self._director, self._tickets, self._chat = director, tickets, chat

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/generate", self._generate),
            web.post("/abort_request", lambda _: _nothing()),
        ]

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        body = await http.json()
        attempt_id = self._tickets[body["rid"]]
        if self._director.failure(attempt_id) is Failure.ENGINE:
            gone = await drop_connection(http, body)
            assert gone is not None
            return gone
        play = self._director.script(attempt_id).play
        turn = self._director.num_turns(attempt_id)
        ids = self._chat.encode_text(play.answers[min(turn, len(play.answers) - 1)])
        if play.cut and turn >= len(play.answers) - 1:
            ids = ids[: body["sampling_params"]["max_new_tokens"]]
            return web.json_response(generation(ids, "length"))
        return web.json_response(generation([*ids, self._chat.end_of_turn_id]))


async def _nothing() -> web.Response:
    return web.Response()


def refusals(director: Director) -> Any:
    """A gateway that refuses: a defect of ours, or a session that is no longer known."""

    @web.middleware
    async def middleware(http: web.Request, handler: Any) -> web.StreamResponse:
        key = http.headers.get("Authorization", "").removeprefix("Bearer ")
        if key:
            failure = director.failure(director.attempt_of(key))
            if failure is Failure.HARNESS:
                return web.json_response({"error": {"code": "defect"}}, status=500)
            if failure is Failure.FENCED:
                return web.json_response({"error": {"code": "session_fenced"}}, status=409)
        answer: web.StreamResponse = await handler(http)
        return answer

    return middleware


class Worker:
    """A worker process."""

    def __init__(self, config: Path, log: Path) -> None:
        self._argv = [PYTHON["harness"], "-P", "-m", "rollout.harness.worker"]
        self._argv += ["--config", str(config), "--name", "w0"]
        self._log = log
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._argv, stdout=log, stderr=log
            )

    async def end(self, number: signal.Signals) -> None:
        """Signals it and waits for its end."""
        assert self._process is not None
        if self._process.returncode is None:
            os.kill(self._process.pid, number)
        await asyncio.wait_for(self._process.wait(), 60)


class World:
    """All of it, running."""

    def __init__(
        self, bed: Testbed, client: RolloutClient, broker: FaultyBroker, worker: Worker
    ) -> None:
        self.bed, self.client, self.broker, self.worker = bed, client, broker, worker


async def _serve(app: web.Application, stack: contextlib.AsyncExitStack) -> str:
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.2)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return f"http://127.0.0.1:{runner.addresses[0][1]}"


async def _broker(folder: Path, stack: contextlib.AsyncExitStack) -> tuple[FaultyBroker, str]:
    config = BrokerConfig(
        images={"toy": {"base": "host"}},  # type: ignore[dict-item]
        state_dir=folder,
        init_binary=Path(os.environ.get("SWE_RL_SANDBOX_INIT", default_init_binary())),
    )
    broker = FaultyBroker(config, LocalBackend(config))
    await broker.start()
    stack.push_async_callback(broker.close)
    server = sandbox_server.make_server(broker, ServingConfig())
    address = await server.start()
    stack.push_async_callback(server.stop, 0)
    return broker, address


@contextlib.asynccontextmanager
async def open_world(
    folder: Path, scratch: Path, scripts: dict[tuple[int, int], Script], **settings: Any
) -> AsyncIterator[World]:
    """Everything up, weights published, the worker not started yet. `scratch`: a short path."""
    tickets: dict[str, str] = {}
    bed = Testbed(
        folder / "run",
        real_time=True,
        servicer=lambda manager: TicketBook(manager, tickets),
        **settings,
    )
    config = bed.config
    director = Director(bed.manager, scripts)
    chat = ChatTemplate.load(write_model(folder / "model", TINY))
    async with contextlib.AsyncExitStack() as stack:
        broker, broker_address = await _broker(scratch, stack)
        broker.director = director
        engine_app = web.Application()
        engine_app.add_routes(ScriptedEngine(director, tickets, chat).routes())
        bed.fake_pool.engines["engine0"].url = await _serve(engine_app, stack)
        client = await stack.enter_async_context(bed)
        engines = await stack.enter_async_context(
            EngineClient(max_connections=0, connect_s=5.0, abort_timeout_s=5.0)
        )
        gateway = Gateway(_gateway_config(folder), client, engines, chat)
        stack.push_async_callback(gateway.runner.close)
        app = gateway.app()
        app.middlewares.append(refusals(director))
        url = await _serve(app, stack)
        path = folder / "worker.json"
        path.write_text(
            _harness_config(config, folder, bed.address, broker_address, url).model_dump_json()
        )
        worker = Worker(path, folder / "worker.log")
        await publish(client, 1)
        try:
            yield World(bed, client, broker, worker)
        finally:
            if worker._process is not None:
                await worker.end(signal.SIGTERM)


def _gateway_config(folder: Path) -> GatewayConfig:
    return GatewayConfig(manager_address="unused:1", model_dir=folder, max_engine_retries=1)


def _harness_config(
    config: RolloutConfig, folder: Path, manager: str, broker: str, gateway: str
) -> HarnessConfig:
    profile = TOY_PROFILE.model_copy(
        update={"loop_limit": scripted.LOOP_LIMIT, "command_timeout_s": 600.0}
    )
    return HarnessConfig(
        manager_address=manager,
        broker_address=broker,
        gateway_urls=[gateway],
        trials_dir=folder / "trials",
        concurrency=10,
        lease_wait_s=2.0,
        renew_interval_s=min(5.0, config.lease_ttl_s / 4),
        model_retries=2,
        model_retry_max_s=0.1,
        profiles={"toy": profile},
    )
