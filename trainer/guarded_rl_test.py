"""Guards in the RL stage: what stops, what is saved, what is told, and that weights stay."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.config import GuardsConfig
from trainer.device import Device
from trainer.rl_test import group, make_runner, run_rl, run_until
from trainer.stage_runner import StageRequest, StageRunner
from trainer.testbed import ManagerThread

HUGE = 3e38
"""A reward whose loss overflows float32; the service would not let it pass."""


@pytest.fixture
def manager() -> Iterator[ManagerThread]:
    thread = ManagerThread()
    yield thread
    thread.close()


def add(
    manager: ManagerThread, runner: StageRunner, step: int, reward: float | None = None
) -> None:
    batch = group(runner, step, version=1)
    if reward is not None:
        (members,) = batch.values()
        for member, sign in zip(members, (1, -1), strict=True):
            member.reward = sign * reward
    manager.manager.add_batch(batch)


def weights(runner: StageRunner) -> dict[str, torch.Tensor]:
    return {n: t.clone() for n, t in runner.learner.policy.export_named_tensors()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def watched(runner: StageRunner, num_steps: int, script: Callable[[], None]) -> None:
    """Runs the stage here while `script` acts from another thread; then the trainer stops."""
    failed: list[BaseException] = []

    def act() -> None:
        try:
            script()
        except BaseException as error:
            failed.append(error)
        runner.stop(save_checkpoint=False)

    runner.run_stage(StageRequest("rl", "rl", "", num_steps))
    thread = threading.Thread(target=act)
    thread.start()
    runner.run()
    thread.join()
    if failed:
        raise failed[0]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_loss_that_is_not_finite_pauses_before_the_weights_change(
    tmp_path: Path, model_dir: Path, device: Device, manager: ManagerThread
) -> None:
    guards = GuardsConfig(max_entropy_nats=None)
    runner = make_runner(tmp_path, model_dir, device, manager, advantage="dr_grpo", guards=guards)
    for step, reward in ((1, None), (2, HUGE), (3, None)):
        add(manager, runner, step, reward)
    seen: dict[str, Any] = {}

    def script() -> None:
        until(lambda: runner.status().state == "paused")
        status = runner.status()
        seen["status"], seen["asked"] = status, len(manager.manager.asked)
        seen["acked"] = len(manager.manager.acked)
        seen["before"] = runner.submit(lambda: weights(runner)).result(timeout=30)
        runner.resume()
        until(lambda: runner.status().state == "finished")

    watched(runner, 3, script)
    status = seen["status"]
    assert "step 2: loss" in status.pause_reason and "the step was not taken" in status.pause_reason
    assert (status.step, seen["asked"], seen["acked"]) == (1, 2, 1)
    assert status.latest_checkpoint.endswith("-rl-1"), "saved before it paused"
    assert runner.status().pause_reason == ""
    assert dict(manager.manager.acked[1].dropped_groups) == {"g2": "non_finite"}
    (told, other) = manager.manager.acked[1].trajectories
    assert (told.num_tokens, told.untrained_reason, other.untrained_reason) == (
        0,
        "non_finite",
        "non_finite",
    )
    first, second, third = runner.metrics.since("rl", 1)
    assert second.scalars["step_skipped"] == second.scalars["guard_non_finite"] == 1.0
    assert second.weight_version == 0, "unchanged weights are not published"
    assert third.scalars["loss"] == third.scalars["loss"]
    assert first.scalars.get("guard_non_finite") is None

    # Step 3 found the weights, and the optimizer, that step 1 left.
    thread = ManagerThread()
    try:
        plain = make_runner(tmp_path / "plain", model_dir, device, thread, advantage="dr_grpo")
        add(thread, plain, 1)
        plain.run_stage(StageRequest("rl", "rl", "", 3))
        run_until(plain, lambda: plain.status().step == 1)
        assert same(seen["before"], weights(plain))
    finally:
        thread.close()
    assert not same(seen["before"], weights(runner))


def test_a_batch_that_is_not_finite_leaves_no_trace_in_the_next_step(
    tmp_path: Path, model_dir: Path, device: Device
) -> None:
    ends = []
    for name, rewards in (("with", (None, HUGE, None)), ("without", (None, None))):
        thread = ManagerThread()
        try:
            guards = GuardsConfig(action="warn")
            runner = make_runner(
                tmp_path / name, model_dir, device, thread, advantage="dr_grpo", guards=guards
            )
            for step, reward in enumerate(rewards, 1):
                add(thread, runner, step, reward)
            run_rl(runner, len(rewards))
            ends.append(weights(runner))
        finally:
            thread.close()
    assert same(*ends)


def test_a_band_left_for_long_enough_pauses_with_a_checkpoint_until_it_is_let_go(
    tmp_path: Path, model_dir: Path, device: Device, manager: ManagerThread
) -> None:
    guards = GuardsConfig(patience_steps=2, max_grad_norm=1e-9, max_entropy_nats=None)
    runner = make_runner(tmp_path, model_dir, device, manager, guards=guards)
    for step in range(1, 5):
        add(manager, runner, step)
    seen: list[Any] = []

    def script() -> None:
        until(lambda: runner.status().state == "paused")
        seen.append(runner.status())
        time.sleep(0.05)
        seen.append(runner.status())
        runner.resume()
        until(lambda: runner.status().state == "finished")

    watched(runner, 4, script)
    paused, still = seen
    assert paused.step == still.step == 2
    assert paused.pause_reason.startswith("grad_norm is ")
    assert "trainer.rl.guards.max_grad_norm = 1e-09 (step 2, for 2 steps in a row)" in (
        paused.pause_reason
    )
    assert paused.latest_checkpoint.endswith("-rl-2")
    records = runner.metrics.since("rl", 1)
    assert [r.scalars.get("guard_left_max_grad_norm") for r in records] == [1.0] * 4
    # It trips in the last step too, where there is nothing to hold back.
    assert [r.scalars.get("guard_tripped") for r in records] == [None, 1.0, None, 1.0]


def test_stop_fails_the_stage_with_its_checkpoint_and_a_new_process_counts_on(
    tmp_path: Path, model_dir: Path, device: Device, manager: ManagerThread
) -> None:
    guards = GuardsConfig(
        patience_steps=2, max_grad_norm=1e-9, max_entropy_nats=None, action="stop"
    )
    runner = make_runner(tmp_path, model_dir, device, manager, guards=guards)
    add(manager, runner, 1)
    runner.run_stage(StageRequest("rl", "rl", "", 5))
    run_until(runner, lambda: runner.status().step == 1)
    runner.save()
    again = make_runner(tmp_path, model_dir, device, manager, guards=guards)
    add(manager, again, 2)
    assert again.run_stage(StageRequest("rl", "rl", "", 5)) == 1
    run_until(again, lambda: again.status().state == "failed")
    assert again.status().step == 2
    assert "GuardError: a guard stopped the stage: grad_norm is" in again.status().error
    assert again.status().latest_checkpoint.endswith("-rl-2")


def test_stop_gives_up_a_pause(
    tmp_path: Path, model_dir: Path, device: Device, manager: ManagerThread
) -> None:
    guards = GuardsConfig(patience_steps=1, max_grad_norm=1e-9, max_entropy_nats=None)
    runner = make_runner(tmp_path, model_dir, device, manager, guards=guards)
    add(manager, runner, 1)
    watched(runner, 5, lambda: until(lambda: runner.status().state == "paused"))
    assert runner.status().state == "idle"
