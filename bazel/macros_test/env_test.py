"""The same checks in each environment: the right interpreter, our modules, generated code."""

import json
import os
import pathlib
import subprocess
import sys
from concurrent import futures

import grpc
import pytest

from bazel.macros_test import echo_pb2, echo_pb2_grpc

ENV = os.environ["EXPECTED_ENV"]


class _Echo(echo_pb2_grpc.EchoServicer):
    def Say(self, request, context):
        del context
        return request


def test_interpreter_is_the_environments() -> None:
    assert f"/{ENV}-" in sys.prefix
    assert sys.flags.safe_path


def test_generated_grpc_code_serves_on_loopback() -> None:
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=1))
    echo_pb2_grpc.add_EchoServicer_to_server(_Echo(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            reply = echo_pb2_grpc.EchoStub(channel).Say(
                echo_pb2.EchoMessage(text="hello"), timeout=20
            )
    finally:
        server.stop(None)
    assert reply.text == "hello"


@pytest.mark.parametrize("kind", ["launcher", "module"])
def test_children_see_only_runfiles(kind: str, tmp_path: pathlib.Path) -> None:
    """A child started in a folder with its own `bazel/` still imports ours."""
    (tmp_path / "bazel").mkdir()
    (tmp_path / "bazel" / "__init__.py").write_text("raise RuntimeError('wrong bazel/')\n")
    launcher = pathlib.Path("bazel/macros_test/echo_server").absolute()
    command = {
        "launcher": [str(launcher)],
        "module": [sys.executable, "-m", "bazel.macros_test.echo_server"],
    }[kind]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    child = json.loads(done.stdout)
    assert child["cwd"] == str(tmp_path)
    assert str(tmp_path) not in child["path"] and "" not in child["path"]
    if kind == "launcher":
        assert child["version"] == [3, 11]


@pytest.mark.skipif(ENV == "harness", reason="extensions are built for Python 3.11")
def test_extension() -> None:
    from bazel.macros_test import _adder

    assert _adder.add(2, 3) == 5


async def test_async_tests_run() -> None:
    pass
