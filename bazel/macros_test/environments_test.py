"""bazel.environments names a working interpreter for each environment."""

import subprocess

import pytest

from bazel import environments


@pytest.mark.parametrize(
    ("env", "module"), [("main", "torch"), ("engine", "sglang"), ("harness", "harbor")]
)
def test_interpreter_has_its_packages(env: str, module: str) -> None:
    code = f"import importlib.util; assert importlib.util.find_spec({module!r})"
    subprocess.run([environments.PYTHON[env], "-P", "-c", code], check=True)
