"""Objectives against the crafted cases: values, gradients, junk at masked slots, packing."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

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

# name -> (objective, its settings, advantages)
POLICY_CASES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "grpo_token_dapo": ("recompute_only", {}, "grpo_ddof1_eps1e-6"),
    "grpo_seqmean_paper": (
        "recompute_only",
        {"norm": "sequence_mean", "clip_high": 0.2},
        "grpo_ddof0_eps1e-6",
    ),
    "grpo_token_dual3": ("recompute_only", {"dual_clip": 3.0}, "grpo_ddof1_eps1e-6"),
    "dr_grpo": (
        "recompute_only",
        {"norm": "constant", "constant_length": 8.0, "clip_high": 0.2},
        "dr_grpo",
    ),
    "rloo_token": ("recompute_only", {}, "rloo"),
    "tis_token_cap2": ("decoupled", {}, "grpo_ddof1_eps1e-6"),
    "decoupled_clamp5": ("decoupled", {"tis_cap": 5.0}, "grpo_ddof1_eps1e-6"),
    "bypass_ppo": ("bypass", {}, "grpo_ddof1_eps1e-6"),
}


def batch_of(
    new: torch.Tensor, old: torch.Tensor, rollout: torch.Tensor, config: LossConfig, advantages: str
) -> loss.TokenBatch:
    weight = loss.token_weights(MASK, SEQUENCE, config.norm, config.constant_length)
    advantage = torch.tensor(CASES["advantages"][advantages], dtype=torch.float32)[SEQUENCE]
    return loss.TokenBatch(new, old, rollout, advantage, MASK, weight, SEQUENCE)


@pytest.mark.parametrize("junk", [None, math.nan, math.inf], ids=["as_given", "nan", "inf"])
@pytest.mark.parametrize("name", POLICY_CASES)
def test_loss_and_gradient_match_the_case(name: str, junk: float | None) -> None:
    objective, settings, advantages = POLICY_CASES[name]
    config = LossConfig(objective=objective, **settings)
    logs = [flat(FIXTURE[f"logp_{kind}"]) for kind in ("new", "old", "rollout")]
    if junk is not None:
        logs = [
            torch.where(MASK, log, junk * sign) for log, sign in zip(logs, (1, 1, -1), strict=True)
        ]
    new = logs[0].requires_grad_()
    result = loss.OBJECTIVES[objective](batch_of(new, logs[1], logs[2], config, advantages), config)
    result.loss.backward()
    wanted = CASES["cases"][name]
    assert result.num_clamped == 0
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
        fields = {k: getattr(whole, k)[chosen] for k in loss.TokenBatch.__dataclass_fields__}
        parts.append(float(loss.recompute_only(loss.TokenBatch(**fields), config).loss))
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
    result = loss.decoupled(batch, config)
    assert result.num_clamped == 1
    assert float(result.loss) == pytest.approx(-(config.tis_cap + 1) / 2)


def test_no_trained_token_gives_zero_weights() -> None:
    nothing = torch.zeros(4, dtype=torch.bool)
    assert not loss.token_weights(nothing, torch.zeros(4, dtype=torch.int64), "token_mean").any()


def test_unknown_norm_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown norm"):
        loss.token_weights(MASK, SEQUENCE, "mean")
