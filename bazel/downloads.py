"""Pinned files from PyPI, kept in a cache so that later runs need no network.

The one place that reaches outside once the environments are made: pip, with `--require-hashes`,
under whatever index the machine's pip is configured for. Whoever needs a file names a genrule
that fetches it while building, since tests have no network.

Invariants: a cached file has the sha256 asked for, else DownloadError; a cached folder is
complete (made aside, then renamed); concurrent callers wait for each other.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_PIP_TIMEOUT_S = 600


class DownloadError(RuntimeError):
    """pip could not fetch something, or a file is not the one that was pinned."""


def cache_root() -> Path:
    """Where downloads are kept: $SWE_RL_CACHE, else `.cache/swe_rl` of the user's home.

    The home comes from the password database: test runners replace $HOME, and a test without
    a network needs what was downloaded before.
    """
    override = os.environ.get("SWE_RL_CACHE")
    if override:
        return Path(override)
    return Path(pwd.getpwuid(os.getuid()).pw_dir) / ".cache" / "swe_rl"


def fetch_sdist(name: str, version: str, file_name: str, sha256: str) -> Path:
    """Path of a source archive in the cache, downloaded when absent. Raises DownloadError."""
    target = cache_root() / "sdists" / file_name
    if not target.exists():
        with _locked(target), tempfile.TemporaryDirectory() as scratch:
            if not target.exists():
                requirement = Path(scratch, "requirement.txt")
                requirement.write_text(f"{name}=={version} --hash=sha256:{sha256}\n")
                flags = ["--require-hashes", "--no-deps", "--no-binary=:all:", "-r", requirement]
                _pip(["download", *map(str, flags), "-d", scratch], f"{name} {version}")
                _publish(Path(scratch, file_name), target)
    found = hashlib.sha256(target.read_bytes()).hexdigest()
    if found != sha256:
        raise DownloadError(
            f"{target} has sha256 {found}, wanted {sha256}; remove it to fetch it again"
        )
    return target


def install_wheels(lock: Path, target: Path) -> None:
    """Installs the wheels of a hashed lock into folder `target`. Raises DownloadError."""
    flags = ["--require-hashes", "--no-deps", "--only-binary=:all:", "--no-compile"]
    _pip(["install", *flags, "-r", str(lock), "--target", str(target)], str(lock))


def cached_folder(path: Path, make: Callable[[Path], None]) -> Path:
    """`path`, filled by `make(empty folder)` when it is not there yet."""
    if not path.is_dir():
        with _locked(path):
            if not path.is_dir():
                staging = Path(tempfile.mkdtemp(prefix=".new-", dir=path.parent))
                try:
                    staging.chmod(0o755)
                    make(staging)
                    os.replace(staging, path)
                finally:
                    shutil.rmtree(staging, ignore_errors=True)
    return path


def _publish(source: Path, target: Path) -> None:
    staging = target.with_name(target.name + ".new")
    try:
        shutil.copyfile(source, staging)
    except FileNotFoundError as error:
        raise DownloadError(f"pip did not write {source.name}; got {error}") from error
    os.replace(staging, target)


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = target.with_name(target.name + ".lock").open("w")
    except OSError as error:
        raise DownloadError(
            f"{target} is not in the cache, and the cache cannot be written: {error}. Run "
            "`./bazelw build //...` once with a network"
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _pip(arguments: list[str], what: str) -> None:
    # Our own import path must not reach pip's build back ends.
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            timeout=_PIP_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise DownloadError(f"pip took over {_PIP_TIMEOUT_S} s to fetch {what}") from error
    if done.returncode:
        lines = [n for n in done.stdout.splitlines() if not n.startswith("WARNING: Location")]
        raise DownloadError(f"pip could not fetch {what}: {' | '.join(lines[-4:])}")
