"""The folder of one run: its paths, its lock, its state on disk.

Owner: `launch`. One process works on a run at a time (flock on `run.lock`). `state.json` is
written atomically; it names what the job has finished, so that `resume` goes on after it.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import IO, Any

from launch.errors import UsageError


class RunDirectory:
    """Paths and state of `runs/NAME`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._lock: IO[str] | None = None

    config = property(lambda self: self.root / "config.toml")
    state_file = property(lambda self: self.root / "state.json")
    logs = property(lambda self: self.root / "logs")
    metrics = property(lambda self: self.root / "metrics")
    tasks = property(lambda self: self.root / "tasks")
    model = property(lambda self: self.root / "model")
    layers = property(lambda self: self.root / "layers")
    data = property(lambda self: self.root / "data")
    checkpoints = property(lambda self: self.root / "checkpoints")
    trajectories = property(lambda self: self.root / "trajectories")
    processes = property(lambda self: self.root / "processes")
    addresses = property(lambda self: self.processes / "addresses.json")
    export = property(lambda self: self.root / "export")
    ledger = property(lambda self: self.root / "ledger.db")
    report = property(lambda self: self.root / "report.html")

    def create(self) -> None:
        """Makes the folders. Raises UsageError when the place cannot be written."""
        try:
            for path in (self.logs, self.metrics, self.data, self.trajectories, self.processes):
                path.mkdir(parents=True, exist_ok=True)
            probe = self.root / ".writable"
            probe.write_text("")
            probe.unlink()
        except OSError as error:
            raise UsageError(
                f"cannot write the run directory {self.root}: {error.strerror}; choose another with "
                "--run.directory, or make it writable"
            ) from error

    def lock(self) -> None:
        """Takes the run for this process. Raises UsageError when another one has it."""
        self._lock = (self.root / "run.lock").open("a+")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UsageError(f"the run {self.root} is in use by another process") from error

    def is_locked(self) -> bool:
        """Whether another process works on the run now."""
        try:
            self.lock()
        except UsageError:
            return True
        finally:
            self.unlock()
        return False

    def unlock(self) -> None:
        """Gives the run back."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def load_state(self) -> dict[str, Any]:
        """The job's state; empty for a new run. Raises UsageError when it cannot be read."""
        if not self.state_file.exists():
            return {}
        try:
            state = json.loads(self.state_file.read_text())
        except (OSError, ValueError) as error:
            raise UsageError(
                f"cannot read {self.state_file}: {error}; put back a copy, or start another run"
            ) from error
        if not isinstance(state, dict) or not all(
            isinstance(state.get(key, []), list) for key in ("stages", "changed_settings")
        ):
            raise UsageError(
                f"{self.state_file} is not a run's state; put back a copy, or start another run"
            )
        return state

    def check_records(self) -> None:
        """Raises UsageError when what a run under way has recorded is gone.

        A manager would make a new ledger, and use the names of groups and attempts again.
        """
        begun = [stage["name"] for stage in self.load_state().get("stages", [])]
        if begun in ([], ["prepare"]):
            return
        wal = self.ledger.with_name(self.ledger.name + "-wal")
        if not any(path.exists() and path.stat().st_size for path in (self.ledger, wal)):
            raise UsageError(
                f"{self.ledger} is missing or empty, but the run has done {', '.join(begun)}: put "
                "back a copy, or start another run"
            )

    def save_state(self, state: dict[str, Any]) -> None:
        """Writes the job's state atomically and durably."""
        write_json(self.state_file, state)


def write_json(path: Path, value: Any) -> None:
    """Writes value as JSON; readers see the old text or the new one, also after a crash."""
    write_text(path, json.dumps(value, indent=1))


def write_text(path: Path, text: str) -> None:
    """Writes text durably; readers see the old text or the new one, also after a crash."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
