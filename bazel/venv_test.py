"""bazel/venv.py: one environment a lock, and one clear message when it cannot be made."""

import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import zipfile

import pytest

_VENV = pathlib.Path(__file__).parent / "venv.py"
_METADATA = "Metadata-Version: 2.1\nName: swe-rl-toy\nVersion: 1.0\n"
_WHEEL = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def _toy_wheel(folder: pathlib.Path) -> str:
    """Writes a one-module wheel; returns its sha256."""
    path = folder / "swe_rl_toy-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("swe_rl_toy.py", "ANSWER = 42\n")
        wheel.writestr("swe_rl_toy-1.0.dist-info/METADATA", _METADATA)
        wheel.writestr("swe_rl_toy-1.0.dist-info/WHEEL", _WHEEL)
        wheel.writestr("swe_rl_toy-1.0.dist-info/RECORD", "")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _run(
    env: str, lock: pathlib.Path, folder: pathlib.Path, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs venv.py with only `folder` for home, cache and package index."""
    environment = {
        "HOME": str(folder),
        "PATH": "/usr/bin:/bin",
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_FIND_LINKS": str(folder),
        "PIP_NO_INDEX": "1",
        "SWE_RL_PYTHON": os.path.join(sys.base_prefix, "bin", "python3"),
        "SWE_RL_VENV_CACHE": str(folder / "cache"),
        **variables,
    }
    command = [sys.executable, "-I", str(_VENV), env, "--lock", str(lock)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_lock_is_installed_once_and_reused(tmp_path: pathlib.Path) -> None:
    lock = tmp_path / "toy.lock"
    lock.write_text(f"swe-rl-toy==1.0 --hash=sha256:{_toy_wheel(tmp_path)}\n")
    first = _run("main", lock, tmp_path)
    assert first.returncode == 0, first.stderr
    python = json.loads(first.stdout)["python"]
    answer = subprocess.check_output([python, "-c", "import swe_rl_toy as t; print(t.ANSWER)"])
    assert answer == b"42\n"
    marker = pathlib.Path(python).parents[1] / ".complete"
    made = marker.stat().st_mtime_ns
    # A comment does not change what a lock asks for.
    lock.write_text("# comment\n" + lock.read_text())
    second = _run("main", lock, tmp_path)
    assert second.stdout == first.stdout
    assert marker.stat().st_mtime_ns == made


def test_wrong_hash_is_one_clear_message(tmp_path: pathlib.Path) -> None:
    _toy_wheel(tmp_path)
    lock = tmp_path / "toy.lock"
    lock.write_text(f"swe-rl-toy==1.0 --hash=sha256:{'0' * 64}\n")
    done = _run("main", lock, tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith(f"swe_rl: pip could not install {lock} for the main environment")
    assert "DO NOT MATCH THE HASHES" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "cache").glob("*/.complete"))


def test_missing_python_312_is_one_clear_message(tmp_path: pathlib.Path) -> None:
    (tmp_path / "bin").mkdir()
    done = _run("harness", tmp_path / "unread.lock", tmp_path, PATH=str(tmp_path / "bin"))
    assert done.returncode == 1
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    for part in ("no Python 3.12", "pyenv install 3.12", "SWE_RL_HARNESS_PYTHON"):
        assert part in done.stderr


def test_the_wrapper_says_so_before_bazel_starts(tmp_path: pathlib.Path) -> None:
    """`bazelw` with only Python 3.11 about: one line at once, and Bazel is not started."""
    root = tmp_path / "root"
    (root / "bazel").mkdir(parents=True)
    (root / "tools").mkdir()
    for name in ("bazelw", "bazel/venv.py"):
        shutil.copy(name, root / name)
    (root / "tools/bazel").write_text("#!/bin/sh\necho bazel was started\n")
    (root / "tools/bazel").chmod(0o755)
    only = tmp_path / "bin"
    only.mkdir()
    base = os.path.join(sys.base_prefix, "bin", "python3")
    for name in ("python3", "python3.11"):
        (only / name).symlink_to(base)
    for name in ("bash", "dirname", "g++", "env"):
        (only / name).symlink_to(str(shutil.which(name)))
    env = {"PATH": str(only), "HOME": str(tmp_path), "BAZEL": str(root / "tools/bazel")}
    done = subprocess.run(
        [root / "bazelw", "test"], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: no Python 3.12")
    assert "pyenv install 3.12" in line


def test_override_of_the_wrong_version_is_refused(tmp_path: pathlib.Path) -> None:
    base = os.path.join(sys.base_prefix, "bin", "python3")
    done = _run("harness", tmp_path / "unread.lock", tmp_path, SWE_RL_HARNESS_PYTHON=base)
    assert done.returncode == 1
    assert f"SWE_RL_HARNESS_PYTHON={base} is Python 3.11" in done.stderr


@pytest.mark.parametrize("version", ["3.12", "3.13"])
def test_pyenv_is_searched(tmp_path: pathlib.Path, version: str) -> None:
    """An interpreter under ~/.pyenv is found without being on PATH."""
    fake = tmp_path / ".pyenv" / "versions" / f"{version}.1" / "bin" / "python3"
    fake.parent.mkdir(parents=True)
    # Answers the version question and refuses to make an environment.
    fake.write_text(f'#!/bin/sh\n[ "$1" = -m ] && exit 7\necho {version}\n')
    fake.chmod(0o755)
    lock = tmp_path / "toy.lock"
    lock.write_text("")
    done = _run("harness", lock, tmp_path, PATH="/nonexistent:/bin")
    assert f"{fake} could not make a virtual environment" in done.stderr
    assert "(exit status 7)" in done.stderr
