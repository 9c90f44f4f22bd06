"""Our top-level names shadow nothing that an environment's packages import.

`proto` is also the module of PyPI's proto-plus and `kernels` is Hugging Face's: with our root
first on the path, a dependency that imports either would get ours. Every such import in the
three environments is found by reading their sources; each one that stands has a reason here.
"""

import os
import pathlib
import re
import subprocess

import pytest

from bazel import environments

_OURS = (
    "bazel",
    "kernels",
    "launch",
    "proto",
    "rollout",
    "sandbox",
    "tests",
    "trainer",
    "weightsync",
)
_NAMES = "|".join(_OURS)
_IMPORT = re.compile(
    rf"^[ \t]*(?:from[ \t]+({_NAMES})(?:\.[\w.]+)?[ \t]+import\b"
    rf"|import[ \t]+(?:[\w.]+(?:[ \t]+as[ \t]+\w+)?[ \t]*,[ \t]*)*({_NAMES})\b)",
    re.MULTILINE,
)

# Path prefix under site-packages -> why an import of the name there does no harm.
_ALLOWED = {
    ("kernels", "transformers/"): (
        "optional: guarded by is_kernels_available(), which asks for the distribution's version, "
        "or by `except ImportError` on names that ours lacks; a test below proves it"
    ),
    ("kernels", "sglang/kernels/ops/attention/flash_attention_v3.py"): (
        "FlashAttention 3 on Hopper, inside a try that falls back to sgl_kernel's"
    ),
    ("proto", "litellm/litellm_core_utils/streaming_handler.py"): (
        "only for streamed Vertex AI chunks; we never call Vertex AI"
    ),
}


def _site_packages(env: str) -> pathlib.Path:
    code = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    python = environments.PYTHON[env]
    return pathlib.Path(subprocess.check_output([python, "-I", "-c", code], text=True).strip())


@pytest.mark.parametrize("env", sorted(environments.PYTHON))
def test_no_unexplained_import_of_our_names(env: str) -> None:
    root = _site_packages(env)
    found = []
    for path in root.rglob("*.py"):
        relative = path.relative_to(root).as_posix()
        for match in _IMPORT.finditer(path.read_text(errors="replace")):
            name = match.group(1) or match.group(2)
            allowed = any(n == name and relative.startswith(p) for n, p in _ALLOWED)
            if not allowed:
                found.append(f"{relative}: {match.group(0).strip()}")
    assert not found, (
        f"packages of {env} import names that ours shadow; allow each with a reason or rename:\n"
        + "\n".join(found)
    )


@pytest.mark.parametrize("env", sorted(environments.PYTHON))
def test_no_package_is_installed_under_our_names(env: str) -> None:
    root = _site_packages(env)
    taken = [n for n in _OURS if (root / n).exists() or (root / f"{n}.py").exists()]
    assert not taken


def test_transformers_does_not_take_ours_for_hugging_faces_kernels(tmp_path: pathlib.Path) -> None:
    """`main` imports a model with a package named kernels/ on the path; see _ALLOWED."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").touch()
    code = (
        "import kernels\n"
        "from transformers.utils import is_kernels_available\n"
        "from transformers.integrations import hub_kernels\n"
        "assert not is_kernels_available() and not hub_kernels._kernels_available\n"
        "from transformers import Qwen3MoeForCausalLM\n"
    )
    command = [environments.PYTHON["main"], "-W", "ignore", "-c", code]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(tmp_path)})
