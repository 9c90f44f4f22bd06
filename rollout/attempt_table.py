"""Groups, attempts, leases and turns: the ledger's transitions before a batch.

Owner: rollout.manager. Works on the Ledger's connection; `now_s` is passed in.

    queued --lease--> leased --first turn--> running --finish--> finished
       ^------------- requeue (lease expired, manager restarted, retry) -----'
       ^------------- requeue_evaluation (started over at another version) -----------'

Invariants: each lease has a new epoch and a new session key, and only the holder of the
present epoch may act. A try that was requeued leaves a row in `tries`; its turns stay on
disk under the old epoch, and nothing reads them again.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from proto import rollout_pb2 as pb
from proto import trajectory_pb2 as tpb
from rollout.errors import FencedError, NotFoundError
from rollout.group_filter import ZERO_VARIANCE, Member, Verdict, judge_group
from rollout.ledger import Ledger
from rollout.sequences import SequenceTotals, TurnSummary
from rollout.token_store import TokenLocation

ACTIVE = ("leased", "running")
ZERO_VARIANCE_COUNTER = "zero_variance_since_batch"


@dataclass(frozen=True, slots=True)
class Attempt:
    """One row, the columns that callers need."""

    attempt_id: str
    group_id: str  # empty: an evaluation's
    evaluation: str  # empty: training
    task_id: str
    agent: str
    state: str
    epoch: int
    num_leases: int
    num_retries: int
    worker: str  # the last that leased it; empty while queued
    session_key: str
    lease_expires_at: float
    reward: float | None
    cause: int
    report: bytes
    started_at: float
    finished_at: float
    num_tokens: int
    num_trained_tokens: int
    num_turns: int
    oldest_weight_version: int
    newest_weight_version: int
    consumed_at_version: int
    turn_times: bytes = b""  # TurnTimes
    trained: bytes = b""  # TrainedTrajectory; empty: not acknowledged

    def ref(self) -> tpb.TrajectoryRef:
        """The attempt as a reference."""
        ref = tpb.TrajectoryRef(
            attempt_id=self.attempt_id,
            group_id=self.group_id,
            task_id=self.task_id,
            num_tokens=self.num_tokens,
            num_trained_tokens=self.num_trained_tokens,
            num_turns=self.num_turns,
            cause=tpb.Cause.ValueType(self.cause),
            oldest_weight_version=self.oldest_weight_version,
            newest_weight_version=self.newest_weight_version,
        )
        if self.reward is not None:
            ref.reward = self.reward
        ref.started_at.FromMicroseconds(int(self.started_at * 1e6))
        ref.finished_at.FromMicroseconds(int(self.finished_at * 1e6))
        return ref


_COLUMNS = ",".join(Attempt.__dataclass_fields__)


def _attempt(row: sqlite3.Row) -> Attempt:
    values = dict(row)
    values["session_key"] = values["session_key"] or ""
    return Attempt(**values)


@dataclass(frozen=True, slots=True)
class GroupRules:
    """The settings of rollout.config that decide about a finished group."""

    min_valid_members: int
    drop_zero_variance: bool
    max_zero_variance_refill: int


class AttemptTable:
    """Transitions of groups and attempts."""

    def __init__(self, ledger: Ledger, rules: GroupRules, make_key: Callable[[], str]) -> None:
        """`make_key` gives a fresh random session key of at least 32 characters."""
        self._ledger = ledger
        self._rules = rules
        self._make_key = make_key

    # ---- reading

    def get(self, attempt_id: str) -> Attempt:
        """Raises NotFoundError."""
        row = self._ledger.one(f"SELECT {_COLUMNS} FROM attempts WHERE attempt_id=?", attempt_id)
        if row is None:
            raise NotFoundError(f"no attempt {attempt_id} in the ledger")
        return _attempt(row)

    def select(self, where: str, *parameters: object) -> list[Attempt]:
        """Attempts by an SQL condition (and order) of this package's own making."""
        rows = self._ledger.db.execute(f"SELECT {_COLUMNS} FROM attempts WHERE {where}", parameters)
        return [_attempt(row) for row in rows]

    def held(self, attempt_id: str, epoch: int) -> Attempt:
        """The attempt, if `epoch` owns it now. Raises NotFoundError or FencedError."""
        attempt = self.get(attempt_id)
        if attempt.epoch != epoch or attempt.state not in ACTIVE:
            raise FencedError(
                f"attempt {attempt_id} is {attempt.state} at epoch {attempt.epoch}; epoch {epoch} "
                "no longer owns it: abandon it"
            )
        return attempt

    def by_session(self, session_key: str) -> Attempt:
        """The attempt under way that a key stands for. Raises NotFoundError."""
        found = self.select("session_key=? AND state IN ('leased','running')", session_key)
        if not found:
            raise NotFoundError("the session key names no attempt under way: it ended or was lost")
        return found[0]

    def count(self, where: str, *parameters: object) -> int:
        """Number of attempts by an SQL condition of this package's own making."""
        return self._ledger.number(f"SELECT COUNT(*) FROM attempts WHERE {where}", *parameters)

    def num_unconsumed_groups(self) -> int:
        """Started groups that were neither trained nor dropped."""
        return self._ledger.number(
            "SELECT COUNT(*) FROM groups WHERE state IN ('open','ready','claimed')"
        )

    # ---- starting and leasing

    def start_group(self, task_id: str, agent: str, group_size: int, now_s: float) -> str:
        """Opens a group with its queued attempts; returns its id."""
        with self._ledger.transaction() as db:
            number = self._ledger.next_number("group_number")
            group_id = f"g{number:06d}"
            db.execute(
                "INSERT INTO groups(number, group_id, task_id, state, started_at) VALUES(?,?,?,?,?)",
                (number, group_id, task_id, "open", now_s),
            )
            for member in range(group_size):
                self._insert(f"{group_id}-{member:02d}", group_id, "", task_id, agent)
            return group_id

    def start_evaluation_attempt(
        self, attempt_id: str, evaluation: str, task_id: str, agent: str
    ) -> None:
        """Queues one attempt of an evaluation."""
        with self._ledger.transaction():
            self._insert(attempt_id, "", evaluation, task_id, agent)

    def lease(
        self,
        worker: str,
        max_attempts: int,
        agents: Sequence[str],
        now_s: float,
        expires_at: float,
        *,
        training: bool = True,
    ) -> list[Attempt]:
        """Leases queued attempts of `agents`: evaluations first, then the oldest groups.

        Without `training` evaluations' alone.
        """
        marks = ",".join("?" * len(agents))
        where = f"state='queued' AND agent IN ({marks})" + (
            "" if training else " AND evaluation<>''"
        )
        with self._ledger.transaction() as db:
            queued = self.select(
                f"{where} ORDER BY evaluation='', number LIMIT ?",
                *agents,
                max_attempts,
            )
            for attempt in queued:
                db.execute(
                    "UPDATE attempts SET state='leased', epoch=epoch+1, num_leases=num_leases+1,"
                    " worker=?, lease_expires_at=?, session_key=?, num_turns=0,"
                    " started_at=CASE started_at WHEN 0 THEN ? ELSE started_at END"
                    " WHERE attempt_id=?",
                    (worker, expires_at, self._make_key(), now_s, attempt.attempt_id),
                )
            return [self.get(a.attempt_id) for a in queued]

    def renew(self, attempt_id: str, epoch: int, worker: str, expires_at: float) -> bool:
        """Extends a lease; False when it is lost."""
        with self._ledger.transaction() as db:
            changed = db.execute(
                "UPDATE attempts SET lease_expires_at=? WHERE attempt_id=? AND epoch=?"
                " AND worker=? AND state IN ('leased','running')",
                (expires_at, attempt_id, epoch, worker),
            )
            return changed.rowcount == 1

    def expired(self, now_s: float) -> list[Attempt]:
        """Attempts whose lease ran out."""
        return self.select("state IN ('leased','running') AND lease_expires_at<=?", now_s)

    def requeue(
        self, attempt: Attempt, cause: int, evidence: str, now_s: float, *, spend_retry: bool
    ) -> None:
        """Puts an attempt back; its turns are discarded and its epoch is fenced."""
        with self._ledger.transaction() as db:
            self._record_try(attempt, cause, evidence, now_s)
            db.execute(
                "UPDATE attempts SET state='queued', session_key=NULL, worker='', num_turns=0,"
                " num_retries=num_retries+? WHERE attempt_id=?",
                (int(spend_retry), attempt.attempt_id),
            )

    def refund_retry(self, attempt_id: str) -> None:
        """Gives one spent retry back to an attempt that has not ended."""
        with self._ledger.transaction() as db:
            db.execute(
                "UPDATE attempts SET num_retries=num_retries-1"
                " WHERE attempt_id=? AND num_retries>0 AND state<>'finished'",
                (attempt_id,),
            )

    def requeue_all_active(self, now_s: float) -> int:
        """After a restart of the manager: nobody's lease holds, and no retry is spent."""
        with self._ledger.transaction():
            active = self.select("state IN ('leased','running')")
            for attempt in active:
                self.requeue(
                    attempt, tpb.CAUSE_INTERRUPTED, "manager restarted", now_s, spend_retry=False
                )
            return len(active)

    def cancel_evaluation(self, evaluation: str, evidence: str, now_s: float) -> list[Attempt]:
        """Ends every attempt of an evaluation that has not ended as cancelled; returns those that
        were under way.
        """
        report = pb.AttemptReport(evidence=evidence).SerializeToString()
        with self._ledger.transaction() as db:
            left = self.select("evaluation=? AND state<>'finished' ORDER BY number", evaluation)
            active = [attempt for attempt in left if attempt.state in ACTIVE]
            for attempt in active:
                self._record_try(attempt, tpb.CAUSE_CANCELLED, evidence, now_s)
            for attempt in left:
                order = self._ledger.next_number("finish_number")
                db.execute(
                    "UPDATE attempts SET state='finished', cause=?, report=?, finished_at=?,"
                    " finish_order=? WHERE attempt_id=?",
                    (tpb.CAUSE_CANCELLED, report, now_s, order, attempt.attempt_id),
                )
            return active

    def requeue_evaluation(self, evaluation: str) -> None:
        """Queues every attempt of an evaluation as if it were new; each one's next lease has a new
        epoch, as ever.
        """
        self._ledger.db.execute(
            "UPDATE attempts SET state='queued', session_key=NULL, worker='', num_retries=0,"
            " reward=NULL, cause=0, report=x'', started_at=0, finished_at=0, finish_order=0,"
            " num_tokens=0, num_trained_tokens=0, num_turns=0, oldest_weight_version=0,"
            " newest_weight_version=0, turn_times=x'' WHERE evaluation=?",
            (evaluation,),
        )

    def requeued_with(self, attempt_id: str, epoch: int) -> int | None:
        """The cause with which a try was requeued, if it was."""
        row = self._ledger.one(
            "SELECT cause FROM tries WHERE attempt_id=? AND epoch=?", attempt_id, epoch
        )
        return None if row is None else int(row[0])

    def earlier_tries(self, attempt: Attempt) -> list[pb.EndedTry]:
        """Tries of an attempt that were given up, in order."""
        rows = self._ledger.db.execute(
            "SELECT cause, evidence, ended_at FROM tries WHERE attempt_id=? AND epoch<?"
            " ORDER BY epoch",
            (attempt.attempt_id, attempt.epoch),
        )
        tries = []
        for cause, evidence, ended_at in rows:
            ended = pb.EndedTry(cause=tpb.Cause.ValueType(cause), evidence=evidence)
            ended.ended_at.FromMicroseconds(int(ended_at * 1e6))
            tries.append(ended)
        return tries

    def group_end(self, group_id: str) -> tuple[str, str]:
        """A group's state, and why it was dropped; empty for no group."""
        row = self._ledger.one("SELECT state, reason FROM groups WHERE group_id=?", group_id)
        return ("", "") if row is None else (row["state"], row["reason"])

    # ---- turns

    def turn_digest(self, attempt_id: str, epoch: int, turn_index: int) -> bytes | None:
        """SHA-256 of a durable turn's record, or None."""
        row = self._ledger.one(
            "SELECT digest FROM turns WHERE attempt_id=? AND epoch=? AND turn_index=?",
            attempt_id,
            epoch,
            turn_index,
        )
        return None if row is None else bytes(row[0])

    def turn_length(self, attempt_id: str, epoch: int, turn_index: int) -> int | None:
        """Ids in the whole chain up to and with a turn, or None."""
        row = self._ledger.one(
            "SELECT total_length FROM turns WHERE attempt_id=? AND epoch=? AND turn_index=?",
            attempt_id,
            epoch,
            turn_index,
        )
        return None if row is None else int(row[0])

    def add_turn(
        self,
        attempt: Attempt,
        turn_index: int,
        digest: bytes,
        summary: TurnSummary,
        location: TokenLocation,
    ) -> None:
        """Makes a turn durable; its record is on disk already."""
        with self._ledger.transaction() as db:
            db.execute(
                "INSERT INTO turns VALUES(?,?,?,?,?,?,?,?,?)",
                (
                    attempt.attempt_id,
                    attempt.epoch,
                    turn_index,
                    digest,
                    summary.num_sampled,
                    summary.total_length,
                    location.file,
                    location.offset,
                    location.size,
                ),
            )
            db.execute(
                "UPDATE attempts SET state='running', num_turns=num_turns+1 WHERE attempt_id=?",
                (attempt.attempt_id,),
            )

    def turn_locations(self, attempt_id: str, epoch: int) -> list[TokenLocation]:
        """Records of one try, in the order of turn_index."""
        rows = self._ledger.db.execute(
            "SELECT file, offset, size FROM turns WHERE attempt_id=? AND epoch=?"
            " ORDER BY turn_index",
            (attempt_id, epoch),
        )
        return [TokenLocation(*row) for row in rows]

    # ---- finishing

    def finish(
        self,
        attempt: Attempt,
        cause: int,
        reward: float | None,
        report: bytes,
        evidence: str,
        totals: SequenceTotals,
        now_s: float,
        turn_times: bytes = b"",
    ) -> Verdict | None:
        """Ends an attempt; the verdict on its group if it was the last, else None.

        Args:
            report, turn_times: AttemptReport and TurnTimes, serialised.
        """
        with self._ledger.transaction() as db:
            self._record_try(attempt, cause, evidence, now_s)
            db.execute(
                "UPDATE attempts SET state='finished', cause=?, reward=?, report=?, finished_at=?,"
                " finish_order=?, num_tokens=?, num_trained_tokens=?, num_turns=?,"
                " oldest_weight_version=?, newest_weight_version=?, turn_times=?"
                " WHERE attempt_id=?",
                (
                    cause,
                    reward,
                    report,
                    now_s,
                    self._ledger.next_number("finish_number"),
                    totals.num_tokens,
                    totals.num_trained_tokens,
                    totals.num_turns,
                    totals.oldest_weight_version,
                    totals.newest_weight_version,
                    turn_times,
                    attempt.attempt_id,
                ),
            )
            return self._judge(attempt.group_id) if attempt.group_id else None

    def _judge(self, group_id: str) -> Verdict | None:
        if self.count("group_id=? AND state<>'finished'", group_id):
            return None
        members = [
            Member(a.cause, a.reward, a.num_trained_tokens)
            for a in self.select("group_id=?", group_id)
        ]
        spent = int(self._ledger.get_meta(ZERO_VARIANCE_COUNTER, "0"))
        verdict = judge_group(
            members,
            min_valid_members=self._rules.min_valid_members,
            drop_zero_variance=self._rules.drop_zero_variance,
            zero_variance_left=self._rules.max_zero_variance_refill - spent,
        )
        if verdict.drop_reason == ZERO_VARIANCE:
            self._ledger.set_meta(ZERO_VARIANCE_COUNTER, spent + 1)
        self._ledger.db.execute(
            "UPDATE groups SET state=?, reason=? WHERE group_id=?",
            ("dropped" if verdict.drop_reason else "ready", verdict.drop_reason, group_id),
        )
        return verdict

    def _record_try(self, attempt: Attempt, cause: int, evidence: str, now_s: float) -> None:
        self._ledger.db.execute(
            "INSERT INTO tries VALUES(?,?,?,?,?)",
            (attempt.attempt_id, attempt.epoch, cause, evidence, now_s),
        )

    def _insert(
        self, attempt_id: str, group_id: str, evaluation: str, task_id: str, agent: str
    ) -> None:
        self._ledger.db.execute(
            "INSERT INTO attempts(attempt_id, group_id, evaluation, task_id, agent, state)"
            " VALUES(?,?,?,?,?,'queued')",
            (attempt_id, group_id, evaluation, task_id, agent),
        )
