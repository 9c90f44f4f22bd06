"""The KL term: it pulls towards its reference, which is lent to the model and survives a resume."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from trainer import batch, loss, testbed
from trainer.config import GridConfig, LossConfig, OptimConfig
from trainer.device import Device
from trainer.errors import BadRequestError
from trainer.model import Policy
from trainer.reference import Reference
from trainer.rl_test import group, make_runner, run_rl, run_until
from trainer.stage_runner import StageRequest, StageRunner
from trainer.step import Learner
from trainer.testbed import ManagerThread

NUM_STEPS = 4
FIGURES = ("loss", "grad_norm", "loss_kl", "kl_reference_k2_nats", "kl_reference_k3_nats")


@pytest.fixture
def manager() -> Iterator[ManagerThread]:
    thread = ManagerThread()
    yield thread
    thread.close()


def make_learner(folder: Path, device: Device) -> Learner:
    policy = Policy(folder, GridConfig(), device, seed=0)
    policy.load_hf()
    learner = Learner(policy, 1000)
    learner.begin_stage(OptimConfig(lr=3e-3, warmup_steps=0), num_steps=100, router_aux_loss=0.0)
    return learner


def micro_batches() -> list[batch.MicroBatch]:
    rows = [batch.from_proto(r, testbed.VOCAB) for r in testbed.copy_rows(8)]
    return batch.make_micro_batches(rows, 60, testbed.VOCAB, torch.device("cpu"))


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {n: t.clone() for n, t in learner.policy.module.state_dict().items() if t is not None}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def test_the_reference_is_scored_and_the_weights_stay(model_dir: Path, device: Device) -> None:
    learner, micros = make_learner(model_dir, device), micro_batches()
    start = learner.logprobs(micros)
    reference = Reference(learner.policy)
    assert reference.size_bytes == 4 * learner.policy.num_parameters
    for step in range(1, 4):
        learner.update(micros, lambda _, __, new: -new.sum() / 32, step)
    moved = weights(learner)
    now = learner.logprobs(micros)
    assert max(float((a - b).abs().max()) for a, b in zip(start, now, strict=True)) > 1e-2
    assert all(map(torch.equal, reference.score(learner, micros), start))
    assert same(weights(learner), moved)
    with pytest.raises(IndexError):
        reference.score(learner, [bad_batch(micros[0])])
    assert same(weights(learner), moved)


def test_steps_between_scores_are_those_without(model_dir: Path, device: Device) -> None:
    micros, ends = micro_batches(), []
    for is_lent in (False, True):
        learner = make_learner(model_dir, device)
        reference = Reference(learner.policy)
        for step in range(1, 4):
            learner.update(micros, lambda _, __, new: -new.sum() / 32, step)
            if is_lent:
                reference.score(learner, micros)
        ends.append(weights(learner))
    assert same(*ends)


def bad_batch(micro: batch.MicroBatch) -> batch.MicroBatch:
    """Ids that no model has."""
    return batch.MicroBatch(**(vars(micro) | {"tokens": micro.tokens + testbed.VOCAB}))


@pytest.mark.parametrize("kl", ["k2", "k3"])
def test_the_term_pulls_towards_the_reference(
    tmp_path: Path, model_dir: Path, device: Device, kl: Literal["k2", "k3"]
) -> None:
    """Advantages are 0, so that nothing else moves the weights; the reference is another model."""
    other = testbed.write_model(tmp_path / "other", seed=1, scale=5.0)
    learner, micros = make_learner(model_dir, device), micro_batches()
    start = weights(learner)
    reference = Reference(learner.policy, lambda: learner.policy.load_hf(other))
    assert same(weights(learner), start)
    wanted = reference.score(learner, micros)
    config = LossConfig(kl=kl, kl_coef=1.0, kl_k3_cap=1e6)
    num_tokens = sum(m.targets.numel() for m in micros)

    def loss_of(i: int, micro: batch.MicroBatch, new: torch.Tensor) -> torch.Tensor:
        tokens = loss.TokenBatch(
            new=new,
            old=new.detach(),
            rollout=new.detach(),
            advantage=torch.zeros_like(new),
            mask=torch.ones_like(new, dtype=torch.bool),
            weight=torch.full_like(new, 1 / num_tokens),
            sequence=micro.sequence,
            reference=wanted[i],
        )
        return loss.policy_loss(tokens, config).loss

    losses = [learner.update(micros, loss_of, step).loss for step in range(1, 31)]
    assert losses[0] > 0.1
    assert losses[-1] < losses[0] / 4


def steps_of(
    folder: Path, model: Path, device: Device, died_after: int, **rl: Any
) -> tuple[list[dict[str, float]], StageRunner]:
    """Figures of NUM_STEPS steps on batches that the first weights sampled, all read twice."""
    thread = ManagerThread()
    try:
        runner = make_runner(folder, model, device, thread, **rl)
        for step in range(1, NUM_STEPS + 1):
            thread.manager.add_batch(group(runner, step, version=1))
        batches = list(thread.manager.replies)
        if died_after:
            del thread.manager.replies[died_after:]
            runner.run_stage(StageRequest("rl", "rl", "", NUM_STEPS))
            run_until(runner, lambda: runner.status().step == died_after)
            runner.save()
            thread.manager.replies = batches[died_after:]
            runner = make_runner(folder, model, device, thread, **rl)
        run_rl(runner, NUM_STEPS)
        return [r.scalars for r in runner.metrics.since("rl", 1)], runner
    finally:
        thread.close()


def test_a_resumed_stage_keeps_the_reference(
    tmp_path: Path, model_dir: Path, device: Device
) -> None:
    settings = {"loss": LossConfig(kl="k2", kl_coef=0.5)}
    whole, _ = steps_of(tmp_path / "whole", model_dir, device, 0, **settings)
    resumed, _ = steps_of(tmp_path / "resumed", model_dir, device, 2, **settings)
    assert [[s[f] for f in FIGURES] for s in whole] == [[s[f] for f in FIGURES] for s in resumed]
    # At the stage's start the policy is the reference.
    assert whole[0]["kl_reference_k2_nats"] <= 1e-12
    assert whole[0]["loss_kl"] <= 1e-12
    assert whole[-1]["kl_reference_k2_nats"] > 1e-3
    assert whole[-1]["loss_kl"] > 1e-4


def test_the_term_holds_a_stage_near_its_start(
    tmp_path: Path, model_dir: Path, device: Device
) -> None:
    ends = {}
    for coef in (1e-6, 50.0):
        settings = {"loss": LossConfig(kl="k2", kl_coef=coef)}
        steps, _ = steps_of(tmp_path / str(coef), model_dir, device, 0, **settings)
        ends[coef] = steps[-1]["kl_reference_k2_nats"]
    assert ends[50.0] < ends[1e-6] / 2


def test_no_reference_without_the_term(tmp_path: Path, model_dir: Path, device: Device) -> None:
    steps, runner = steps_of(tmp_path, model_dir, device, 0)
    assert runner.work.rl_step().reference is None
    assert not (tmp_path / "run" / "reference").exists()
    assert not any("kl_reference" in name for name in steps[0])


def test_a_lost_reference_is_named(
    tmp_path: Path, model_dir: Path, device: Device, manager: ManagerThread
) -> None:
    settings = {"loss": LossConfig(kl="k3")}
    runner = make_runner(tmp_path, model_dir, device, manager, **settings)
    manager.manager.add_batch(group(runner, 1, version=1))
    runner.run_stage(StageRequest("rl", "rl", "", 2))
    run_until(runner, lambda: runner.status().step == 1, save_checkpoint=True)
    shutil.rmtree(tmp_path / "run" / "reference" / "rl")
    again = make_runner(tmp_path, model_dir, device, manager, **settings)
    again.run_stage(StageRequest("rl", "rl", "", 2))
    run_until(again, lambda: again.status().state == "failed")
    assert "are not in" in again.status().error
    assert "rl.loss.kl_reference" in again.status().error


def test_a_folder_that_is_no_reference_is_named(
    tmp_path: Path, model_dir: Path, device: Device
) -> None:
    small = testbed.write_model(tmp_path / "small", hidden_size=16)
    learner = make_learner(model_dir, device)
    before = weights(learner)
    with pytest.raises(BadRequestError, match="has shape"):
        Reference(learner.policy, lambda: learner.policy.load_hf(small))
    assert same(weights(learner), before)
