"""Properties of the ledger under random histories, with restarts and rewinds in between."""

from __future__ import annotations

import itertools
import shutil
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from proto import trajectory_pb2 as tpb
from rollout.attempt_table import AttemptTable, GroupRules
from rollout.batch_table import BatchTable
from rollout.errors import ConflictError, FencedError, RolloutError
from rollout.ledger import Ledger
from rollout.sequences import SequenceTotals

GROUP_SIZE = 2
TRAIN = 1
_TOTALS = SequenceTotals(10, 5, 1, 1, 1)
_KEYS = itertools.count()


def make_key() -> str:
    return f"{next(_KEYS):040d}"


class LedgerMachine(RuleBasedStateMachine):
    """Workers, a trainer and crashes, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="ledger"))
        self.now_s = 1.0
        self.step = 0
        self.checkpoint = 0
        self.tokens = itertools.count()
        self.keys: set[str] = set()
        self.sampled: list[str] = []
        self.open()
        for i in range(3):
            self.ledger.add_task(f"t{i}", f"/t{i}", TRAIN)

    def open(self) -> None:
        self.ledger = Ledger(self.folder / "ledger.db", fsync=False)
        rules = GroupRules(2, drop_zero_variance=True, max_zero_variance_refill=1)
        self.attempts = AttemptTable(self.ledger, rules, make_key)
        self.batches = BatchTable(self.ledger, self.attempts)

    def teardown(self) -> None:
        self.ledger.close()
        shutil.rmtree(self.folder)

    @rule()
    def start_group(self) -> None:
        self.now_s += 1
        with self.ledger.transaction():
            task = self.ledger.sample_task(TRAIN, seed=3)
            assert task is not None
            self.attempts.start_group(task, "mini", GROUP_SIZE, self.now_s)
        self.sampled.append(task)

    @rule(num=st.integers(1, 3))
    def lease(self, num: int) -> None:
        leased = self.attempts.lease("w", num, ["mini"], self.now_s, self.now_s + 10)
        for attempt in leased:
            assert attempt.session_key not in self.keys, "a key names one try only"
            self.keys.add(attempt.session_key)
            with pytest.raises(FencedError):
                self.attempts.held(attempt.attempt_id, attempt.epoch - 1)

    @precondition(lambda self: self.attempts.count("state='leased'"))
    @rule(index=st.integers(0, 9), reward=st.sampled_from([0.0, 1.0, None]))
    def finish(self, index: int, reward: float | None) -> None:
        active = self.attempts.select("state='leased' ORDER BY number")
        attempt = active[index % len(active)]
        cause = tpb.CAUSE_UNCLASSIFIED if reward is None else tpb.CAUSE_SUBMITTED
        self.now_s += 1
        self.attempts.finish(attempt, cause, reward, b"", "", _TOTALS, self.now_s)

    @precondition(lambda self: self.attempts.count("state='leased'"))
    @rule(index=st.integers(0, 9))
    def requeue(self, index: int) -> None:
        active = self.attempts.select("state='leased' ORDER BY number")
        attempt = active[index % len(active)]
        self.attempts.requeue(attempt, tpb.CAUSE_SANDBOX_FAILED, "", self.now_s, spend_retry=True)
        with pytest.raises(FencedError):
            self.attempts.held(attempt.attempt_id, attempt.epoch)

    @rule(num=st.integers(1, 2))
    def claim_and_train(self, num: int) -> None:
        ready = self.ledger.db.execute(
            "SELECT group_id FROM groups WHERE state='ready' ORDER BY started_at"
        ).fetchall()
        batch = self.batches.claim(self.step + 1, num, self.step + 1)
        if len(ready) < num:
            assert batch is None
            return
        assert batch is not None
        self.step += 1
        groups = self.batches.groups(batch)
        assert [g.group_id for g in groups] == [row[0] for row in ready[:num]], "oldest first"
        assert all(len(g.members) + g.num_masked == GROUP_SIZE for g in groups)
        self.batches.acknowledge(batch, self.step, self.step + 1, {})

    @rule()
    def checkpoint_now(self) -> None:
        self.checkpoint = self.step

    @rule()
    def rewind(self) -> None:
        token, lineage = f"l{next(self.tokens)}", self.ledger.lineage
        trained = self.ledger.number("SELECT COUNT(*) FROM groups WHERE state='trained'")
        rewound = self.batches.rewind(self.checkpoint, token)
        assert rewound.lineage == lineage + 1
        assert rewound.num_batches == self.step - self.checkpoint
        assert self.batches.rewind(self.checkpoint, token) == rewound
        assert self.ledger.number("SELECT COUNT(*) FROM groups WHERE state='trained'") <= trained
        self.step = self.checkpoint

    @rule()
    def restart(self) -> None:
        before = self.ledger.number("SELECT COUNT(*) FROM attempts WHERE state='finished'")
        self.ledger.close()
        self.open()
        self.attempts.requeue_all_active(self.now_s)
        assert self.attempts.count("state='leased'") == 0
        assert self.attempts.count("state='finished'") == before

    @invariant()
    def groups_agree_with_their_attempts(self) -> None:
        for state, group_id, batch_id in self.ledger.db.execute(
            "SELECT state, group_id, batch_id FROM groups"
        ).fetchall():
            unfinished = self.attempts.count("group_id=? AND state<>'finished'", group_id)
            assert self.attempts.count("group_id=?", group_id) == GROUP_SIZE
            assert (state == "open") == (unfinished > 0), "ready only when all have ended"
            assert bool(batch_id) == (state in ("claimed", "trained"))

    @invariant()
    def a_trained_group_belongs_to_one_standing_batch(self) -> None:
        rows = self.ledger.db.execute(
            "SELECT b.state FROM groups g JOIN batches b ON g.batch_id=b.batch_id"
            " WHERE g.state='trained'"
        ).fetchall()
        assert all(row[0] == "trained" for row in rows)

    @invariant()
    def every_epoch_visits_every_task_once(self) -> None:
        whole = len(self.sampled) // 3 * 3
        for start in range(0, whole, 3):
            assert sorted(self.sampled[start : start + 3]) == ["t0", "t1", "t2"]


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)


def test_a_failed_transaction_leaves_nothing(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.db", fsync=False)
    with pytest.raises(ValueError), ledger.transaction():
        ledger.add_task("a", "/a", TRAIN)
        ledger.set_meta("x", 1)
        raise ValueError
    assert ledger.task_ids(TRAIN) == []
    assert ledger.get_meta("x") == ""


def test_a_second_manager_is_refused(tmp_path: Path) -> None:
    first = Ledger(tmp_path / "ledger.db", fsync=False)
    with pytest.raises(RolloutError):
        Ledger(tmp_path / "ledger.db", fsync=False)
    first.close()
    Ledger(tmp_path / "ledger.db", fsync=True).close()


def test_a_manager_that_is_ending_is_waited_for(tmp_path: Path) -> None:
    first = Ledger(tmp_path / "ledger.db", fsync=False)
    threading.Timer(0.3, first._lock.close).start()
    second = Ledger(tmp_path / "ledger.db", fsync=False, lock_wait_s=60.0)
    first.db.close()
    second.close()


def test_tasks_below_the_run_move_with_it(tmp_path: Path) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    ledger = Ledger(before / "ledger.db", fsync=False)
    assert ledger.add_task("inside", str(before / "tasks/inside"), TRAIN)
    assert ledger.add_task("outside", "/tasks/outside", TRAIN)
    assert ledger.task_path("inside") == str(before / "tasks/inside")
    ledger.close()
    before.rename(after)
    ledger = Ledger(after / "ledger.db", fsync=False)
    assert not ledger.add_task("inside", str(after / "tasks/inside"), TRAIN)
    assert ledger.task_path("inside") == str(after / "tasks/inside")
    assert ledger.task_path("outside") == "/tasks/outside"
    with pytest.raises(ConflictError):
        ledger.add_task("inside", str(before / "tasks/inside"), TRAIN)
    ledger.close()


def test_versions_and_window_epochs_outlive_the_manager(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.db", fsync=False)
    ledger.take_weight_version(7)
    ledger.publish(7)
    epoch = ledger.next_window_epoch()
    ledger.save_window(epoch, 8, "buckets", {"engine0": "begun"})
    ledger.close()
    ledger = Ledger(tmp_path / "ledger.db", fsync=False)
    assert (ledger.weight_version, ledger.max_weight_version) == (7, 7)
    with pytest.raises(ConflictError):
        ledger.take_weight_version(7)
    window = ledger.load_open_window()
    assert window is not None and (window.epoch, window.engines) == (epoch, {"engine0": "begun"})
    ledger.save_window(epoch, 8, "closed", {})
    assert ledger.load_open_window() is None
    assert ledger.next_window_epoch() == epoch + 1
