"""`swe_rl eval --tasks pypi`: gold patches solve every real task, no patch solves none."""

from __future__ import annotations

import json

import pytest

from tests.command import run_root, swe_rl

_TIMEOUT_S = 600
_MIN_TASKS = 24
_MIN_PACKAGES = 4


@pytest.mark.parametrize(("agent", "reward"), [("oracle", 1.0), ("nop", 0.0)])
def test_scripted_agents(tmp_path, agent, reward):
    outcome = swe_rl(tmp_path, "eval", "--tasks", "pypi", "--agent", agent, timeout_s=_TIMEOUT_S)
    assert outcome.code == 0, outcome.out[-3000:] + outcome.err[-3000:]
    assert outcome.left == {}
    evaluations = json.loads((run_root(tmp_path) / "metrics" / "evaluations.json").read_text())
    (evaluation,) = evaluations.values()
    tasks = evaluation["tasks"]
    assert len(tasks) >= _MIN_TASKS
    assert len({task["task_id"].split("-")[1] for task in tasks}) >= _MIN_PACKAGES
    for task in tasks:
        assert task["causes"] == ["submitted"], task
        assert task["rewards"] == [reward], task


def test_the_policy_fails_them_with_a_scored_cause(tmp_path):
    """The tiny policy of a fresh model folder: every attempt ends by itself, and is graded."""
    trained = swe_rl(
        tmp_path,
        "@",
        "smoke",
        "--pretrain.num_steps=30",
        "--rl.num_steps=1",
        "--rollout.max_zero_variance_refill=0",
        timeout_s=_TIMEOUT_S,
    )
    assert trained.code == 0, trained.out[-3000:] + trained.err[-3000:]
    outcome = swe_rl(tmp_path, "eval", "--tasks", "pypi", "--agent", "mini", timeout_s=_TIMEOUT_S)
    assert outcome.code == 0, outcome.out[-3000:] + outcome.err[-3000:]
    assert outcome.left == {}
    (root,) = (tmp_path / "runs").glob("eval-mini-*")
    evaluations = json.loads((root / "metrics" / "evaluations.json").read_text())
    (evaluation,) = evaluations.values()
    scored = {"submitted", "turn_cap", "token_cap", "time_budget", "loop"}
    for task in evaluation["tasks"]:
        assert set(task["causes"]) <= scored, task
        assert task["rewards"] == [0.0], task
    counters = json.loads((root / "metrics" / "counters.json").read_text())
    for what, sides in counters.items():
        assert len(set(sides.values())) == 1, (what, sides)
