from __future__ import annotations

from pathlib import Path

import pytest
import torch

from trainer import batch, testbed
from trainer.config import GridConfig, OptimConfig
from trainer.device import Device
from trainer.errors import NonFiniteError
from trainer.model import Policy
from trainer.step import Learner, learning_rate


def make_learner(folder: Path, device: Device, chunk: int = 1000) -> Learner:
    policy = Policy(folder, GridConfig(), device, seed=0)
    policy.load_hf()
    learner = Learner(policy, chunk)
    learner.begin_stage(OptimConfig(lr=1e-3, warmup_steps=0), num_steps=10, router_aux_loss=0.0)
    return learner


def micro_batches(budget: int) -> list[batch.MicroBatch]:
    rows = [batch.from_proto(r, testbed.VOCAB) for r in testbed.copy_rows(8)]
    return batch.make_micro_batches(rows, budget, testbed.VOCAB, torch.device("cpu"))


def mean_loss(_: int, _micro: batch.MicroBatch, new: torch.Tensor) -> torch.Tensor:
    return -new.sum() / 32


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {n: t.clone() for n, t in learner.policy.export_named_tensors()}


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3"])
def test_recompute_changes_no_bit_and_keeps_less(
    tmp_path: Path, device: Device, family: str
) -> None:
    sizes = testbed.FAMILIES[family] | {"num_hidden_layers": 4}
    folder = testbed.write_model(tmp_path / "model", scale=5.0, **sizes)
    ends, kept_bytes = [], []
    for is_on in (False, True):
        learner = make_learner(folder, device)
        learner.policy.set_recompute(is_on)
        kept = 0

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal kept
            kept += tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            learner.policy.hidden(micro_batches(1000)[0])
        updates = [learner.update(micro_batches(60), mean_loss, step) for step in (1, 2)]
        ends.append((updates[0].grad_norm, updates[1].loss, weights(learner)))
        kept_bytes.append(kept)
    plain, recomputed = ends
    assert plain[:2] == recomputed[:2]
    assert all(torch.equal(plain[2][n], recomputed[2][n]) for n in plain[2])
    assert kept_bytes[1] < kept_bytes[0] / 5


def test_loss_and_gradient_do_not_depend_on_packing_or_chunks(
    model_dir: Path, device: Device
) -> None:
    updates = [
        make_learner(model_dir, device, chunk).update(micro_batches(budget), mean_loss, 1)
        for budget, chunk in ((1000, 1000), (30, 1000), (1000, 5))
    ]
    for other in updates[1:]:
        assert other.loss == pytest.approx(updates[0].loss, rel=1e-6)
        assert other.grad_norm == pytest.approx(updates[0].grad_norm, rel=1e-5)


def test_gradient_matches_transformers(model_dir: Path, device: Device) -> None:
    from transformers import Qwen3MoeForCausalLM

    reference = Qwen3MoeForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    total = torch.zeros(())
    for row in testbed.copy_rows(8):
        sequence = batch.from_proto(row, testbed.VOCAB)
        ids = torch.tensor(sequence.token_ids.tolist())
        logprobs = torch.log_softmax(reference(ids[None]).logits[0, :-1], -1)
        picked = logprobs.gather(1, ids[1:, None])[:, 0]
        total = total - picked[torch.from_numpy(sequence.loss_mask[1:])].sum() / 32
    total.backward()
    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), float("inf"))
    update = make_learner(model_dir, device).update(micro_batches(1000), mean_loss, 1)
    assert update.loss == pytest.approx(float(total.detach()), rel=1e-6)
    assert update.grad_norm == pytest.approx(float(norm), rel=1e-5)


def test_logprobs_equal_those_of_the_update(model_dir: Path, device: Device) -> None:
    learner = make_learner(model_dir, device)
    micros = micro_batches(30)
    before = learner.logprobs(micros)
    update = learner.update(micros, mean_loss, 1)
    assert all(torch.equal(a, b) for a, b in zip(before, update.logprobs, strict=True))


def test_nonfinite_loss_leaves_the_weights_alone(model_dir: Path, device: Device) -> None:
    learner = make_learner(model_dir, device)
    before = weights(learner)

    def bad(_: int, _micro: batch.MicroBatch, new: torch.Tensor) -> torch.Tensor:
        return new.sum() * float("nan")

    with pytest.raises(NonFiniteError, match="not taken"):
        learner.update(micro_batches(1000), bad, 1)
    after = weights(learner)
    assert all(torch.equal(before[n], after[n]) for n in before)
    assert learner.update(micro_batches(1000), mean_loss, 1).grad_norm > 0


def test_nonfinite_logprob_is_refused_before_the_backward_pass(
    model_dir: Path, device: Device
) -> None:
    learner = make_learner(model_dir, device)
    with torch.no_grad():
        learner.policy.module.decoder.final_layernorm.weight.fill_(float("inf"))
    with pytest.raises(NonFiniteError, match="log-prob of id"):
        learner.update(micro_batches(1000), mean_loss, 1)


def test_router_aux_loss_adds_gradient_only_when_asked(model_dir: Path, device: Device) -> None:
    learner = make_learner(model_dir, device)
    plain = learner.update(micro_batches(1000), mean_loss, 1).grad_norm
    balanced = make_learner(model_dir, device)
    balanced.policy.set_router_aux_loss(1.0)
    assert balanced.update(micro_batches(1000), mean_loss, 1).grad_norm != pytest.approx(plain)


@pytest.mark.parametrize(
    ("step", "wanted"), [(1, 0.1 / 3), (3, 0.1 * (1 - 0.9 * 2 / 10)), (10, 0.1 * (1 - 0.9 * 0.9))]
)
def test_learning_rate_warms_up_and_falls(step: int, wanted: float) -> None:
    optim = OptimConfig(lr=0.1, warmup_steps=3, final_lr_fraction=0.1)
    got = learning_rate(optim, step, 10)
    assert got == pytest.approx(wanted) if step > 1 else got == pytest.approx(0.1 / 3)
