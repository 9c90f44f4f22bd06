"""Evaluations during RL: when, of which weights, and which of them the stage ends with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.config import PeriodicEvaluationConfig
from trainer.device import Device
from trainer.rl_test import group, make_runner, run_rl
from trainer.selection import Candidate, SelectionLog
from trainer.stage_runner import StageRunner
from trainer.testbed import ManagerThread


@pytest.fixture
def manager() -> Iterator[ManagerThread]:
    thread = ManagerThread()
    yield thread
    thread.close()


def run_stage(
    runner: StageRunner, manager: ManagerThread, num_steps: int, scores: list[float]
) -> list[Candidate]:
    """Runs RL with a batch a step; returns the candidates."""
    manager.manager.scores = scores
    for step in range(1, num_steps + 1):
        manager.manager.add_batch(group(runner, step, version=1))
    run_rl(runner, num_steps)
    log = SelectionLog(runner.config.run_dir / "metrics" / "selection.jsonl")
    log.begin(num_steps)
    return log._candidates


def candidate(step: int, score: float) -> Candidate:
    return Candidate(
        step, step + 1, f"rl-step-{step}", 1.0, score, 8, 1.0, f"00000{step}-rl-{step}"
    )


def make(tmp_path: Path, model: Path, device: Device, manager: ManagerThread, **more: Any) -> Any:
    evaluation = PeriodicEvaluationConfig(**({"every_steps": 1} | more))
    return make_runner(tmp_path, model, device, manager, evaluation=evaluation)


def test_the_stage_ends_with_the_best_weights(
    tmp_path: Path, model_dir: Path, device: Device, manager: ManagerThread
) -> None:
    runner = make(tmp_path, model_dir, device, manager)
    got = run_stage(runner, manager, 5, [0.2, 0.6, 0.4, 0.5, 0.5, 0.3])
    assert [e.name for e in manager.manager.evaluations] == [
        f"rl-step-{step}-v{step + 1}" for step in range(6)
    ]
    assert [c.pass_at_1 for c in got] == [0.2, 0.6, 0.4, 0.5, 0.5, 0.3]
    assert [c.weight_version for c in got] == [1, 2, 3, 4, 5, 6]
    # The last publication has the weights of step 1, under a version of its own.
    norms = manager.publisher.norms
    assert manager.publisher.versions == [1, 2, 3, 4, 5, 6, 7]
    assert torch.equal(norms[6], norms[1])
    assert not torch.equal(norms[6], norms[5])
    # It outlived the three newest: step 4's, step 5's and the one at the stage's end.
    assert [p.name.partition("-")[2] for p in runner.work.store.paths()] == [
        "rl-1",
        "rl-4",
        "rl-5",
        "rl-5",
    ]


@pytest.mark.parametrize(
    ("settings", "scores", "versions", "steps"),
    [
        ({"keep_best": False}, [0.9, 0.1, 0.1, 0.1], [1, 2, 3, 4], [0, 1, 2, 3]),
        ({"every_steps": 2}, [0.1, 0.2, 0.3], [1, 2, 3, 4], [0, 2, 3]),
        ({"every_steps": 0}, [], [1, 2, 3, 4], []),
        ({"every_steps": 3}, [0.4, 0.4], [1, 2, 3, 4], [0, 3]),
    ],
    ids=["last_is_wanted", "every_second_and_the_last", "off", "the_later_of_equals"],
)
def test_when_and_what(
    tmp_path: Path,
    model_dir: Path,
    device: Device,
    manager: ManagerThread,
    settings: dict[str, Any],
    scores: list[float],
    versions: list[int],
    steps: list[int],
) -> None:
    runner = make(tmp_path, model_dir, device, manager, **settings)
    got = run_stage(runner, manager, 3, scores)
    assert [c.step for c in got] == steps
    assert manager.publisher.versions == versions


def test_a_lost_evaluation_is_tried_at_a_new_version_and_costs_its_score_only(
    tmp_path: Path, model_dir: Path, device: Device, manager: ManagerThread
) -> None:
    runner = make(tmp_path, model_dir, device, manager, max_tries=2)
    got = run_stage(runner, manager, 1, [0.5])  # step 1's loses its engines, twice
    assert [c.step for c in got] == [0]
    assert [e.name for e in manager.manager.evaluations] == [
        "rl-step-0-v1",
        "rl-step-1-v2",
        "rl-step-1-v3",
    ]
    assert torch.equal(manager.publisher.norms[1], manager.publisher.norms[2])
    assert [r.step for r in runner.metrics.since("rl", 1)] == [1]


def test_a_score_of_another_version_is_not_taken(
    tmp_path: Path, model_dir: Path, device: Device, manager: ManagerThread
) -> None:
    runner = make(tmp_path, model_dir, device, manager)
    manager.manager.served_version = 9
    assert run_stage(runner, manager, 1, [0.5, 0.5]) == []
    assert manager.publisher.versions == [1, 2]


def test_a_resumed_stage_evaluates_again_what_it_takes_again(tmp_path: Path) -> None:
    path = tmp_path / "selection.jsonl"
    log = SelectionLog(path)
    log.begin(0)
    for step, score in ((0, 0.1), (4, 0.7), (8, 0.9)):
        log.append(candidate(step, score))
    with path.open("a") as file:
        file.write('{"step": 12, "weight_ver')  # cut by a crash
    again = SelectionLog(path)
    again.begin(6)
    assert again.best() == candidate(4, 0.7)
    assert again.has(4) and not again.has(8) and not again.has(12)
    assert len(path.read_text().splitlines()) == 2
    assert SelectionLog(tmp_path / "none").best() is None


def test_best_weights_that_are_corrupt_on_disk_leave_the_last_ones(
    tmp_path: Path,
    model_dir: Path,
    device: Device,
    manager: ManagerThread,
    caplog: pytest.LogCaptureFixture,
) -> None:
    runner = make(tmp_path, model_dir, device, manager)

    def damage() -> None:
        if len(runner.metrics.since("rl", 1)) == 3:
            (best,) = (p for p in runner.work.store.paths() if p.name.endswith("-rl-1"))
            next(best.glob("*.distcp")).unlink()

    runner.metrics.add_listener(damage)
    run_stage(runner, manager, 3, [0.2, 0.6, 0.4, 0.5])
    assert manager.publisher.versions == [1, 2, 3, 4]
    assert "ends with the weights of its last step" in caplog.text
    assert "no such file" in caplog.text
