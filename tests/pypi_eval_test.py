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
