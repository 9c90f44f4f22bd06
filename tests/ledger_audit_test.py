"""The audit finds each kind of violation that is planted in a sound ledger, and nothing else."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from proto import trajectory_pb2 as tpb
from tests.ledger_audit import audit

_SCHEMA = """
CREATE TABLE groups(group_id, state, reason DEFAULT '', batch_id DEFAULT '');
CREATE TABLE attempts(attempt_id, group_id DEFAULT '', evaluation DEFAULT '', state, num_leases,
  cause DEFAULT 0, reward, num_turns DEFAULT 2, oldest_weight_version DEFAULT 1,
  newest_weight_version DEFAULT 1, consumed_at_version DEFAULT 0);
CREATE TABLE tries(attempt_id, epoch, cause);
CREATE TABLE batches(batch_id, step, lineage, state, consumed_at_version DEFAULT 0);
CREATE TABLE lineages(lineage, step);
CREATE TABLE evaluations(name, weight_version);
CREATE TABLE windows(epoch, weight_version, phase);
"""
_SUBMITTED, _INTERRUPTED = tpb.CAUSE_SUBMITTED, tpb.CAUSE_INTERRUPTED
_SOUND = f"""
INSERT INTO windows VALUES(1, 1, 'closed'), (2, 2, 'closed'), (3, 4, 'closed');
INSERT INTO lineages VALUES(1, 0), (2, 1);
INSERT INTO batches VALUES('b1', 1, 1, 'trained', 1), ('b2', 2, 1, 'rewound', 0),
  ('b2.2', 2, 2, 'trained', 2);
INSERT INTO groups VALUES('g1', 'trained', '', 'b1'), ('g2', 'trained', '', 'b2.2'),
  ('g3', 'dropped', 'zero_variance', ''), ('g4', 'ready', '', ''), ('g5', 'open', '', '');
INSERT INTO attempts(attempt_id, group_id, state, num_leases, cause, reward, consumed_at_version)
  VALUES('a1', 'g1', 'finished', 1, {_SUBMITTED}, 1.0, 1),
  ('a2', 'g2', 'finished', 2, {_SUBMITTED}, 0.0, 2),
  ('a3', 'g3', 'finished', 1, {_INTERRUPTED}, NULL, 0),
  ('a4', 'g4', 'finished', 1, {_SUBMITTED}, 1.0, 0),
  ('a5', 'g5', 'queued', 0, 0, NULL, 0);
INSERT INTO attempts(attempt_id, evaluation, state, num_leases, cause, reward)
  VALUES('e1', 'base', 'finished', 1, {_SUBMITTED}, 1.0);
INSERT INTO evaluations VALUES('base', 1);
INSERT INTO tries VALUES('a1', 1, {_SUBMITTED}), ('a2', 1, {_INTERRUPTED}), ('a2', 2, {_SUBMITTED}),
  ('a3', 1, {_INTERRUPTED}), ('a4', 1, {_SUBMITTED}), ('e1', 1, {_SUBMITTED});
"""


def run_with(tmp_path: Path, planted: str, versions: tuple[int, ...] = (2, 4)) -> Path:
    """A sound run of two steps, with `planted` SQL applied to its ledger."""
    with closing(sqlite3.connect(tmp_path / "ledger.db")) as db:
        db.executescript(_SCHEMA + _SOUND + planted)
    metrics = tmp_path / "metrics"
    metrics.mkdir()
    rows = [{"step": i + 1, "weight_version": v} for i, v in enumerate(versions)]
    (metrics / "rl.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (metrics / "status.jsonl").write_text(
        "".join(json.dumps({"weight_version": str(v)}) + "\n" for v in versions)
    )
    return tmp_path


def test_a_sound_run_has_no_violation(tmp_path):
    assert audit(run_with(tmp_path, ""), 2) == []


@pytest.mark.parametrize(
    ("planted", "found"),
    [
        ("UPDATE attempts SET state='running' WHERE attempt_id='a3'", "a3 was started and is run"),
        ("UPDATE attempts SET cause=0, reward=NULL WHERE attempt_id='a4'", "a4 ended without a"),
        ("UPDATE tries SET cause=0 WHERE attempt_id='a3'", "try 1 of attempt a3 ended without"),
        (
            "DELETE FROM tries WHERE attempt_id='a2' AND epoch=1",
            "a2 was leased 2 times and ended 1",
        ),
        ("UPDATE attempts SET reward=0.0 WHERE attempt_id='a3'", "INTERRUPTED with reward 0.0"),
        ("UPDATE attempts SET reward=NULL WHERE attempt_id='a4'", "SUBMITTED with reward None"),
        ("UPDATE attempts SET reward=1.5 WHERE attempt_id='a4'", "a4 has reward 1.5"),
        ("UPDATE groups SET reason='' WHERE group_id='g3'", "g3 was dropped without a reason"),
        ("UPDATE groups SET batch_id='b2' WHERE group_id='g2'", "g2 is trained in batch b2, which"),
        ("UPDATE groups SET state='claimed' WHERE group_id='g2'", "g2 is claimed by batch b2.2"),
        ("UPDATE groups SET state='open' WHERE group_id='g4'", "g4 is open, though all"),
        ("UPDATE groups SET state='ready' WHERE group_id='g5'", "g5 is ready, and 1 of its"),
        ("UPDATE groups SET batch_id='b2' WHERE group_id='g4'", "g4 is ready and still in batch"),
        ("UPDATE batches SET state='trained' WHERE batch_id='b2'", "steps [1, 2, 2]"),
        ("UPDATE batches SET state='claimed' WHERE batch_id='b2.2'", "steps [1]; wanted 1 to 2"),
        (
            "UPDATE groups SET batch_id='b2.2' WHERE group_id='g1'",
            "batch b1 is trained and holds 0",
        ),
        (
            "UPDATE attempts SET consumed_at_version=2 WHERE attempt_id='a4'",
            "a4 counts as consumed",
        ),
        ("INSERT INTO lineages VALUES(2, 1)", "lineages are [1, 2, 2]"),
        ("UPDATE batches SET lineage=1 WHERE batch_id='b2.2'", "of lineage 1 stands, though"),
        ("UPDATE windows SET weight_version=2 WHERE epoch=3", "window 3 was for weight_version 2"),
        ("UPDATE windows SET phase='buckets' WHERE epoch=2", "window 2 is still in phase buckets"),
        ("UPDATE batches SET consumed_at_version=9 WHERE batch_id='b1'", "not in order"),
        ("UPDATE attempts SET newest_weight_version=5 WHERE attempt_id='a4'", "above every window"),
        ("UPDATE evaluations SET weight_version=2", "e1 was sampled at 1 to 1, pinned to 2"),
    ],
)
def test_a_planted_violation_is_found(tmp_path, planted, found):
    violations = audit(run_with(tmp_path, planted), 2)
    assert any(found in line for line in violations), violations


def test_metrics_that_repeat_a_step_or_a_version_are_found(tmp_path):
    told = " ".join(audit(run_with(tmp_path, "", versions=(4, 4, 2)), 2))
    assert "rl.jsonl tells steps [1, 2, 3]; wanted 1 to 2" in told
    assert "weight_versions [4, 4, 2]: not growing" in told
    assert "weight_version 2 after 4" in told
