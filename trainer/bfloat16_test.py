"""Training in bfloat16: near float32, with weights of the optimizer's own that lose no small step."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch

from trainer import batch, hf_export, testbed
from trainer.batch import MicroBatch
from trainer.config import GridConfig, OptimConfig
from trainer.device import Device
from trainer.model import Policy
from trainer.step import Learner

Dtype = Literal["float32", "bfloat16"]


def make_learner(folder: Path, device: Device, dtype: Dtype, lr: float = 1e-3) -> Learner:
    policy = Policy(folder, GridConfig(), device, seed=0, dtype=dtype)
    policy.load_hf()
    learner = Learner(policy, 1000)
    optim = OptimConfig(lr=lr, warmup_steps=0, final_lr_fraction=1.0, clip_grad=0.0)
    learner.begin_stage(optim, num_steps=100, router_aux_loss=0.0)
    return learner


def micro_batches() -> list[MicroBatch]:
    rows = [batch.from_proto(r, testbed.VOCAB) for r in testbed.copy_rows(8)]
    return batch.make_micro_batches(rows, 1000, testbed.VOCAB, torch.device("cpu"))


def mean_loss(_: int, _micro: MicroBatch, new: torch.Tensor) -> torch.Tensor:
    return -new.sum() / 32


def losses(learner: Learner, num_steps: int) -> list[float]:
    micros = micro_batches()
    return [learner.update(micros, mean_loss, step).loss for step in range(1, num_steps + 1)]


def test_ten_steps_stay_within_two_percent_of_float32(tmp_path: Path, device: Device) -> None:
    # bfloat16 has 8 bits: a log-prob of a few nats is off by about 1e-2, their mean by less.
    model = testbed.write_model(tmp_path / "model")
    exact = losses(make_learner(model, device, "float32"), 10)
    rough = losses(make_learner(model, device, "bfloat16"), 10)
    assert exact[-1] < 0.9 * exact[0]
    assert rough != exact
    for ours, theirs in zip(rough, exact, strict=True):
        assert ours == pytest.approx(theirs, rel=0.02)


def test_log_probs_and_gradients_are_float32(model_dir: Path, device: Device) -> None:
    learner = make_learner(model_dir, device, "bfloat16")
    update = learner.update(micro_batches(), mean_loss, 1)
    assert all(logprobs.dtype == torch.float32 for logprobs in update.logprobs)
    for parameter in learner.policy.module.parameters():
        assert parameter.dtype == torch.bfloat16
        assert parameter.main_grad.dtype == torch.float32  # type: ignore[attr-defined]


def test_steps_too_small_for_bfloat16_add_up(tmp_path: Path, device: Device) -> None:
    # The next number above 1 is 1 + 2^-7: a step of 1e-4 is lost, and eighty of them are not.
    learner = make_learner(testbed.write_model(tmp_path / "model"), device, "bfloat16", lr=1e-4)

    def moved() -> float:
        norm = dict(learner.policy.export_named_tensors())["model.norm.weight"]
        return float((norm.float() - 1).abs().max())

    micros = micro_batches()
    for step in range(1, 81):
        learner.update(micros, mean_loss, step)
        if step == 1:
            assert moved() == 0
    assert moved() > 0


def test_export_is_bfloat16_and_holds_the_rounded_weights(
    tmp_path: Path, model_dir: Path, device: Device
) -> None:
    from safetensors.torch import load_file

    policy = make_learner(model_dir, device, "bfloat16").policy
    hf_export.write(policy.export_named_tensors(), model_dir, tmp_path / "out")
    exported = load_file(tmp_path / "out" / "model.safetensors")
    source = load_file(model_dir / "model.safetensors")
    assert exported.keys() == source.keys()
    for name, tensor in exported.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, source[name].to(torch.bfloat16)), name
