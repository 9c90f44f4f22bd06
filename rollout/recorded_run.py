"""The batches of a recorded run along its surviving lineage, read again for a replay.

Owner: rollout.recorded_server. Reads only: the ledger is copied first (SQLite's backup, so that a
run that is under way, or was killed, may be read too), the token files are read in place.

    RUN/ledger.db --backup--> scratch/ledger.db --> batches: groups, members, versions
    RUN/tokens/   ----------------------------> sequences, built as the manager builds them

Invariant: what it hands out for a step is what the manager handed out for it: the groups in their
order, the valid members, the same sequences, and the version at which the trainer consumed them.
"""

from __future__ import annotations

import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

from proto import rollout_pb2 as pb
from proto import trajectory_pb2 as tpb
from rollout.attempt_table import AttemptTable, GroupRules
from rollout.batch_table import BatchTable
from rollout.config import RecordedRunConfig
from rollout.errors import NotFoundError, RolloutError
from rollout.evaluations import Evaluations
from rollout.ledger import Ledger
from rollout.sessions import Sessions
from rollout.token_store import TokenStore


class RecordedRun:
    """Steps 1 to num_steps of a run."""

    def __init__(self, config: RecordedRunConfig) -> None:
        """Copies the ledger and checks that every step is there, tokens included.

        Raises:
            RolloutError: there is no ledger that this program can read.
            NotFoundError: a step was never trained, or its tokens were deleted.
        """
        self._config = config
        self._run_dir = run_dir = config.rollout.run_dir
        if not (run_dir / "ledger.db").is_file() or not (run_dir / "tokens").is_dir():
            raise NotFoundError(f"{run_dir} holds no ledger.db and tokens/ of a run to replay")
        config.scratch_dir.mkdir(parents=True, exist_ok=True)
        self._scratch = tempfile.TemporaryDirectory(prefix="ledger-", dir=config.scratch_dir)
        try:
            copy = Path(self._scratch.name) / "ledger.db"
            _back_up(run_dir / "ledger.db", copy)
            self._ledger = Ledger(copy, fsync=False)
        except RolloutError:
            self._scratch.cleanup()
            raise
        attempts = AttemptTable(self._ledger, GroupRules(2, True, 0), _make_no_key)
        tokens = TokenStore(run_dir / "tokens", fsync=False)
        evaluations = Evaluations(self._ledger, attempts)
        self._batches = BatchTable(self._ledger, attempts)
        self._sessions = Sessions(config.rollout, attempts, evaluations, tokens)
        try:
            self._check()
        except RolloutError:
            self.close()
            raise

    def close(self) -> None:
        """Removes the copy."""
        self._ledger.close()
        self._scratch.cleanup()

    def batch(self, step: int) -> pb.NextBatchReply | None:
        """The batch that the surviving lineage trained at `step`; None after the last step.

        The batch that was claimed for the step after those trained is there too: it is what a
        trainer that failed was working on.
        """
        row = self._ledger.one(
            "SELECT batch_id, claimed_at_version, consumed_at_version FROM batches"
            " WHERE step=? AND state<>'rewound'",
            step,
        )
        if row is None or step > self._config.num_steps:
            return None
        return pb.NextBatchReply(
            batch_id=row["batch_id"],
            groups=self._batches.groups(row["batch_id"]),
            max_staleness=self._config.rollout.max_staleness,
            replayed_at_version=row["consumed_at_version"] or row["claimed_at_version"],
        )

    def sequences(self, attempt_id: str) -> list[tpb.TokenSequence]:
        """The branches of an attempt. Raises NotFoundError or CorruptStoreError."""
        return self._sessions.training_sequences(attempt_id)

    def _check(self) -> None:
        wanted = self._config.num_steps
        rows = self._ledger.db.execute(
            "SELECT step, tokens_deleted FROM batches WHERE state<>'rewound' AND step<=?", (wanted,)
        ).fetchall()
        missing = sorted(set(range(1, wanted + 1)) - {row["step"] for row in rows})
        if missing:
            raise NotFoundError(
                f"the ledger of {self._run_dir} has no batch of step {missing[0]}: "
                f"{len(rows)} of {wanted} steps were recorded; replay fewer steps"
            )
        deleted = sorted(row["step"] for row in rows if row["tokens_deleted"])
        if deleted:
            raise NotFoundError(
                f"the tokens of step {deleted[0]} (and of {len(deleted) - 1} more) of "
                f"{self._run_dir} were deleted as no checkpoint needed them: only a run with "
                "rollout.keep_consumed_tokens = true can be replayed"
            )


def _back_up(source: Path, copy: Path) -> None:
    """Copies a database that another process may have open, its write-ahead log included."""
    try:
        with (
            closing(sqlite3.connect(f"{source.as_uri()}?mode=ro", uri=True)) as read,
            closing(sqlite3.connect(copy)) as write,
        ):
            read.backup(write)
    except sqlite3.Error as error:
        raise RolloutError(f"cannot read the ledger {source}: {error}") from error


def _make_no_key() -> str:
    raise AssertionError("a recorded run leases nothing")
