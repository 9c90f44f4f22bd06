"""Servers: loopback is open, anything else is protected, ports are not shared, drain works."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import subprocess
import sys

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from proto import sandbox_pb2, sandbox_pb2_grpc, serving

NAME = "swe_rl.sandbox.v1.SandboxBroker"


class Broker(sandbox_pb2_grpc.SandboxBrokerServicer):
    """Answers GetStatus, after `delay_s`."""

    delay_s = 0.0

    async def GetStatus(self, request, context):
        await asyncio.sleep(self.delay_s)
        return sandbox_pb2.GetStatusReply(capacity=7)


def make(config: serving.ServingConfig, broker: Broker | None = None) -> serving.Server:
    def register(server):
        sandbox_pb2_grpc.add_SandboxBrokerServicer_to_server(broker or Broker(), server)

    return serving.make_server(config, register, [NAME])


async def capacity(channel) -> int:
    stub = sandbox_pb2_grpc.SandboxBrokerStub(channel)
    return (await stub.GetStatus(sandbox_pb2.GetStatusRequest(), timeout=10)).capacity


def test_loopback_serves_calls_health_and_reflection():
    async def scenario():
        server = make(serving.ServingConfig())
        address = await server.start()
        async with serving.dial(address) as channel:
            assert await capacity(channel) == 7
        assert await serving.is_serving(address, NAME)

        def reflect():
            with serving.dial_sync(address) as channel:
                return list(ProtoReflectionDescriptorDatabase(channel).get_services())

        assert NAME in await asyncio.to_thread(reflect)
        await server.stop(0)
        assert not await serving.is_serving(address, NAME, timeout_s=1)

    asyncio.run(scenario())


def test_a_taken_port_is_one_clear_error():
    async def scenario():
        first = make(serving.ServingConfig())
        address = await first.start()
        second = make(serving.ServingConfig(listen=address))
        with pytest.raises(serving.ServingError, match="in use"):
            await second.start()
        await first.stop(0)

    asyncio.run(scenario())


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "example.org:80"])
def test_off_loopback_needs_tls_and_token(listen):
    with pytest.raises(ValueError, match="off loopback a server needs TLS and a token"):
        serving.ServingConfig(listen=listen)


@pytest.mark.parametrize("address", ["nohost", ":80", "h:x", "h:70000"])
def test_bad_addresses_are_refused(address):
    with pytest.raises(serving.ServingError, match="want HOST:PORT"):
        serving.split_address(address)


def test_dialling_off_loopback_without_a_token_is_refused():
    with pytest.raises(serving.ServingError, match="needs a token"):
        serving.dial("192.0.2.1:1")


def test_drain_lets_a_call_in_flight_end():
    async def scenario():
        broker = Broker()
        broker.delay_s = 0.3
        server = make(serving.ServingConfig(), broker)
        async with serving.dial(await server.start()) as channel:
            call = asyncio.create_task(capacity(channel))
            await asyncio.sleep(0.1)
            await server.stop()
            assert await call == 7

    asyncio.run(scenario())


@pytest.fixture(name="certificate")
def certificate_fixture(tmp_path):
    """A self-signed certificate for 127.0.0.1: (certificate, key, token) paths."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "swe_rl test")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False
        )
        .sign(key, hashes.SHA256())
    )
    paths = tmp_path / "cert.pem", tmp_path / "key.pem", tmp_path / "token"
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    paths[2].write_text("t" * 40 + "\n")
    return paths


def test_tls_and_token_off_loopback(certificate, tmp_path):
    """0.0.0.0 is bound, and reached through 127.0.0.1 with the credentials of another host."""
    cert, key, token = certificate

    async def scenario():
        config = serving.ServingConfig(
            listen="0.0.0.0:0", tls_certificate=cert, tls_private_key=key, token_file=token
        )
        server = make(config)
        port = (await server.start()).rpartition(":")[2]
        roots = grpc.ssl_channel_credentials(cert.read_bytes())

        def credentials(text):
            return grpc.composite_channel_credentials(
                roots, grpc.access_token_call_credentials(text)
            )

        async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials("t" * 40)) as channel:
            assert await capacity(channel) == 7
        for channel_credentials in (credentials("w" * 40), roots):
            async with grpc.aio.secure_channel(f"127.0.0.1:{port}", channel_credentials) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await capacity(channel)
                assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
        await server.stop(0)

    asyncio.run(scenario())


def test_a_short_token_is_refused(tmp_path):
    token = tmp_path / "token"
    token.write_text("short")
    with pytest.raises(serving.ServingError, match="at least 32"):
        serving.dial("192.0.2.1:1", serving.ClientSecurity(token_file=token))


def test_a_service_runs_on_uvloop_and_collects_garbage_rarely():
    program = (
        "import asyncio, gc\n"
        "from proto.serving import run_service\n"
        "async def serve():\n"
        "    print(type(asyncio.get_running_loop()).__module__)\n"
        "    print(gc.get_freeze_count() > 10_000, gc.get_threshold()[0])\n"
        "run_service(serve())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["uvloop", "True", "50000"], done.stderr
