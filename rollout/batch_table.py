"""Batches: claiming ready groups, training them, and going back to a checkpoint.

Owner: rollout.manager. Works on the Ledger's connection.

Invariants: a step has at most one batch that was not rewound; a group is in at most one such
batch, so along the surviving lineage each group is trained at most once. Groups are claimed
oldest start first and whole: never the first attempts to end out of more.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from proto import rollout_pb2 as pb
from rollout.attempt_table import ZERO_VARIANCE_COUNTER, AttemptTable
from rollout.errors import ConflictError, FencedError, NotFoundError
from rollout.group_filter import Member
from rollout.ledger import Ledger


@dataclass(frozen=True, slots=True)
class Rewound:
    """What a rewind did."""

    lineage: int
    max_weight_version: int
    num_batches: int


class BatchTable:
    """Transitions of batches."""

    def __init__(self, ledger: Ledger, attempts: AttemptTable) -> None:
        self._ledger = ledger
        self._attempts = attempts

    def num_ready(self) -> int:
        """Groups that wait to be claimed."""
        return self._ledger.number("SELECT COUNT(*) FROM groups WHERE state='ready'")

    def find(self, step: int) -> str | None:
        """The batch that was claimed for a step, if it stands."""
        row = self._ledger.one(
            "SELECT batch_id FROM batches WHERE step=? AND state<>'rewound'", step
        )
        return None if row is None else str(row[0])

    def claim(self, step: int, num_groups: int, weight_version: int) -> str | None:
        """Claims the `num_groups` oldest ready groups; None if there are not so many."""
        with self._ledger.transaction() as db:
            rows = db.execute(
                "SELECT number FROM groups WHERE state='ready' ORDER BY started_at, number LIMIT ?",
                (num_groups,),
            ).fetchall()
            if len(rows) < num_groups:
                return None
            lineage = self._ledger.lineage
            batch_id = f"b{step:06d}.{lineage}"
            db.execute(
                "INSERT INTO batches(batch_id, step, lineage, state, claimed_at_version)"
                " VALUES(?,?,?,'claimed',?)",
                (batch_id, step, lineage, weight_version),
            )
            db.executemany(
                "UPDATE groups SET state='claimed', batch_id=? WHERE number=?",
                [(batch_id, row[0]) for row in rows],
            )
            self._ledger.set_meta(ZERO_VARIANCE_COUNTER, 0)
            return batch_id

    def groups(self, batch_id: str) -> list[pb.BatchGroup]:
        """The batch's groups, oldest start first, with their valid members."""
        rows = self._ledger.db.execute(
            "SELECT group_id, task_id FROM groups WHERE batch_id=? ORDER BY started_at, number",
            (batch_id,),
        ).fetchall()
        result = []
        for group_id, task_id in rows:
            attempts = self._attempts.select("group_id=? ORDER BY number", group_id)
            members = [
                a.ref() for a in attempts if Member(a.cause, a.reward, a.num_trained_tokens).valid
            ]
            result.append(
                pb.BatchGroup(
                    group_id=group_id,
                    task_id=task_id,
                    members=members,
                    num_masked=len(attempts) - len(members),
                )
            )
        return result

    def acknowledge(
        self,
        batch_id: str,
        step: int,
        weight_version: int,
        dropped: Mapping[str, str],
        trajectories: Iterable[pb.TrainedTrajectory] = (),
    ) -> None:
        """Marks a batch as trained at `weight_version`; `dropped` groups as dropped, and why.

        `trajectories` say what the trainer made of each member; it is kept for reports.

        Raises:
            NotFoundError: no such batch, or not of this step, or a group is not in it.
            FencedError: it was rewound.
        """
        with self._ledger.transaction() as db:
            row = self._ledger.one("SELECT step, state FROM batches WHERE batch_id=?", batch_id)
            if row is None or row["step"] != step:
                raise NotFoundError(f"no batch {batch_id} was claimed for step {step}")
            if row["state"] == "rewound":
                raise FencedError(
                    f"batch {batch_id} was rewound: another trainer opened a new lineage; stop"
                )
            if row["state"] == "trained":
                return
            db.execute(
                "UPDATE batches SET state='trained', consumed_at_version=? WHERE batch_id=?",
                (weight_version, batch_id),
            )
            db.execute("UPDATE groups SET state='trained' WHERE batch_id=?", (batch_id,))
            for group_id, reason in dropped.items():
                changed = db.execute(
                    "UPDATE groups SET state='dropped', reason=? WHERE batch_id=? AND group_id=?",
                    (reason or "trainer", batch_id, group_id),
                )
                if changed.rowcount == 0:
                    raise NotFoundError(f"group {group_id} is not in batch {batch_id}")
            db.execute(
                "UPDATE attempts SET consumed_at_version=? WHERE group_id IN"
                " (SELECT group_id FROM groups WHERE batch_id=? AND state='trained')",
                (weight_version, batch_id),
            )
            db.executemany(
                "UPDATE attempts SET trained=? WHERE attempt_id=? AND group_id IN"
                " (SELECT group_id FROM groups WHERE batch_id=?)",
                [(t.SerializeToString(), t.attempt_id, batch_id) for t in trajectories],
            )

    def rewind(self, step: int, token: str, batch_ids: Sequence[str] = ()) -> Rewound:
        """Makes every batch newer than `step` ready again and opens a lineage, once a token.

        Args:
            batch_ids: what the trainer's checkpoint was trained on, steps 1 to `step`; empty if it
                does not tell.

        Raises:
            ConflictError: along the surviving lineage those steps have other batches.
            NotFoundError: tokens that the rewind needs were deleted.
        """
        with self._ledger.transaction() as db:
            row = self._ledger.one("SELECT * FROM lineages WHERE token=?", token)
            if row is not None:
                return Rewound(row["lineage"], row["max_weight_version"], row["num_batches"])
            if batch_ids:
                self._check_past(step, batch_ids)
            batches = db.execute(
                "SELECT batch_id, tokens_deleted FROM batches WHERE step>? AND state<>'rewound'",
                (step,),
            ).fetchall()
            gone = [row["batch_id"] for row in batches if row["tokens_deleted"]]
            if gone:
                raise NotFoundError(
                    f"cannot rewind to step {step}: tokens of batches {gone} were deleted, as a "
                    "later checkpoint was the oldest kept; load that one"
                )
            for batch_id, _ in batches:
                db.execute(
                    "UPDATE attempts SET consumed_at_version=0, trained=x'' WHERE group_id IN"
                    " (SELECT group_id FROM groups WHERE batch_id=?)",
                    (batch_id,),
                )
                db.execute(
                    "UPDATE groups SET state='ready', reason='', batch_id='' WHERE batch_id=?",
                    (batch_id,),
                )
                db.execute("UPDATE batches SET state='rewound' WHERE batch_id=?", (batch_id,))
            lineage = self._ledger.next_number("lineage")
            highest = self._ledger.max_weight_version
            db.execute(
                "INSERT INTO lineages VALUES(?,?,?,?,?)",
                (token, lineage, step, highest, len(batches)),
            )
            return Rewound(lineage, highest, len(batches))

    def _check_past(self, step: int, batch_ids: Sequence[str]) -> None:
        """The weights were trained on what the ledger says, so that nothing is trained twice."""
        rows = self._ledger.db.execute(
            "SELECT batch_id FROM batches WHERE step<=? AND state<>'rewound' ORDER BY step", (step,)
        ).fetchall()
        standing = [str(row[0]) for row in rows]
        if standing == list(batch_ids):
            return
        pairs = enumerate(itertools.zip_longest(batch_ids, standing, fillvalue="none"), 1)
        at, theirs, ours = next((at, a, b) for at, (a, b) in pairs if a != b)
        raise ConflictError(
            f"cannot rewind to step {step}: the checkpoint was trained on batch {theirs} at step "
            f"{at}, and the ledger's is {ours}; the checkpoint and ledger.db are not of one past: "
            "take both from the same copy of the run, or delete the checkpoint, so that the one "
            "before it is used"
        )

    def take_deletable(self, oldest_kept_step: int) -> list[str]:
        """Attempts whose tokens no kept checkpoint needs; marks their batches."""
        with self._ledger.transaction() as db:
            where = "step<=? AND state='trained' AND tokens_deleted=0"
            rows = db.execute(
                "SELECT attempt_id FROM attempts WHERE group_id IN (SELECT group_id FROM groups"
                f" WHERE batch_id IN (SELECT batch_id FROM batches WHERE {where}))",
                (oldest_kept_step,),
            ).fetchall()
            db.execute(f"UPDATE batches SET tokens_deleted=1 WHERE {where}", (oldest_kept_step,))
            return [row[0] for row in rows]

    def dropped_reasons(self) -> dict[str, int]:
        """Dropped groups by reason."""
        rows: Sequence[tuple[str, int]] = self._ledger.db.execute(
            "SELECT reason, COUNT(*) FROM groups WHERE state='dropped' GROUP BY reason"
        ).fetchall()
        return {row[0]: row[1] for row in rows}
