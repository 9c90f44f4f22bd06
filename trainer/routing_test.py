"""Routing replay in the trainer: the choice is replayed, the router's own weights are trained."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trainer import batch, testbed
from trainer.batch import ExpertLayout, MicroBatch, Sequence
from trainer.config import GridConfig, OptimConfig
from trainer.device import Device
from trainer.model import Policy
from trainer.reference import Reference
from trainer.step import Learner
from trainer.testbed import VOCAB, record, with_experts

LAYOUT = ExpertLayout(num_layers=2, top_k=2, num_experts=4)
CPU = torch.device("cpu")


def make_learner(folder: Path, device: Device) -> Learner:
    policy = Policy(folder, GridConfig(), device, seed=0)
    policy.load_hf()
    learner = Learner(policy, 1000)
    learner.begin_stage(OptimConfig(lr=1e-3, warmup_steps=0), num_steps=10, router_aux_loss=0.0)
    return learner


def mean_loss(_: int, _micro: MicroBatch, new: torch.Tensor) -> torch.Tensor:
    return -new.sum() / 32


def rows() -> list[Sequence]:
    return [batch.from_proto(r, VOCAB) for r in testbed.copy_rows(8)]


def packs(sequences: list[Sequence], budget: int = 1000, multiple: int = 1) -> list[MicroBatch]:
    return batch.make_micro_batches(sequences, budget, VOCAB, CPU, multiple=multiple)


def own_choice(learner: Learner, sequence: Sequence) -> np.ndarray[Any, Any]:
    """What the trainer's router chooses: [N - 1, L, K]."""
    (micro,) = packs([dataclasses.replace(sequence, experts=None)])
    micro.rows.chosen_experts = {}
    learner.logprobs([micro])
    layers = [micro.rows.chosen_experts[i].numpy() for i in range(LAYOUT.num_layers)]
    return np.stack(layers, 1)[:-1].astype(np.uint8)


def choosing(learner: Learner, sequences: list[Sequence]) -> list[Sequence]:
    return [dataclasses.replace(s, experts=own_choice(learner, s)) for s in sequences]


def gate_gradients(learner: Learner) -> list[torch.Tensor]:
    return [
        parameter.main_grad.clone()  # type: ignore[attr-defined]
        for name, parameter in learner.policy.module.named_parameters()
        if "router" in name
    ]


def test_own_choice_replayed_changes_nothing_whatever_the_packing(
    model_dir: Path, device: Device
) -> None:
    learner = make_learner(model_dir, device)
    sequences = rows()
    plain = learner.logprobs(packs(sequences))
    replayed = choosing(learner, sequences)
    again = learner.logprobs(packs(replayed, multiple=8))
    assert torch.allclose(torch.cat(plain), torch.cat(again), atol=1e-6, rtol=0)
    first = learner.update(packs(sequences), mean_loss, 1)
    gates = gate_gradients(learner)
    second = make_learner(model_dir, device)
    update = second.update(packs(replayed, 30), mean_loss, 1)
    assert update.loss == pytest.approx(first.loss, rel=1e-6)
    assert update.grad_norm == pytest.approx(first.grad_norm, rel=1e-5)
    for ours, theirs in zip(gate_gradients(second), gates, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-7)
        assert float(ours.abs().max()) > 1e-6


def test_another_choice_gives_another_loss_and_still_trains_the_router(
    model_dir: Path, device: Device
) -> None:
    learner = make_learner(model_dir, device)
    sequences = choosing(learner, rows())
    turned = [dataclasses.replace(s, experts=(own_choice(learner, s) + 1) % 4) for s in sequences]
    own = torch.cat(learner.logprobs(packs(sequences)))
    other = torch.cat(learner.logprobs(packs(turned)))
    assert float((own - other).abs().mean()) > 1e-3
    update = learner.update(packs(turned), mean_loss, 1)
    assert update.loss == pytest.approx(-float(other.sum()) / 32, rel=1e-5)
    assert all(float(g.abs().max()) > 1e-6 for g in gate_gradients(learner))


def test_layers_that_are_computed_again_replay_the_same_choice(
    model_dir: Path, device: Device
) -> None:
    ends = []
    for is_recomputed in (False, True):
        learner = make_learner(model_dir, device)
        learner.policy.set_recompute(is_recomputed)
        turned = [dataclasses.replace(s, experts=(own_choice(learner, s) + 1) % 4) for s in rows()]
        update = learner.update(packs(turned, 30), mean_loss, 1)
        ends.append((update.loss, update.grad_norm, gate_gradients(learner)))
    assert ends[0][:2] == ends[1][:2]
    assert all(map(torch.equal, ends[0][2], ends[1][2]))


def test_recomputed_layers_replay_the_choice_of_their_own_pack(
    model_dir: Path, device: Device
) -> None:
    learners = [make_learner(model_dir, device) for _ in range(2)]
    turned = [dataclasses.replace(s, experts=(own_choice(learners[0], s) + 1) % 4) for s in rows()]
    learners[1].policy.set_recompute(True)
    # Several packs: each backward pass runs the layers again after the forward pass of its own.
    updates = [learner.update(packs(turned, 30), mean_loss, 1) for learner in learners]
    assert updates[1].loss == updates[0].loss
    assert updates[1].grad_norm == pytest.approx(updates[0].grad_norm, rel=1e-6)


def test_the_reference_of_a_kl_term_routes_freely(model_dir: Path, device: Device) -> None:
    learner = make_learner(model_dir, device)
    (micro,) = packs([dataclasses.replace(rows()[0], experts=None)])
    turned = (own_choice(learner, rows()[0]) + 1) % 4
    (replayed,) = packs([dataclasses.replace(rows()[0], experts=turned)])
    (free,) = learner.logprobs([micro])
    assert not torch.equal(learner.logprobs([replayed])[0], free)
    assert torch.equal(Reference(learner.policy).score(learner, [replayed])[0], free)


def test_choice_equals_that_of_transformers_with_masked_experts(
    model_dir: Path, device: Device
) -> None:
    """Log-probs of a replayed choice, from a reference whose router can choose nothing else."""
    from transformers import Qwen3MoeForCausalLM

    learner = make_learner(model_dir, device)
    sequence = rows()[0]
    count = len(sequence.token_ids)
    chosen = np.random.default_rng(3).permuted(
        np.tile(np.arange(4, dtype=np.uint8), (count - 1, 2, 1)), axis=-1
    )[..., :2]
    ours = learner.logprobs(packs([dataclasses.replace(sequence, experts=chosen)]))[0]
    reference = Qwen3MoeForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    for index, layer in enumerate(reference.model.layers):
        allowed = torch.full((count, 4), -math.inf)
        allowed[:-1].scatter_(1, torch.from_numpy(chosen[:, index].astype(np.int64)), 0.0)
        allowed[-1] = 0.0
        layer.mlp.gate.register_forward_hook(lambda _m, _i, out, a=allowed: out + a)
    ids = torch.tensor(sequence.token_ids.tolist())
    logprobs = torch.log_softmax(reference(ids[None]).logits[0, :-1], -1)
    picked = logprobs.gather(1, ids[1:, None])[:, 0]
    wanted = picked[torch.from_numpy(sequence.loss_mask[1:])].detach()
    assert torch.allclose(ours, wanted, atol=1e-5)


def sampled(experts: np.ndarray[Any, Any] | None, num_experts: int = 4) -> Sequence:
    one = record([6, 7, 8, 9], [0, 0, 1, 1], logprobs=[0, 0, -1, -1])
    if experts is not None:
        one = with_experts(one, experts, num_experts)
    return batch.from_proto(one, VOCAB)


def choice(*shape: int) -> np.ndarray[Any, Any]:
    return np.broadcast_to(np.arange(shape[-1]), shape)


TWICE = choice(3, 2, 2).copy()
TWICE[1, 1] = 3
UNKNOWN = choice(3, 2, 2) + 3


@pytest.mark.parametrize(
    ("experts", "reason"),
    [
        (choice(3, 2, 2), ""),
        (None, "no_routed_experts"),
        (choice(4, 2, 2), "routed_experts_shape"),
        (choice(3, 1, 2), "routed_experts_shape"),
        (choice(3, 2, 1), "routed_experts_shape"),
        (UNKNOWN, "routed_expert_unknown"),
        (TWICE, "routed_expert_twice"),
    ],
    ids=["sound", "missing", "tokens", "layers", "top_k", "unknown", "twice"],
)
def test_experts_that_the_model_cannot_choose_are_named(
    experts: np.ndarray[Any, Any] | None, reason: str
) -> None:
    assert batch.broken_reason(sampled(experts), LAYOUT) == reason
    assert batch.broken_reason(sampled(experts)) == ""


def test_torn_bytes_are_of_no_shape() -> None:
    one = with_experts(record([6, 7], [0, 1], logprobs=[0, -1]), choice(1, 2, 2))
    one.routed_experts.ids = one.routed_experts.ids[:-1]
    assert batch.broken_reason(batch.from_proto(one, VOCAB), LAYOUT) == "routed_experts_shape"


def test_more_than_256_experts_take_two_bytes() -> None:
    wide = choice(3, 2, 2) + 255
    got = sampled(wide, num_experts=512)
    assert got.experts is not None
    assert got.experts.tolist() == wide.tolist()
    packed = packs([got], multiple=3)[0].rows.experts
    assert packed is not None
    assert packed.tolist() == [*wide.tolist(), *[[[0, 1], [0, 1]]] * 3]
