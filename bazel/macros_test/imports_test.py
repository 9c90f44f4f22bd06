"""What each environment is for imports in it; minutes of importing, so not in `//...`."""

import subprocess

import pytest

from bazel import environments


@pytest.mark.parametrize(
    ("env", "modules"),
    [
        ("main", "torch, triton, transformers, megatron.core, mbridge, grpc_tools, e2b"),
        ("main", "tensorboard, matplotlib, hypothesis, aiohttp, libcst, pyarrow, zstandard"),
        # SGLang itself wants triton; on CPU the engine launcher stands in for it first.
        ("engine", "torch, transformers, grpc, google.protobuf, fastapi, zmq"),
        ("harness", "harbor, harbor.trial.trial, minisweagent, grpc, google.protobuf"),
    ],
    ids=["trainer", "tools", "engine", "harness"],
)
def test_imports(env: str, modules: str) -> None:
    command = [environments.PYTHON[env], "-W", "ignore", "-c", "import " + modules]
    subprocess.run(command, check=True)
