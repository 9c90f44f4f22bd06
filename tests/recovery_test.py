"""kill -9 of every kind of process, each at three moments of a run: the run goes on to its table.

One run is made as far as the end of pre-training and copied for each kind of process, which also
shows that a run directory may be moved. In its copy the process is killed during an evaluation,
between RL steps while attempts sample, and inside an update window. That the moment was met is read
from the ledger before and again after the kill.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import leftovers
from tests.command import Command, pid_of, run_root, swe_rl
from tests.ledger_audit import audit

_NUM_STEPS = 8
_TIMEOUT_S = 800.0
_MOMENT_S = 400.0
_RETURN_S = 200.0
_MAX_KILLS = 6
"""Tries to meet one moment."""
_SETTINGS = (
    f"--rl.num_steps={_NUM_STEPS}",
    f"--run.max_restarts={3 * _MAX_KILLS}",
    f"--rollout.engines.max_restarts={3 * _MAX_KILLS}",
    "--evaluation.generate_only_trajectories=0",
    "--trainer.weight_sync={bucket_bytes=262144}",  # many buckets: a window that can be met
)


@dataclass(frozen=True)
class Kind:
    """A kind of process: how its command line is told from others of the same run."""

    module: str
    name: str
    """In the command's messages; empty: the manager restarts it, not the command."""


_KINDS = {
    "trainer": Kind("trainer.server", "trainer"),
    "manager": Kind("rollout.server", "manager"),
    "gateway": Kind("rollout.gateway.app", "gateway-0"),
    "engine": Kind("rollout.engines.cpu_launcher", ""),
    "worker": Kind("rollout.harness.worker", "worker-0"),
    "broker": Kind("sandbox.server", "broker"),
}


class LedgerView:
    """What a ledger says now, read while its manager writes."""

    def __init__(self, root: Path) -> None:
        self._path = root / "ledger.db"

    def rows(self, sql: str) -> list[tuple]:
        """[] while there is no ledger, or no table, yet."""
        with contextlib.suppress(sqlite3.OperationalError):
            uri = f"file:{self._path}?mode=ro"
            with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=5.0)) as db:
                return db.execute(sql).fetchall()
        return []

    def number(self, sql: str) -> int:
        rows = self.rows(sql)
        return int(rows[0][0] or 0) if rows else 0

    def num_active(self, where: str) -> int:
        return self.number(
            f"SELECT COUNT(*) FROM attempts WHERE state IN ('leased','running') AND {where}"
        )

    def num_trained(self) -> int:
        return self.number("SELECT COUNT(*) FROM batches WHERE state='trained'")

    def open_window(self) -> tuple[int, str] | None:
        """(epoch, phase) of the window that is not closed."""
        rows = self.rows("SELECT epoch, phase FROM windows WHERE phase<>'closed'")
        return rows[-1] if rows else None


def evaluating(ledger: LedgerView) -> object:
    """Some of the first evaluation's attempts have ended, others run."""
    first = "evaluation='base-t1'"
    ended = ledger.number(f"SELECT COUNT(*) FROM attempts WHERE state='finished' AND {first}")
    return ended >= 1 and ledger.num_active(first) >= 2


def sampling(ledger: LedgerView) -> object:
    """RL has made a step, attempts run, and no window is open."""
    return (
        ledger.num_trained() >= 1
        and ledger.num_active("evaluation=''") >= 2
        and not ledger.open_window()
    )


def publishing(ledger: LedgerView) -> object:
    """The epoch of a window of RL whose weights are on their way."""
    window = ledger.open_window()
    return ledger.num_trained() >= 2 and window and window[1] == "buckets" and window[0]


def kill_at(
    command: Command, root: Path, kind: Kind, moment: Callable[[LedgerView], object]
) -> int:
    """Kills the process inside the moment, and waits for the one after it; returns the kills."""
    ledger = LedgerView(root)
    for num_kills in range(1, _MAX_KILLS + 1):
        # Now: looking for it would outlast the shorter moments.
        pid = command.wait_until(f"a {kind.module}", lambda: pid_of(root, kind.module), _RETURN_S)
        met = command.wait_until(moment.__name__, lambda: moment(ledger), _MOMENT_S)
        os.kill(pid, signal.SIGKILL)
        was_inside = moment(ledger) == met
        gone: set[int | None] = {None, pid}

        def has_returned(gone: set[int | None] = gone) -> bool:
            return pid_of(root, kind.module) not in gone

        command.wait_until(f"another {kind.module}", has_returned, _RETURN_S)
        if was_inside:
            return num_kills
    raise AssertionError(f"{kind.module} was never killed inside {moment.__name__}")


@pytest.fixture(scope="module", name="pretrained")
def pretrained_fixture(tmp_path_factory) -> Path:
    """A run that was interrupted when its pre-training had ended."""
    workdir = tmp_path_factory.mktemp("pretrained")
    command = Command(workdir, "@", "smoke", "--run.name=before", *_SETTINGS)
    root = workdir / "runs" / "before"

    def is_pretrained() -> bool:
        state = root / "state.json"
        return state.exists() and '"pretrain"' in state.read_text()

    command.wait_until("the end of pre-training", is_pretrained, _MOMENT_S)
    command.interrupt()
    outcome = command.finish(120)
    assert outcome.left == {}
    return root


def moved(pretrained: Path, workdir: Path) -> Path:
    """A copy of the run at another place, under another name."""
    root = workdir / "runs" / "after"
    shutil.copytree(pretrained, root, symlinks=True)
    return root


@pytest.mark.parametrize("name", _KINDS)
def test_a_killed_process_costs_the_run_nothing_but_time(pretrained, tmp_path, name):
    kind, root = _KINDS[name], moved(pretrained, tmp_path)
    command = Command(tmp_path, "resume")
    num_kills = sum(
        kill_at(command, root, kind, moment) for moment in (evaluating, sampling, publishing)
    )
    outcome = command.finish(_TIMEOUT_S)
    assert outcome.code == 0, outcome.out[-4000:] + outcome.err[-4000:]
    assert outcome.left == {}
    assert audit(root, _NUM_STEPS) == []
    assert_every_evaluation_is_whole(root)
    assert_replay_is_equal(tmp_path)
    if kind.name:
        told = outcome.out.count(f"{kind.name} died and is started again")
        assert told == num_kills, outcome.out


def assert_replay_is_equal(workdir: Path) -> None:
    """Weights hold each trained batch once: another one more or less would change every later step."""
    outcome = swe_rl(workdir, "replay", timeout_s=_TIMEOUT_S)
    assert outcome.code == 0, outcome.out[-4000:] + outcome.err[-4000:]
    assert f"{_NUM_STEPS} steps" in outcome.out and "equal bit for bit" in outcome.out


def assert_every_evaluation_is_whole(root: Path) -> None:
    """Each stage's evaluation has a reward for every attempt that it asked for."""
    results = json.loads((root / "metrics" / "evaluations.json").read_text())
    for name in ("base-t1", "sft-t1", "rl-t1"):
        for task in results[name]["tasks"]:
            assert len(task["rewards"]) == len(task["attempt_ids"]) == 2, (name, task)


@pytest.mark.parametrize("moment", [sampling, publishing], ids=lambda f: f.__name__)
def test_a_killed_command_is_resumed_at_once(pretrained, tmp_path, moment):
    """Its processes may still be ending when the next command starts on the same run."""
    root = moved(pretrained, tmp_path)
    before = leftovers.footprint("none")
    command = Command(tmp_path, "resume")
    command.wait_until(moment.__name__, lambda: moment(LedgerView(root)), _MOMENT_S)
    os.kill(command.process.pid, signal.SIGKILL)
    command.process.communicate()
    outcome = swe_rl(tmp_path, "resume", timeout_s=_TIMEOUT_S)
    assert outcome.code == 0, outcome.out[-4000:] + outcome.err[-4000:]
    assert leftovers.wait_until_clean(before, command.marker) == {}
    assert run_root(tmp_path) == root
    assert audit(root, _NUM_STEPS) == []
    assert_replay_is_equal(tmp_path)
    assert_every_evaluation_is_whole(root)
