"""Objectives against the crafted cases: values, gradients, junk at masked slots, packing."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from pydantic import ValidationError

from trainer import loss
from trainer.config import LossConfig

CASES = json.loads((Path(__file__).parent / "testdata" / "loss_cases.json").read_text())
FIXTURE = CASES["fixture"]
LENGTHS = [len(m) for m in FIXTURE["mask"]]
# float32 against float64: losses of order 0.1, gradients of order 0.3.
TOLERANCE = 3e-7


def flat(ragged: list[list[float]]) -> torch.Tensor:
    return torch.tensor(list(itertools.chain(*ragged)), dtype=torch.float32)


MASK = flat(FIXTURE["mask"]).bool()
SEQUENCE = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))

# name -> (settings, advantages)
GRPO = "grpo_ddof1_eps1e-6"
POLICY_CASES: dict[str, tuple[dict[str, Any], str]] = {
    "grpo_token_dapo": ({"objective": "recompute_only"}, GRPO),
    "grpo_seqmean_paper": (
        {"objective": "recompute_only", "norm": "sequence_mean", "clip_high": 0.2},
        "grpo_ddof0_eps1e-6",
    ),
    "grpo_token_dual3": ({"objective": "recompute_only", "dual_clip": 3.0}, GRPO),
    "dr_grpo": (
        {
            "objective": "recompute_only",
            "norm": "constant",
            "constant_length": 8.0,
            "clip_high": 0.2,
        },
        "dr_grpo",
    ),
    "rloo_token": ({"objective": "recompute_only"}, "rloo"),
    "gspo_3e-4_4e-4": ({"objective": "recompute_only", "surrogate": "gspo"}, GRPO),
    "gspo_0.2_0.28": (
        {
            "objective": "recompute_only",
            "surrogate": "gspo",
            "clip_low": 0.2,
            "clip_high": 0.28,
        },
        GRPO,
    ),
    "gspo_tokenmean_areal": (
        {
            "objective": "recompute_only",
            "surrogate": "gspo",
            "clip_low": 0.2,
            "clip_high": 0.28,
            "norm": "token_mean",
        },
        GRPO,
    ),
    "tis_token_cap2": ({}, GRPO),
    "tis_seq_cap2": ({"correction": "tis_sequence"}, GRPO),
    "icepop_0.5_5": ({"correction": "icepop"}, GRPO),
    "decoupled_clamp5": ({"tis_cap": 5.0}, GRPO),
    "mis_geo_0.9_1.2": (
        {"correction": "mis_geometric", "band_low": 0.9, "band_high": 1.2},
        GRPO,
    ),
    "bypass_ppo": ({"objective": "bypass"}, GRPO),
    "cispo_cap5": ({"objective": "recompute_only", "surrogate": "cispo"}, GRPO),
}
# Of the crafted cases; 0 where none is rejected.
NUM_REJECTED = {"icepop_0.5_5": 2, "mis_geo_0.9_1.2": 7}


def batch_of(
    new: torch.Tensor, old: torch.Tensor, rollout: torch.Tensor, config: LossConfig, advantages: str
) -> loss.TokenBatch:
    weight = loss.token_weights(MASK, SEQUENCE, config.norm, config.constant_length)
    advantage = torch.tensor(CASES["advantages"][advantages], dtype=torch.float32)[SEQUENCE]
    return loss.TokenBatch(new, old, rollout, advantage, MASK, weight, SEQUENCE)


@pytest.mark.parametrize("junk", [None, math.nan, math.inf], ids=["as_given", "nan", "inf"])
@pytest.mark.parametrize("name", POLICY_CASES)
def test_loss_and_gradient_match_the_case(name: str, junk: float | None) -> None:
    settings, advantages = POLICY_CASES[name]
    config = LossConfig(**settings)
    wanted = CASES["cases"][name]
    logs = [flat(FIXTURE[f"logp_{kind}"]) for kind in ("new", "old", "rollout")]
    if wanted["logp_current"] == "near":
        logs[0] = logs[1] + flat(FIXTURE["logp_near_minus_old"])
    if junk is not None:
        logs = [
            torch.where(MASK, log, junk * sign) for log, sign in zip(logs, (1, 1, -1), strict=True)
        ]
    new = logs[0].requires_grad_()
    result = loss.policy_loss(batch_of(new, logs[1], logs[2], config, advantages), config)
    result.loss.backward()
    assert result.num_clamped == 0
    assert result.num_rejected == NUM_REJECTED.get(name, 0)
    assert float(result.loss.detach()) == pytest.approx(wanted["loss"], abs=TOLERANCE)
    assert new.grad is not None
    torch.testing.assert_close(new.grad, flat(wanted["grad"]), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("junk", [None, math.nan], ids=["as_given", "nan"])
def test_sft_matches_the_case(junk: float | None) -> None:
    new = flat(FIXTURE["logp_new"])
    if junk is not None:
        new = torch.where(MASK, new, junk)
    new.requires_grad_()
    result = loss.sft_loss(new, MASK, loss.token_weights(MASK, SEQUENCE, "token_mean"))
    result.backward()
    wanted = CASES["cases"]["sft_token_mean"]
    assert float(result.detach()) == pytest.approx(wanted["loss"], abs=TOLERANCE)
    torch.testing.assert_close(new.grad, flat(wanted["grad"]), rtol=0, atol=TOLERANCE)


def test_micro_batches_sum_to_the_global_mean() -> None:
    config = LossConfig(objective="recompute_only")
    new, old, rollout = (flat(FIXTURE[f"logp_{k}"]) for k in ("new", "old", "rollout"))
    whole = batch_of(new, old, rollout, config, "grpo_ddof1_eps1e-6")
    parts = []
    for members in ((0, 1, 2), (3, 4, 5)):
        chosen = torch.isin(SEQUENCE, torch.tensor(members))
        fields = {k: v[chosen] for k, v in vars(whole).items() if v is not None}
        parts.append(float(loss.policy_loss(loss.TokenBatch(**fields), config).loss))
    assert sum(parts) == pytest.approx(CASES["microbatch"]["global_token_mean"], abs=TOLERANCE)


def test_extreme_log_ratio_is_clamped_and_counted() -> None:
    config = LossConfig()
    mask = torch.tensor([True, True, False])
    one = torch.ones(3)
    batch = loss.TokenBatch(
        new=torch.tensor([-1.0, -1.0, 0.0]),
        old=torch.tensor([-1.0, -1.0, 0.0]),
        rollout=torch.tensor([-90.0, -1.0, 500.0]),
        advantage=one,
        mask=mask,
        weight=one / 2,
        sequence=torch.zeros(3, dtype=torch.int64),
    )
    result = loss.policy_loss(batch, config)
    assert result.num_clamped == 1
    assert float(result.loss) == pytest.approx(-(config.tis_cap + 1) / 2)


def test_a_veto_rejects_the_whole_trajectory() -> None:
    old = torch.tensor([-1.0, -1.0, -1.0, -1.0])
    rollout = torch.tensor([-1.0, 8.3, -1.0, -20.0])  # w: 1, 9e-5, 1, and one that is masked
    batch = loss.TokenBatch(
        new=old.clone().requires_grad_(),
        old=old,
        rollout=rollout,
        advantage=torch.ones(4),
        mask=torch.tensor([True, True, True, False]),
        weight=torch.ones(4) / 3,
        sequence=torch.tensor([0, 0, 1, 1]),
    )
    assert loss.policy_loss(batch, LossConfig()).num_rejected == 0
    result = loss.policy_loss(batch, LossConfig(veto=1e-4))
    result.loss.backward()
    assert result.num_rejected == 2
    assert batch.new.grad is not None
    # The divisor still counts what was rejected.
    torch.testing.assert_close(batch.new.grad, torch.tensor([0.0, 0.0, -1 / 3, 0.0]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"objective": "bypass", "correction": "icepop"}, "weighs no token"),
        ({"objective": "recompute_only", "veto": 1e-4}, "weighs no token"),
        ({"correction": "icepop", "band_low": 6.0}, "no weight lies between"),
        ({"surrogate": "cispo", "dual_clip": 3.0}, "dual_clip is of the surrogate 'ppo'"),
        ({"norm": "constant"}, "constant_length"),
    ],
    ids=["bypass", "veto", "band", "dual_clip", "constant"],
)
def test_choices_that_do_not_fit_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        LossConfig(**settings)


def test_defaults_follow_the_choice() -> None:
    gspo = LossConfig(surrogate="gspo", clip_high=5e-4)
    assert (gspo.clip_low, gspo.clip_high, gspo.norm) == (3e-4, 5e-4, "sequence_mean")
    assert LossConfig(correction="mis_geometric").band_low == 0.99
    assert LossConfig.model_validate(gspo.model_dump()) == gspo
    whole = [LossConfig(surrogate="gspo"), LossConfig(correction="tis_sequence")]
    whole += [LossConfig(correction="mis_geometric"), LossConfig(veto=1e-4)]
    assert all(config.needs_whole_trajectories for config in whole)
    assert not LossConfig().needs_whole_trajectories
    assert not LossConfig(correction="icepop", surrogate="cispo").needs_whole_trajectories


def test_no_trained_token_gives_zero_weights() -> None:
    nothing = torch.zeros(4, dtype=torch.bool)
    assert not loss.token_weights(nothing, torch.zeros(4, dtype=torch.int64), "token_mean").any()


def test_unknown_norm_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown norm"):
        loss.token_weights(MASK, SEQUENCE, "mean")


@pytest.mark.parametrize(
    ("kl", "value", "slope"),
    [("k2", 0.5**2 / 2, 0.5), ("k3", math.exp(-0.5) - 0.5, 1 - math.exp(-0.5))],
)
def test_the_kl_term_and_its_pull(kl: Literal["k2", "k3"], value: float, slope: float) -> None:
    """By hand: one token, half a nat likelier than under the reference, without an advantage."""
    one = torch.ones(1)
    new = torch.tensor([-1.0], requires_grad=True)
    config = LossConfig(kl=kl, kl_coef=0.1)
    batch = loss.TokenBatch(
        new=new,
        old=new.detach(),
        rollout=new.detach(),
        advantage=torch.zeros(1),
        mask=one.bool(),
        weight=one,
        sequence=torch.zeros(1, dtype=torch.int64),
        reference=torch.tensor([-1.5]),
    )
    result = loss.policy_loss(batch, config)
    result.loss.backward()
    assert result.kl == pytest.approx(0.1 * value)
    assert float(result.loss.detach()) == pytest.approx(0.1 * value)
    assert new.grad is not None
    assert float(new.grad) == pytest.approx(0.1 * slope)
    with pytest.raises(ValueError, match="log-probs of the reference"):
        loss.policy_loss(dataclasses.replace(batch, reference=None), config)
