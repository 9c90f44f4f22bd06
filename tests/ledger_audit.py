"""Reads a run's ledger and metrics after its end and says what breaks the rules of recovery.

Owner: tests. Opens the database read-only; knows the schema of rollout/ledger.py, and nothing of
the code that wrote it. Each rule yields one line a violation; `audit` runs all.
"""

from __future__ import annotations

import itertools
import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

from proto import trajectory_pb2

_INFRASTRUCTURE = {
    "CAUSE_SANDBOX_FAILED",
    "CAUSE_ENGINE_FAILED",
    "CAUSE_HARNESS_FAILED",
    "CAUSE_VERIFIER_FAILED",
    "CAUSE_INTERRUPTED",
}
_OURS = {"CAUSE_CANCELLED", "CAUSE_EARLY_STOPPED", "CAUSE_STALE", "CAUSE_UNCLASSIFIED"}
_STANDING = ("claimed", "trained")
"""States of a batch that was not rewound."""

Rule = Callable[[sqlite3.Connection, int], Iterator[str]]


def audit(root: Path, num_steps: int) -> list[str]:
    """Every violation of a run in `root` that finished `num_steps` RL steps."""
    with closing(sqlite3.connect(f"file:{root / 'ledger.db'}?mode=ro", uri=True)) as db:
        found = [line for rule in RULES for line in rule(db, num_steps)]
    return found + list(metrics_tell_each_step_once(root / "metrics", num_steps))


def every_attempt_ended(db: sqlite3.Connection, _num_steps: int) -> Iterator[str]:
    """Every attempt that was ever leased has ended, with a cause; so has each of its tries."""
    for attempt_id, state, cause in db.execute(
        "SELECT attempt_id, state, cause FROM attempts WHERE num_leases>0"
    ):
        if state != "finished":
            yield f"attempt {attempt_id} was started and is {state}"
        elif not cause:
            yield f"attempt {attempt_id} ended without a cause"
    for attempt_id, epoch in db.execute(
        "SELECT attempt_id, epoch FROM tries WHERE cause=0 OR cause IS NULL"
    ):
        yield f"try {epoch} of attempt {attempt_id} ended without a cause"
    for attempt_id, num_leases, num_tries in db.execute(
        "SELECT a.attempt_id, a.num_leases, COUNT(t.epoch) FROM attempts a LEFT JOIN tries t"
        " ON t.attempt_id=a.attempt_id WHERE a.num_leases>0 AND a.state='finished'"
        " GROUP BY a.attempt_id"
    ):
        if num_leases != num_tries:
            yield f"attempt {attempt_id} was leased {num_leases} times and ended {num_tries} times"


def only_the_policys_doing_is_scored(db: sqlite3.Connection, _num_steps: int) -> Iterator[str]:
    """No attempt that infrastructure or we ended has a reward; every other one has."""
    for attempt_id, cause, reward in db.execute(
        "SELECT attempt_id, cause, reward FROM attempts WHERE state='finished'"
    ):
        name = _cause(cause)
        is_scored = name not in _INFRASTRUCTURE | _OURS
        if is_scored != (reward is not None):
            yield f"attempt {attempt_id} ended as {name} with reward {reward}"
        if reward is not None and not 0.0 <= reward <= 1.0:
            yield f"attempt {attempt_id} has reward {reward}"


def every_group_has_an_end(db: sqlite3.Connection, _num_steps: int) -> Iterator[str]:
    """A group is trained in a batch that stands, dropped with a reason, or waits for a batch."""
    for group_id, state, reason, batch_id, batch_state, num_open in db.execute(
        "SELECT g.group_id, g.state, g.reason, g.batch_id, b.state,"
        " (SELECT COUNT(*) FROM attempts a WHERE a.group_id=g.group_id AND a.state<>'finished')"
        " FROM groups g LEFT JOIN batches b ON b.batch_id=g.batch_id"
    ):
        if state in ("trained", "claimed") and batch_state not in _STANDING:
            yield f"group {group_id} is {state} in batch {batch_id or 'none'}, which is {batch_state}"
        if state == "claimed":
            yield f"group {group_id} is claimed by batch {batch_id} and was never trained"
        if state == "dropped" and not reason:
            yield f"group {group_id} was dropped without a reason"
        if state == "open" and not num_open:
            yield f"group {group_id} is open, though all its attempts ended"
        if state in ("ready", "trained", "dropped") and num_open:
            yield f"group {group_id} is {state}, and {num_open} of its attempts have not ended"
        if state == "ready" and batch_id:
            yield f"group {group_id} is ready and still in batch {batch_id}"


def each_step_trained_one_batch(db: sqlite3.Connection, num_steps: int) -> Iterator[str]:
    """Along the surviving lineage: steps 1..num_steps, one trained batch each, no group twice.

    What the standing batches hold is told by `groups.batch_id`; that no attempt was consumed
    outside of them, by `attempts.consumed_at_version`.
    """
    steps = [
        row[0] for row in db.execute("SELECT step FROM batches WHERE state='trained' ORDER BY step")
    ]
    if steps != list(range(1, num_steps + 1)):
        yield f"trained batches are of steps {steps}; wanted 1 to {num_steps}, once each"
    for batch_id, state in db.execute("SELECT batch_id, state FROM batches"):
        groups = db.execute("SELECT COUNT(*) FROM groups WHERE batch_id=?", (batch_id,)).fetchone()[
            0
        ]
        if (state == "trained") != (groups > 0):
            yield f"batch {batch_id} is {state} and holds {groups} groups"
    for attempt_id, state in db.execute(
        "SELECT a.attempt_id, g.state FROM attempts a JOIN groups g ON g.group_id=a.group_id"
        " WHERE a.consumed_at_version>0 AND g.state<>'trained'"
    ):
        yield f"attempt {attempt_id} counts as consumed, and its group is {state}"


def lineages_go_back_to_a_checkpoint(db: sqlite3.Connection, _num_steps: int) -> Iterator[str]:
    """Lineages count up; a standing batch comes from the newest lineage that covers its step."""
    lineages = db.execute("SELECT lineage, step FROM lineages ORDER BY lineage").fetchall()
    if [row[0] for row in lineages] != list(range(1, len(lineages) + 1)):
        yield f"lineages are {[row[0] for row in lineages]}"
    for batch_id, step, lineage in db.execute(
        "SELECT batch_id, step, lineage FROM batches WHERE state='trained'"
    ):
        later = [number for number, restart in lineages if number > lineage and restart < step]
        if later:
            yield f"batch {batch_id} of lineage {lineage} stands, though lineage {later[0]} began below it"


def versions_only_grow(db: sqlite3.Connection, _num_steps: int) -> Iterator[str]:
    """Each window had a version of its own, above every earlier one; all windows are closed."""
    highest = 0
    for epoch, version, phase in db.execute(
        "SELECT epoch, weight_version, phase FROM windows ORDER BY epoch"
    ):
        if version <= highest:
            yield f"window {epoch} was for weight_version {version}, after {highest}"
        highest = max(highest, version)
        if phase != "closed":
            yield f"window {epoch} is still in phase {phase}"
    consumed = [
        row[0]
        for row in db.execute(
            "SELECT consumed_at_version FROM batches WHERE state='trained' ORDER BY step"
        )
    ]
    if consumed != sorted(consumed):
        yield f"steps were consumed at weight_versions {consumed}: not in order"
    for attempt_id, newest in db.execute(
        "SELECT attempt_id, newest_weight_version FROM attempts WHERE newest_weight_version>?",
        (highest,),
    ):
        yield f"attempt {attempt_id} was sampled at weight_version {newest}, above every window's"


def evaluations_keep_to_one_version(db: sqlite3.Connection, _num_steps: int) -> Iterator[str]:
    """A scored attempt of an evaluation was sampled at the pinned version alone."""
    for attempt_id, oldest, newest, pinned in db.execute(
        "SELECT a.attempt_id, a.oldest_weight_version, a.newest_weight_version, e.weight_version"
        " FROM attempts a JOIN evaluations e ON e.name=a.evaluation"
        " WHERE a.reward IS NOT NULL AND a.num_turns>0"
    ):
        if not oldest == newest == pinned:
            yield f"attempt {attempt_id} was sampled at {oldest} to {newest}, pinned to {pinned}"


def metrics_tell_each_step_once(metrics: Path, num_steps: int) -> Iterator[str]:
    """rl.jsonl has steps 1..num_steps in order, published under versions that only grow, and the
    version that the manager showed in status.jsonl never went back.
    """
    rows = [json.loads(line) for line in (metrics / "rl.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows]
    if steps != list(range(1, num_steps + 1)):
        yield f"rl.jsonl tells steps {steps}; wanted 1 to {num_steps}"
    published = [row["weight_version"] for row in rows if row["weight_version"]]
    if any(later <= earlier for earlier, later in itertools.pairwise(published)):
        yield f"rl.jsonl tells weight_versions {published}: not growing"
    shown = 0
    for line in (metrics / "status.jsonl").read_text().splitlines():
        version = int(json.loads(line)["weight_version"])
        if version < shown:
            yield f"status.jsonl shows weight_version {version} after {shown}"
        shown = max(shown, version)


RULES: tuple[Rule, ...] = (
    every_attempt_ended,
    only_the_policys_doing_is_scored,
    every_group_has_an_end,
    each_step_trained_one_batch,
    lineages_go_back_to_a_checkpoint,
    versions_only_grow,
    evaluations_keep_to_one_version,
)


def _cause(number: int) -> str:
    return trajectory_pb2.Cause.Name(trajectory_pb2.Cause.ValueType(number))
