"""After Ctrl-C, SIGTERM, SIGHUP or a crash, in any stage, nothing is left and `resume` finishes the run."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import leftovers
from tests.command import Command, pid_of, run_root, swe_rl

_TIMEOUT_S = 400


def wait_for(command: Command, workdir: Path, moment: Callable[[Path], bool]) -> Path:
    """Waits until moment(run directory); returns the run directory."""

    def met() -> Path | None:
        roots = [path.parent for path in workdir.glob("runs/*/config.toml")]
        return roots[0] if roots and moment(roots[0]) else None

    return command.wait_until(moment.__name__, met, _TIMEOUT_S)


def pretraining(root: Path) -> bool:
    """The first supervised stage is under way."""
    return (root / "metrics" / "pretrain.jsonl").exists()


def reinforcing(root: Path) -> bool:
    """RL has made its first step."""
    metrics = root / "metrics" / "rl.jsonl"
    return metrics.exists() and metrics.read_text().count("\n") >= 1


@pytest.mark.parametrize(
    ("number", "moment"),
    [
        pytest.param(signal.SIGINT, pretraining, id="ctrl_c-pretraining"),
        pytest.param(signal.SIGINT, reinforcing, id="ctrl_c-reinforcing"),
        pytest.param(signal.SIGTERM, pretraining, id="sigterm-pretraining"),
        pytest.param(signal.SIGTERM, reinforcing, id="sigterm-reinforcing"),
        pytest.param(signal.SIGHUP, pretraining, id="closed_terminal-pretraining"),
    ],
)
def test_a_signal_takes_everything_down(tmp_path, number, moment):
    command = Command(tmp_path, "@", "smoke")
    wait_for(command, tmp_path, moment)
    command.interrupt(number)
    outcome = command.finish(90)
    assert outcome.code == 128 + number, outcome.err
    assert "Traceback" not in outcome.out + outcome.err
    assert outcome.left == {}


def test_an_interrupted_run_is_resumed_to_its_table(tmp_path):
    command = Command(tmp_path, "@", "smoke")
    wait_for(command, tmp_path, reinforcing)
    command.interrupt()
    assert command.finish(90).left == {}
    assert "not finished" in (run_root(tmp_path) / "report.html").read_text()
    assert len((run_root(tmp_path) / "metrics" / "attempts.jsonl").read_text().splitlines()) >= 8
    outcome = swe_rl(tmp_path, "resume", timeout_s=_TIMEOUT_S)
    assert outcome.code == 0, outcome.out[-3000:] + outcome.err[-3000:]
    assert outcome.left == {}
    lines = (run_root(tmp_path) / "metrics" / "rl.jsonl").read_text().splitlines()
    assert len(lines) == 3
    outcome = swe_rl(tmp_path, "replay", timeout_s=_TIMEOUT_S)
    assert outcome.code == 0, outcome.out + outcome.err
    assert "3 steps" in outcome.out and "equal bit for bit" in outcome.out
    assert outcome.left == {}


def test_kill_9_of_the_command_leaves_no_process(tmp_path):
    """Children die with their parent; the next start of the run sweeps what else is left."""
    before = leftovers.footprint("none")
    command = Command(tmp_path, "@", "smoke")
    wait_for(command, tmp_path, pretraining)
    os.kill(command.process.pid, signal.SIGKILL)
    command.process.communicate()
    left = leftovers.wait_until_clean(before, command.marker, timeout_s=40)
    assert "processes" not in left, left
    outcome = swe_rl(tmp_path, "resume", timeout_s=_TIMEOUT_S)
    assert outcome.code == 0, outcome.out[-3000:] + outcome.err[-3000:]
    assert leftovers.wait_until_clean(before, command.marker) == {}


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("broker", "sandbox.server"),
        ("manager", "rollout.server"),
        ("trainer", "trainer.server"),
    ],
    ids=["broker", "manager", "trainer"],
)
def test_a_process_that_keeps_dying_ends_the_run_with_its_reason(tmp_path, name, module):
    """Nothing of it is left, though no later one comes to sweep."""
    command = Command(tmp_path, "@", "smoke", "--run.max_restarts=0")
    root = wait_for(command, tmp_path, pretraining)
    pid = pid_of(root, module)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    outcome = command.finish(90)
    assert outcome.code == 3
    assert f"error: {name} died" in outcome.err
    assert "SIGKILL" in outcome.err
    assert outcome.left == {}
