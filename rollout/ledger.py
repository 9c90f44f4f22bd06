"""The ledger: one SQLite database (WAL) that says what happened and who owns what.

Owner: rollout.manager, the only process that opens it. This file holds the schema, the
transactions, tasks with their sampler, lineage, and update windows; attempt_table.py and
batch_table.py hold the other transitions over the same connection.

    task -> group {open, ready, dropped(reason), claimed, trained}
              `-> attempt {queued, leased, running, finished(reward, cause)} -> turns
            batch {claimed by step, trained, rewound}

Invariants: every transition is one transaction; an exception inside rolls all of it back.
A weight_version never repeats, over lineages too. A second manager on the same file is
refused (a lock file beside it); other programs may read it while a run goes on.
"""

from __future__ import annotations

import fcntl
import json
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

from rollout.errors import ConflictError, RolloutError
from rollout.task_sampler import SamplerState, initial_state, next_task

SCHEMA_VERSION = 2
_SCHEMA = """
CREATE TABLE meta(key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE tasks(task_id TEXT PRIMARY KEY, path TEXT NOT NULL, pool INTEGER NOT NULL);
CREATE TABLE groups(
  number INTEGER PRIMARY KEY, group_id TEXT NOT NULL UNIQUE, task_id TEXT NOT NULL,
  state TEXT NOT NULL, reason TEXT NOT NULL DEFAULT '', started_at REAL NOT NULL,
  batch_id TEXT NOT NULL DEFAULT '');
CREATE INDEX groups_by_state ON groups(state);
CREATE INDEX groups_by_batch ON groups(batch_id);
CREATE TABLE attempts(
  number INTEGER PRIMARY KEY, attempt_id TEXT NOT NULL UNIQUE,
  group_id TEXT NOT NULL DEFAULT '', evaluation TEXT NOT NULL DEFAULT '',
  task_id TEXT NOT NULL, agent TEXT NOT NULL, state TEXT NOT NULL,
  epoch INTEGER NOT NULL DEFAULT 0, num_leases INTEGER NOT NULL DEFAULT 0,
  num_retries INTEGER NOT NULL DEFAULT 0, worker TEXT NOT NULL DEFAULT '',
  lease_expires_at REAL NOT NULL DEFAULT 0, session_key TEXT UNIQUE,
  reward REAL, cause INTEGER NOT NULL DEFAULT 0, report BLOB NOT NULL DEFAULT x'',
  started_at REAL NOT NULL DEFAULT 0, finished_at REAL NOT NULL DEFAULT 0,
  finish_order INTEGER NOT NULL DEFAULT 0, num_tokens INTEGER NOT NULL DEFAULT 0,
  num_trained_tokens INTEGER NOT NULL DEFAULT 0, num_turns INTEGER NOT NULL DEFAULT 0,
  oldest_weight_version INTEGER NOT NULL DEFAULT 0,
  newest_weight_version INTEGER NOT NULL DEFAULT 0,
  consumed_at_version INTEGER NOT NULL DEFAULT 0,
  turn_times BLOB NOT NULL DEFAULT x'', trained BLOB NOT NULL DEFAULT x'');
CREATE INDEX attempts_by_state ON attempts(state, evaluation);
CREATE INDEX attempts_by_group ON attempts(group_id);
CREATE INDEX attempts_by_finish ON attempts(finish_order);
CREATE TABLE tries(
  attempt_id TEXT NOT NULL, epoch INTEGER NOT NULL, cause INTEGER NOT NULL,
  evidence TEXT NOT NULL, ended_at REAL NOT NULL, PRIMARY KEY(attempt_id, epoch));
CREATE TABLE turns(
  attempt_id TEXT NOT NULL, epoch INTEGER NOT NULL, turn_index INTEGER NOT NULL,
  digest BLOB NOT NULL, num_sampled INTEGER NOT NULL, total_length INTEGER NOT NULL,
  file TEXT NOT NULL, offset INTEGER NOT NULL, size INTEGER NOT NULL,
  PRIMARY KEY(attempt_id, epoch, turn_index)) WITHOUT ROWID;
CREATE TABLE batches(
  batch_id TEXT PRIMARY KEY, step INTEGER NOT NULL, lineage INTEGER NOT NULL,
  state TEXT NOT NULL, claimed_at_version INTEGER NOT NULL,
  consumed_at_version INTEGER NOT NULL DEFAULT 0, tokens_deleted INTEGER NOT NULL DEFAULT 0);
CREATE UNIQUE INDEX batches_by_step ON batches(step) WHERE state <> 'rewound';
CREATE TABLE lineages(
  token TEXT PRIMARY KEY, lineage INTEGER NOT NULL, step INTEGER NOT NULL,
  max_weight_version INTEGER NOT NULL, num_batches INTEGER NOT NULL);
CREATE TABLE evaluations(
  name TEXT PRIMARY KEY, request BLOB NOT NULL, temperature REAL NOT NULL,
  weight_version INTEGER NOT NULL);
CREATE TABLE windows(
  epoch INTEGER PRIMARY KEY, weight_version INTEGER NOT NULL, phase TEXT NOT NULL,
  engines TEXT NOT NULL);
"""

CLOSED_PHASE = "closed"
_LOCK_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Window:
    """An update window as it was last saved."""

    epoch: int
    weight_version: int
    phase: str
    engines: dict[str, str]  # engine name -> its phase


class Ledger:
    """Connection, schema and the small tables. Single-threaded: one event loop owns it."""

    def __init__(self, path: Path, *, fsync: bool, lock_wait_s: float = 0.0) -> None:
        """Opens or makes the database; blocks up to `lock_wait_s` for a manager that is ending.

        Raises:
            RolloutError: the folder cannot be written, another manager has the file, or it
                has another schema.
        """
        self._folder = path.parent
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock: IO[str] = path.with_name(path.name + ".lock").open("w")
            _lock(self._lock, lock_wait_s)
            self.db = sqlite3.connect(path, isolation_level=None, timeout=5.0)
            self.db.row_factory = sqlite3.Row
            self.db.execute("PRAGMA journal_mode=WAL")
            self.db.execute(f"PRAGMA synchronous={'FULL' if fsync else 'NORMAL'}")
            self._depth = 0
            self._make_schema()
        except (OSError, sqlite3.Error) as error:
            raise RolloutError(
                f"cannot open the ledger {path}: {error}; the folder must be writable and on a "
                "local disk, and no other manager may run on it"
            ) from error

    @classmethod
    def reader(cls, path: Path) -> Ledger:
        """The ledger for reading only, also while a manager has it.

        Raises:
            RolloutError: there is none, or it has another schema.
        """
        ledger = cls.__new__(cls)
        ledger._folder, ledger._depth = path.parent, 0
        try:
            ledger._lock = path.open()  # held like a writer's, but never locked
            ledger.db = sqlite3.connect(
                f"file:{quote(str(path.absolute()))}?mode=ro", uri=True, isolation_level=None
            )
            ledger.db.row_factory = sqlite3.Row
            version = ledger.number("PRAGMA user_version")
        except (OSError, sqlite3.Error) as error:
            raise RolloutError(f"cannot read the ledger {path}: {error}") from error
        if version != SCHEMA_VERSION:
            raise _unlike(version)
        return ledger

    def close(self) -> None:
        """Closes the database; the write-ahead log is folded in."""
        self.db.close()
        self._lock.close()

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """One transaction; inner ones join the outermost. No await may stand inside."""
        if self._depth == 0:
            self.db.execute("BEGIN IMMEDIATE")
        self._depth += 1
        try:
            yield self.db
        except BaseException:
            self._depth -= 1
            if self._depth == 0:
                self.db.execute("ROLLBACK")
            raise
        self._depth -= 1
        if self._depth == 0:
            self.db.execute("COMMIT")

    def one(self, sql: str, *parameters: object) -> sqlite3.Row | None:
        """The first row, or None."""
        row: sqlite3.Row | None = self.db.execute(sql, parameters).fetchone()
        return row

    def number(self, sql: str, *parameters: object) -> int:
        """The first column of the first row as an int; 0 when there is none."""
        row = self.one(sql, *parameters)
        return int(row[0] or 0) if row is not None else 0

    # ---- meta

    def get_meta(self, key: str, default: str = "") -> str:
        """A saved value, or `default`."""
        row = self.one("SELECT value FROM meta WHERE key=?", key)
        return str(row[0]) if row is not None else default

    def set_meta(self, key: str, value: object) -> None:
        """Saves a value as text."""
        self.db.execute("INSERT OR REPLACE INTO meta VALUES(?,?)", (key, str(value)))

    def next_number(self, counter: str) -> int:
        """Counts from 1, never back; call it inside the transaction that uses the number."""
        value = int(self.get_meta(counter, "0")) + 1
        self.set_meta(counter, value)
        return value

    @property
    def weight_version(self) -> int:
        """The version that the engines serve; 0 before the first publication."""
        return int(self.get_meta("weight_version", "0"))

    @property
    def max_weight_version(self) -> int:
        """The highest version for which a window was ever opened."""
        return int(self.get_meta("max_weight_version", "0"))

    @property
    def lineage(self) -> int:
        """Counts the rewinds; 0 before the first trainer."""
        return int(self.get_meta("lineage", "0"))

    def check_new_version(self, weight_version: int) -> None:
        """Raises ConflictError unless the version is above every one taken before."""
        highest = self.max_weight_version
        if weight_version <= highest:
            raise ConflictError(
                f"weight_version {weight_version} was used before: the highest is {highest}; "
                f"publish as {highest + 1} or more"
            )

    def take_weight_version(self, weight_version: int) -> None:
        """Reserves a version for good, before any engine commits it. Raises ConflictError."""
        with self.transaction():
            self.check_new_version(weight_version)
            self.set_meta("max_weight_version", weight_version)

    def publish(self, weight_version: int) -> None:
        """Records that the engines serve `weight_version`."""
        with self.transaction():
            self.set_meta("weight_version", weight_version)

    # ---- tasks

    def add_task(self, task_id: str, path: str, pool: int) -> bool:
        """True if it is new. Raises ConflictError if it is known with another path or pool.

        A path below the ledger's folder is kept relative to it: the run may be moved as a whole.
        """
        path = self._kept(path)
        with self.transaction():
            row = self.one("SELECT path, pool FROM tasks WHERE task_id=?", task_id)
            if row is None:
                self.db.execute("INSERT INTO tasks VALUES(?,?,?)", (task_id, path, pool))
                return True
            if (self._kept(row["path"]), row["pool"]) != (path, pool):
                raise ConflictError(
                    f"task {task_id} is known with path {row['path']} in pool {row['pool']}; got "
                    f"{path} in pool {pool}. Give the new task another id"
                )
            return False

    def task_ids(self, pool: int) -> list[str]:
        """Ids of a pool, sorted."""
        rows = self.db.execute("SELECT task_id FROM tasks WHERE pool=? ORDER BY task_id", (pool,))
        return [row[0] for row in rows]

    def task_path(self, task_id: str) -> str | None:
        """The task's folder, or None for an unknown id."""
        row = self.one("SELECT path FROM tasks WHERE task_id=?", task_id)
        return None if row is None else str(self._folder / row[0])

    def _kept(self, path: str) -> str:
        inside = Path(path).is_relative_to(self._folder)
        return str(Path(path).relative_to(self._folder)) if inside else path

    def sample_task(self, pool: int, seed: int) -> str | None:
        """Takes the next training task; None while the pool is empty."""
        with self.transaction():
            saved = self.get_meta("sampler")
            state = _load_sampler(saved) if saved else initial_state(seed)
            position = self.get_meta("sampler_position")
            if position:
                state = SamplerState(state.epoch, int(position), state.order, state.random_state)
            task_ids = self.task_ids(pool) if state.position >= len(state.order) else state.order
            if not task_ids:
                return None
            task, after = next_task(state, task_ids)
            if after.epoch != state.epoch:  # the long part changes once an epoch
                self.set_meta("sampler", _dump_sampler(after))
            self.set_meta("sampler_position", after.position)
            return task

    # ---- update windows (rollout.engines' WindowStore)

    def next_window_epoch(self) -> int:
        """A window epoch above every earlier one, also after a restart."""
        with self.transaction():
            return self.next_number("window_epoch")

    def save_window(
        self, epoch: int, weight_version: int, phase: str, engines: dict[str, str]
    ) -> None:
        """Saves the window's phase and each engine's."""
        with self.transaction() as db:
            db.execute(
                "INSERT OR REPLACE INTO windows VALUES(?,?,?,?)",
                (epoch, weight_version, phase, json.dumps(engines)),
            )

    def load_open_window(self) -> Window | None:
        """The newest window, unless its phase is `closed`."""
        row = self.one("SELECT * FROM windows ORDER BY epoch DESC LIMIT 1")
        if row is None or row["phase"] == CLOSED_PHASE:
            return None
        return Window(row["epoch"], row["weight_version"], row["phase"], json.loads(row["engines"]))

    def _make_schema(self) -> None:
        with self.transaction():
            version = self.number("PRAGMA user_version")
            if version == SCHEMA_VERSION:
                return
            if version != 0:
                raise _unlike(version)
            for statement in _SCHEMA.split(";"):
                self.db.execute(statement)
            self.db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")


def _lock(file: IO[str], wait_s: float) -> None:
    """Takes the file's lock; a holder that was told to end may need a while. Raises OSError."""
    give_up_s = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= give_up_s:
                raise
            time.sleep(_LOCK_POLL_S)


def _unlike(version: int) -> RolloutError:
    return RolloutError(
        f"the ledger has schema {version}, this program wants {SCHEMA_VERSION}; use the program "
        "that began the run"
    )


def _dump_sampler(state: SamplerState) -> str:
    return json.dumps([state.epoch, state.order, state.random_state])


def _load_sampler(text: str) -> SamplerState:
    loaded: list[Any] = json.loads(text)
    epoch, order, random_state = loaded
    return SamplerState(epoch, 0, tuple(order), random_state)
