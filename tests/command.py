"""Runs the real `swe_rl` command in a directory of its own, the way a user does."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tests import leftovers

T = TypeVar("T")

SWE_RL = Path("launch/swe_rl").absolute()
"""The command in this test's runfiles."""


@dataclass(frozen=True)
class Outcome:
    """How a command ended, and what it left on the machine."""

    code: int
    out: str
    err: str
    left: dict[str, list[str]]


class Command:
    """One start of the command; `marker` is in the environment of all that it starts."""

    def __init__(self, workdir: Path, *arguments: str, env: dict[str, str] | None = None) -> None:
        self.marker = f"SWE_RL_TEST_MARKER={uuid.uuid4().hex}"
        name, _, value = self.marker.partition("=")
        self._before = leftovers.footprint(self.marker)
        self.process = subprocess.Popen(
            [SWE_RL, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                name: value,
                "BUILD_WORKING_DIRECTORY": str(workdir),
                "COLUMNS": "200",
                **(env or {}),
            },
            start_new_session=True,
        )

    def finish(self, timeout_s: float) -> Outcome:
        """Waits for the end; a command past its deadline is killed and fails the test."""
        try:
            out, err = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            out, err = self.process.communicate()
            raise AssertionError(
                f"not over after {timeout_s} s\n{out[-3000:]}\n{err[-3000:]}"
            ) from None
        left = leftovers.wait_until_clean(self._before, self.marker)
        return Outcome(self.process.returncode, out, err, left)

    def wait_until(self, what: str, look: Callable[[], T | None], timeout_s: float) -> T:
        """The first true result of `look`, asked every few milliseconds while the command runs."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if found := look():
                return found
            assert self.process.poll() is None, (what, self.process.communicate())
            time.sleep(0.003)
        raise AssertionError(f"{what} did not come within {timeout_s} s")

    def interrupt(self, number: int = signal.SIGINT) -> None:
        """Sends a signal to the command alone, as `kill` does."""
        self.process.send_signal(number)


def swe_rl(
    workdir: Path, *arguments: str, timeout_s: float = 60.0, env: dict[str, str] | None = None
) -> Outcome:
    """Runs the command to its end."""
    return Command(workdir, *arguments, env=env).finish(timeout_s)


def run_root(workdir: Path) -> Path:
    """The one run below workdir/runs."""
    runs = sorted((workdir / "runs").iterdir())
    assert len(runs) == 1, runs
    return runs[0]


def pid_of(root: Path, module: str) -> int | None:
    """The process that runs `module` for the run in root; None while there is none."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if module in words and any(f"{root}/" in word for word in words):
                found.append(int(entry.name))
    return min(found, default=None)
