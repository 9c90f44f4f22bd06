"""How every swe_rl gRPC server listens and every client dials: one place for TLS, token, health and drain.

Owner: `proto`. Invariants:

* Loopback is open. Any other address is served with TLS and a bearer token, or not at all.
* A server reports SERVING only after it is bound, and NOT_SERVING from the moment it drains.
* A port that is taken is an error: ports are never shared (`SO_REUSEPORT` is off).
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import hmac
import ipaddress
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_MESSAGE_BYTES = 16 * 2**20
"""Largest message that any of our channels carries; bulk data is streamed in chunks below it."""

_HEALTH_METHODS = "/grpc.health.v1.Health/"


class ServingError(ValueError):
    """A server cannot be set up as asked; the message says what to change."""


class ServingConfig(BaseModel):
    """Where a server listens and how it is protected."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    listen: str = "127.0.0.1:0"
    """HOST:PORT; port 0 takes a free one."""
    tls_certificate: Path | None = None
    """PEM chain; needed off loopback."""
    tls_private_key: Path | None = None
    """PEM key of the certificate; needed off loopback."""
    token_file: Path | None = None
    """File whose stripped content callers present as a bearer token; needed off loopback."""
    max_message_bytes: int = Field(default=MAX_MESSAGE_BYTES, gt=0)
    """Largest message accepted or sent, in bytes."""
    drain_timeout_s: float = Field(default=5.0, ge=0)
    """On SIGTERM or SIGINT, calls in flight get this long, in seconds, before they are cut."""

    @model_validator(mode="after")
    def _protected_off_loopback(self) -> ServingConfig:
        host, _ = split_address(self.listen)
        protected = self.tls_certificate and self.tls_private_key and self.token_file
        if not is_loopback(host) and not protected:
            raise ValueError(
                f"refusing to listen on {self.listen}: off loopback a server needs TLS and a token; "
                "set tls_certificate, tls_private_key and token_file, or listen on 127.0.0.1"
            )
        return self


class ClientSecurity(BaseModel):
    """What a client presents off loopback. On loopback it is ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ca_file: Path | None = None
    """PEM roots that sign the servers' certificates; None: the system's."""
    token_file: Path | None = None
    """File with the bearer token."""

    @classmethod
    def from_environment(cls) -> ClientSecurity:
        """Reads SWE_RL_TLS_CA and SWE_RL_TOKEN_FILE (paths), both optional."""
        ca, token = os.environ.get("SWE_RL_TLS_CA"), os.environ.get("SWE_RL_TOKEN_FILE")
        return cls(ca_file=Path(ca) if ca else None, token_file=Path(token) if token else None)


def split_address(address: str) -> tuple[str, int]:
    """Splits `HOST:PORT` or `[V6]:PORT`. Raises ServingError on anything else."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise ServingError(f"bad address {address!r}: want HOST:PORT, such as 127.0.0.1:0")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """True for `localhost` and loopback IP literals; other names are never trusted to be local."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class _TokenInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls without the bearer token; health stays open for probes."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}"

        async def refuse(_request: Any, context: grpc.aio.ServicerContext) -> None:
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED,
                "missing or wrong bearer token: set SWE_RL_TOKEN_FILE",
            )

        self._refuse = grpc.unary_unary_rpc_method_handler(refuse)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        if handler_call_details.method.startswith(_HEALTH_METHODS):
            return await continuation(handler_call_details)
        metadata = dict(handler_call_details.invocation_metadata or ())
        presented = str(metadata.get("authorization", ""))
        if hmac.compare_digest(presented.encode(), self._expected.encode()):
            return await continuation(handler_call_details)
        return self._refuse


class Server:
    """A grpc.aio server with health, reflection and drain."""

    def __init__(
        self,
        config: ServingConfig,
        register: Callable[[grpc.aio.Server], None],
        service_names: Sequence[str],
    ) -> None:
        """Args: register adds the servicers; service_names are their full proto names."""
        # Clients import this module too, in an environment that serves nothing.
        from grpc_reflection.v1alpha import reflection

        self._config = config
        interceptors = []
        host, _ = split_address(config.listen)
        if config.token_file is not None and not is_loopback(host):
            interceptors.append(_TokenInterceptor(_read_token(config.token_file)))
        self.grpc_server = grpc.aio.server(
            interceptors=interceptors,
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.max_send_message_length", config.max_message_bytes),
                ("grpc.max_receive_message_length", config.max_message_bytes),
            ],
        )
        register(self.grpc_server)
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc_server)
        self._names = [*service_names, ""]
        reflection.enable_server_reflection(
            [*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME], self.grpc_server
        )
        self.address = ""

    async def start(self) -> str:
        """Binds and serves. Returns `HOST:PORT`. Raises ServingError when it cannot bind."""
        host, _ = split_address(self._config.listen)
        try:
            if is_loopback(host):
                bound = self.grpc_server.add_insecure_port(self._config.listen)
            else:
                bound = self.grpc_server.add_secure_port(self._config.listen, self._credentials())
        except RuntimeError as error:
            raise ServingError(
                f"cannot listen on {self._config.listen}: the port is in use or the address is not "
                "this host's; choose another with --listen, or port 0 for a free one"
            ) from error
        if bound == 0:
            raise ServingError(f"cannot listen on {self._config.listen}: choose another port")
        await self.grpc_server.start()
        self.address = f"[{host}]:{bound}" if ":" in host else f"{host}:{bound}"
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)
        return self.address

    async def stop(self, grace_s: float | None = None) -> None:
        """Drains: refuses new calls, lets those in flight end within grace_s, then cuts them."""
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        grace = self._config.drain_timeout_s if grace_s is None else grace_s
        await self.grpc_server.stop(grace)

    async def _set_health(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for name in self._names:
            await self._health.set(name, status)

    def _credentials(self) -> grpc.ServerCredentials:
        key, certificate = self._config.tls_private_key, self._config.tls_certificate
        assert key is not None and certificate is not None, "ServingConfig checks this"
        try:
            return grpc.ssl_server_credentials([(key.read_bytes(), certificate.read_bytes())])
        except OSError as error:
            raise ServingError(f"cannot read the TLS key or certificate: {error}") from error


def make_server(
    config: ServingConfig,
    register: Callable[[grpc.aio.Server], None],
    service_names: Sequence[str],
) -> Server:
    """Builds a server that is not bound yet; see Server."""
    return Server(config, register, service_names)


def write_address(path: Path, address: str) -> None:
    """Writes `HOST:PORT` and a newline to path, atomically."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(address + "\n")
    os.replace(temporary, path)


def add_serving_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds --listen, --address-file and the TLS arguments that every server takes."""
    parser.add_argument(
        "--listen", default="127.0.0.1:0", help="HOST:PORT; port 0 takes a free one"
    )
    parser.add_argument("--address-file", type=Path, help="the bound HOST:PORT is written here")
    parser.add_argument("--tls-certificate", type=Path, help="PEM chain, needed off loopback")
    parser.add_argument("--tls-private-key", type=Path, help="PEM key, needed off loopback")
    parser.add_argument("--token-file", type=Path, help="bearer token, needed off loopback")


def serving_config(args: argparse.Namespace) -> ServingConfig:
    """ServingConfig from add_serving_arguments' namespace. Raises ValueError (pydantic's too)."""
    return ServingConfig(
        listen=args.listen,
        tls_certificate=args.tls_certificate,
        tls_private_key=args.tls_private_key,
        token_file=args.token_file,
    )


def termination_event() -> asyncio.Event:
    """An event that SIGTERM or SIGINT sets; call it from the running loop's main thread."""
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, event.set)
    return event


async def serve(server: Server, address_file: Path | None, stop: asyncio.Event) -> None:
    """Starts the server, publishes its address, and drains it once stop is set."""
    address = await server.start()
    if address_file is not None:
        write_address(address_file, address)
    try:
        await stop.wait()
    finally:
        await server.stop()


def fail(message: object) -> int:
    """Prints a start failure as one line and returns the exit code for it."""
    text = " ".join(str(message).split())
    print(f"error: {text}", file=sys.stderr, flush=True)
    return 2


def _channel_options() -> list[tuple[str, int]]:
    return [
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        # A server that restarts on the same port is found again within two seconds.
        ("grpc.max_reconnect_backoff_ms", 2000),
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.enable_http_proxy", 0),
    ]


_GC_THRESHOLDS = (50_000, 20, 50)
"""Messages and tasks are freed by reference counts. With Python's own thresholds a run on two cores
finished about a tenth fewer trajectories."""


def run_service(service: Coroutine[Any, Any, None]) -> None:
    """`asyncio.run` for a process that serves until it is told to stop: on uvloop, with what was
    imported left to no garbage collection, and the rest to fewer.
    """
    import uvloop

    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
    uvloop.run(service)


def _read_token(path: Path) -> str:
    try:
        token = path.read_text().strip()
    except OSError as error:
        raise ServingError(f"cannot read the token file {path}: {error}") from error
    if len(token) < 32:
        raise ServingError(f"the token in {path} has {len(token)} characters: want at least 32")
    return token


def _client_credentials(
    address: str, security: ClientSecurity | None
) -> grpc.ChannelCredentials | None:
    host, _ = split_address(address)
    if is_loopback(host):
        return None
    if security is None or security.token_file is None:
        raise ServingError(
            f"{address} is not loopback: dialling it needs a token file "
            "(SWE_RL_TOKEN_FILE) and, for a private authority, SWE_RL_TLS_CA"
        )
    roots = security.ca_file.read_bytes() if security.ca_file else None
    return grpc.composite_channel_credentials(
        grpc.ssl_channel_credentials(roots),
        grpc.access_token_call_credentials(_read_token(security.token_file)),
    )


def dial(address: str, security: ClientSecurity | None = None) -> grpc.aio.Channel:
    """An asyncio channel to `HOST:PORT`. Raises ServingError off loopback without a token."""
    credentials = _client_credentials(address, security)
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=_channel_options())
    return grpc.aio.secure_channel(address, credentials, options=_channel_options())


def dial_sync(address: str, security: ClientSecurity | None = None) -> grpc.Channel:
    """A blocking channel to `HOST:PORT`. Raises ServingError off loopback without a token."""
    credentials = _client_credentials(address, security)
    if credentials is None:
        return grpc.insecure_channel(address, options=_channel_options())
    return grpc.secure_channel(address, credentials, options=_channel_options())


async def is_serving(address: str, service: str = "", timeout_s: float = 2.0) -> bool:
    """True when the server at address answers its health check with SERVING in time."""
    async with dial(address, ClientSecurity.from_environment()) as channel:
        try:
            reply = await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=service), timeout=timeout_s
            )
        except grpc.aio.AioRpcError:
            return False
        return reply.status == health_pb2.HealthCheckResponse.SERVING
