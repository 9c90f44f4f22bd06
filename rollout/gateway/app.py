"""Gateway: the HTTP endpoint that agents call, `python -P -m rollout.gateway.app`.

Owner of the process. It owns sessions in memory (a cache of the manager's), one pool of
connections to engines and one channel to the manager. Nothing here is the only copy.

    agent --POST /v1/chat/completions (Bearer session key)--> dialect (openai)
              |                                                   |
              |            SessionCache.use(key): one call at a time a session
              |                                                   v
              |   TurnRunner: history.plan -> chat_template -> AdmitTurn -> engine /generate
              |                                                   v
              `<-- answer or SSE stream, once durable <------ AppendTurn (manager)

What blocks: a call waits for its session's lock, in AdmitTurn for an engine's room, and in
the engine. A client that leaves cancels its call: the engine is told, the ticket given back.
An answer counts as delivered when its last byte was written; until then the same request is
answered again from the durable turn.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import ssl
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import ValidationError

from proto.serving import (
    ClientSecurity,
    ServingError,
    dial,
    fail,
    is_loopback,
    run_service,
    split_address,
    termination_event,
    write_address,
)
from rollout.client import RolloutClient
from rollout.gateway import openai
from rollout.gateway.chat_template import ChatTemplate, ChatTemplateError
from rollout.gateway.config import GatewayConfig
from rollout.gateway.counters import Counters
from rollout.gateway.engine_client import EngineClient
from rollout.gateway.refusal import Reason, Refusal
from rollout.gateway.session import Session, SessionCache
from rollout.gateway.turn_runner import Answer, TurnRunner

_LOG = logging.getLogger(__name__)


def _new_id() -> str:
    return uuid.uuid4().hex


class Gateway:
    """Handlers over the parts below; `app` is what a server runs."""

    def __init__(
        self,
        config: GatewayConfig,
        rollout: RolloutClient,
        engines: EngineClient,
        chat: ChatTemplate,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        new_id: Callable[[], str] = _new_id,
    ) -> None:
        self._config = config
        self._wall_clock = wall_clock
        self._new_id = new_id
        self.counters = Counters()
        self.sessions = SessionCache(rollout, config.max_sessions, chat.stop_ids)
        self.runner = TurnRunner(
            config,
            rollout,
            engines,
            chat,
            self.sessions,
            self.counters,
            clock=clock,
            wall_clock=wall_clock,
            new_id=new_id,
        )
        self.draining = False

    def app(self) -> web.Application:
        """The aiohttp application; run it with handler_cancellation=True."""
        app = web.Application(client_max_size=self._config.max_request_bytes)
        app.add_routes(
            [
                web.post("/v1/chat/completions", self.chat_completions),
                web.get("/v1/models", self.models),
                web.get("/health", self.health),
                web.get("/metrics", self.metrics),
                web.get("/counters", self.counts),
            ]
        )
        return app

    async def health(self, _: web.Request) -> web.Response:
        """200 while new calls are taken."""
        if self.draining:
            return web.json_response({"status": "draining"}, status=503)
        return web.json_response({"status": "ok"})

    async def models(self, _: web.Request) -> web.Response:
        """The one model."""
        model = {
            "id": self._config.model_name,
            "object": "model",
            "created": 0,
            "owned_by": "swe_rl",
        }
        return web.json_response({"object": "list", "data": [model]})

    async def metrics(self, _: web.Request) -> web.Response:
        """Prometheus text."""
        body = generate_latest(self.counters.registry)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def counts(self, _: web.Request) -> web.Response:
        """The counters as JSON."""
        return web.json_response(self.counters.as_dict())

    async def chat_completions(self, http: web.Request) -> web.StreamResponse:
        """One turn of a session."""
        self.counters.num_requests += 1
        response: web.StreamResponse | None = None
        try:
            if self.draining:
                raise Refusal(Reason.DRAINING, "this gateway is going down; ask another")
            key = _session_key(http)
            request = openai.parse_request(await self._body(http))
            messages = [message.reduced() for message in request.messages]
            async with self.sessions.use(key) as session:
                turn = asyncio.ensure_future(
                    self.runner.run(session, messages, request.token_limit)
                )
                try:
                    if request.stream:
                        response = await self._ping(http, turn)
                    answer = await turn
                finally:
                    if not turn.done():
                        turn.cancel()
                        await asyncio.wait({turn})
                response = await self._deliver(http, request, session, answer, response)
        except Refusal as refusal:
            return await self._refuse(http, refusal, response)
        except (asyncio.CancelledError, ConnectionResetError):
            self.counters.num_client_left += 1
            raise
        return response

    async def _body(self, http: web.Request) -> bytes:
        try:
            return await http.read()
        except web.HTTPRequestEntityTooLarge as error:
            raise Refusal(
                Reason.TOO_LARGE,
                f"The request body is above the limit of {self._config.max_request_bytes} bytes.",
            ) from error

    async def _ping(
        self, http: web.Request, turn: asyncio.Future[Answer]
    ) -> web.StreamResponse | None:
        """Waits for the turn; past the first interval opens the stream and sends comments."""
        response: web.StreamResponse | None = None
        while not (await asyncio.wait({turn}, timeout=self._config.ping_interval_s))[0]:
            response = response or await _open_stream(http, {})
            await response.write(openai.PING)
        return response

    async def _deliver(
        self,
        http: web.Request,
        request: openai.ChatRequest,
        session: Session,
        answer: Answer,
        response: web.StreamResponse | None,
    ) -> web.StreamResponse:
        """Writes the whole answer; only then it counts as delivered."""
        call_id = f"chatcmpl-{self._new_id()}"
        created = int(self._wall_clock())
        headers = {openai.DECODE_HEADER: f"{answer.decode_s * 1000:.3f}"}
        if request.stream:
            response = response or await _open_stream(http, headers)
            for event in openai.stream_events(answer, request, call_id, created):
                await response.write(event)
            await response.write_eof()
        else:
            body = openai.completion_body(answer, request, call_id, created)
            response = web.json_response(body, headers=headers)
            await response.prepare(http)
            await response.write_eof()
        self.counters.num_answered += 1
        if session.undelivered == answer.turn_index:
            session.undelivered = None
        return response

    async def _refuse(
        self, http: web.Request, refusal: Refusal, response: web.StreamResponse | None
    ) -> web.StreamResponse:
        self.counters.refuse(refusal.reason)
        shape = openai.ERRORS[refusal.reason]
        _LOG.info("refused with %d %s: %s", shape.status, shape.code, refusal)
        body = openai.error_body(refusal)
        if response is not None:
            # The status line is gone: the stream itself carries the error, as OpenAI does.
            await response.write(openai.sse(body))
            await response.write_eof()
            return response
        headers = {"Retry-After": str(self._config.retry_after_s)} if shape.status == 503 else {}
        return web.json_response(body, status=shape.status, headers=headers)


async def _open_stream(http: web.Request, headers: dict[str, str]) -> web.StreamResponse:
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache", **headers}
    )
    await response.prepare(http)
    return response


def _session_key(http: web.Request) -> str:
    scheme, _, key = http.headers.get("Authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _tls(config: GatewayConfig, listen: str) -> ssl.SSLContext | None:
    """None on loopback without a certificate. Raises ServingError off loopback without one."""
    if config.tls_certificate is None or config.tls_private_key is None:
        host, _ = split_address(listen)
        if not is_loopback(host):
            raise ServingError(
                f"refusing to listen on {listen}: off loopback a gateway needs TLS, because the "
                "session key in each request is what authenticates; set tls_certificate and "
                "tls_private_key, or listen on 127.0.0.1"
            )
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(config.tls_certificate, config.tls_private_key)
    except OSError as error:
        raise ServingError(f"cannot read the TLS key or certificate: {error}") from error
    return context


async def run(config: GatewayConfig, listen: str, address_file: Path | None) -> None:
    """Serves until SIGTERM or SIGINT. Raises ServingError or ChatTemplateError at a bad start."""
    stop = termination_event()
    tls = _tls(config, listen)
    host, port = split_address(listen)
    chat = ChatTemplate.load(config.model_dir)
    channel = dial(config.manager_address, ClientSecurity.from_environment())
    rollout = RolloutClient(
        channel, call_timeout_s=config.manager_call_s, stream_timeout_s=config.manager_call_s
    )
    engines = EngineClient(
        max_connections=config.max_engine_connections,
        connect_s=config.engine_connect_s,
        abort_timeout_s=config.abort_timeout_s,
    )
    async with channel, engines:
        gateway = Gateway(config, rollout, engines, chat)
        runner = web.AppRunner(
            gateway.app(),
            handler_cancellation=True,
            shutdown_timeout=config.drain_timeout_s,
            access_log=None,
        )
        await runner.setup()
        site = web.TCPSite(runner, host, port, ssl_context=tls, reuse_port=False)
        try:
            await site.start()
        except OSError as error:
            await runner.cleanup()
            raise ServingError(
                f"cannot listen on {listen}: {error}; choose another port"
            ) from error
        bound = runner.addresses[0][1]
        address = f"[{host}]:{bound}" if ":" in host else f"{host}:{bound}"
        if address_file is not None:
            write_address(address_file, address)
        _LOG.info("serving %s on %s", config.model_name, address)
        try:
            await stop.wait()
            _LOG.info("draining for up to %g s", config.drain_timeout_s)
        finally:
            gateway.draining = True
            await runner.cleanup()
            await gateway.runner.close()


def main(argv: list[str] | None = None) -> int:
    """Parses arguments and serves; returns the exit status."""
    parser = argparse.ArgumentParser(prog="rollout.gateway.app", description="The gateway.")
    parser.add_argument("--config", type=Path, required=True, help="JSON of GatewayConfig")
    parser.add_argument("--listen", default="127.0.0.1:0", help="HOST:PORT; port 0: a free one")
    parser.add_argument("--address-file", type=Path, help="the bound HOST:PORT is written here")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        config = GatewayConfig.model_validate_json(args.config.read_text())
    except (OSError, ValidationError) as error:
        return fail(f"rollout.gateway: {args.config}: {error}")
    try:
        run_service(run(config, args.listen, args.address_file))
    except (ServingError, ChatTemplateError) as error:
        return fail(f"rollout.gateway: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
