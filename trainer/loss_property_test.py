"""Every member of the family against float64 NumPy, on ragged batches and any split of them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from trainer import loss
from trainer.advantage import group_advantages
from trainer.config import LossConfig
from trainer.loss_reference import Ragged, Reference, reference_loss

# float32 against float64 on sums of some dozen terms, as a share of the largest or of 1.
TOLERANCE = 2e-6
MEMBERS: dict[str, dict[str, Any]] = {
    "/".join(filter(None, [objective, surrogate, correction, "veto" if veto else ""])): {
        "objective": objective,
        "surrogate": surrogate,
        **({"correction": correction} if correction else {}),
        **({"veto": 0.3} if veto else {}),
        **({"band_low": 0.7, "band_high": 1.4} if correction == "mis_geometric" else {}),
    }
    for objective in ("decoupled", "bypass", "recompute_only")
    for surrogate in ("ppo", "gspo", "cispo")
    for correction in (
        ("tis_token", "tis_sequence", "icepop", "mis_geometric")
        if objective == "decoupled"
        else ("",)
    )
    for veto in ((False, True) if correction == "tis_token" else (False,))
}


# Beside each kind of correction and each surrogate, and where nothing corrects. The cap of k3 is
# within reach.
MEMBERS |= {
    f"{member}/{kl}": MEMBERS[member] | {"kl": kl, "kl_coef": 0.3, "kl_k3_cap": 0.5}
    for kl in ("k2", "k3")
    for member in (
        "decoupled/ppo/tis_token",
        "decoupled/gspo/icepop",
        "decoupled/cispo/tis_sequence",
        "bypass/ppo",
    )
}


@dataclass(frozen=True)
class Batch:
    """A ragged batch whose masked slots hold junk."""

    new: Ragged
    old: Ragged
    rollout: Ragged
    mask: list[np.ndarray[Any, Any]]
    advantage: np.ndarray[Any, Any]
    reference: Ragged


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Groups with one survivor, no variance, single-token turns and trajectories without tokens."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    advantages: list[float] = []
    for _ in range(draw(st.integers(1, 3))):
        rewards = draw(st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=1, max_size=4))
        group = group_advantages(rewards)
        if group is not None:  # else the group is dropped before there is a loss
            advantages += group.tolist()
    lengths = [draw(st.integers(1, 7)) for _ in advantages]
    spread = draw(st.sampled_from([1e-4, 0.1, 0.6]))
    mask = [rng.random(n) < draw(st.sampled_from([0.0, 0.6, 1.0])) for n in lengths]
    old = [-3 * rng.random(n) for n in lengths]
    new = [o + spread * rng.standard_normal(len(o)) for o in old]
    rollout = [o + spread * rng.standard_normal(len(o)) for o in old]
    reference = [o + 2 * spread * rng.standard_normal(len(o)) for o in old]
    junk = draw(st.sampled_from([np.nan, np.inf, -np.inf, 700.0]))
    for logs in (new, old, rollout, reference):
        for values, on in zip(logs, mask, strict=True):
            values[~on] = junk
    return Batch(new, old, rollout, mask, np.array(advantages), reference)


def make(config: LossConfig, batch: Batch, new: torch.Tensor) -> loss.TokenBatch:
    lengths = torch.tensor([len(m) for m in batch.mask], dtype=torch.int64)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    mask = torch.tensor(np.concatenate(batch.mask))
    return loss.TokenBatch(
        new=new,
        old=flat(batch.old),
        rollout=flat(batch.rollout),
        advantage=torch.tensor(batch.advantage, dtype=torch.float32)[sequence],
        mask=mask,
        weight=loss.token_weights(mask, sequence, config.norm, config.constant_length),
        sequence=sequence,
        reference=flat(batch.reference),
    )


def flat(ragged: Ragged) -> torch.Tensor:
    return torch.tensor(np.concatenate(ragged), dtype=torch.float32)


def wanted(batch: Batch, config: LossConfig) -> Reference:
    result = reference_loss(
        batch.new, batch.old, batch.rollout, batch.mask, batch.advantage, config, batch.reference
    )
    assume(result.distance_to_kink > 1e-5)  # float32 may take the other branch
    return result


@pytest.mark.parametrize("norm", ["token_mean", "sequence_mean", "constant"])
@pytest.mark.parametrize("member", MEMBERS)
@settings(max_examples=25, deadline=None)
@given(batch=batches())
def test_value_and_gradient_are_the_references(member: str, norm: str, batch: Batch) -> None:
    assume(len(batch.mask) > 0)
    config = LossConfig(norm=norm, constant_length=16.0, **MEMBERS[member])
    reference = wanted(batch, config)
    new = flat(batch.new).requires_grad_()
    result = loss.policy_loss(make(config, batch, new), config)
    result.loss.backward()
    assert float(result.loss.detach()) == pytest.approx(
        reference.loss, rel=TOLERANCE, abs=TOLERANCE
    )
    assert new.grad is not None
    expected = np.concatenate(reference.gradient)
    largest = max(1.0, float(np.abs(expected).max()))
    assert np.abs(new.grad.numpy() - expected).max() <= TOLERANCE * largest


@pytest.mark.parametrize("member", MEMBERS)
@settings(max_examples=25, deadline=None)
@given(batch=batches(), data=st.data())
def test_no_split_into_micro_batches_changes_the_gradient(
    member: str, batch: Batch, data: st.DataObject
) -> None:
    assume(len(batch.mask) > 0)
    config = LossConfig(**MEMBERS[member])
    new = flat(batch.new).requires_grad_()
    whole = make(config, batch, new)
    result = loss.policy_loss(whole, config)
    (gradient,) = torch.autograd.grad(result.loss, new)
    if config.needs_whole_trajectories:
        units = [torch.nonzero(whole.sequence == i)[:, 0] for i in range(len(batch.mask))]
    else:
        units = [torch.tensor([i]) for i in range(len(new))]
    part_of = [data.draw(st.integers(0, 3)) for _ in units]
    split_loss, split_gradient = 0.0, torch.zeros_like(gradient)
    for part in range(4):
        chosen = list(itertools.compress(units, [p == part for p in part_of]))
        if chosen:
            index = torch.cat(chosen)
            fields = {k: getattr(whole, k)[index] for k in loss.TokenBatch.__dataclass_fields__}
            one = loss.policy_loss(loss.TokenBatch(**fields), config)
            split_loss += float(one.loss.detach())
            split_gradient += torch.autograd.grad(one.loss, new)[0]
    value = float(result.loss.detach())
    assert split_loss == pytest.approx(value, rel=TOLERANCE, abs=TOLERANCE)
    largest = max(1.0, float(gradient.abs().max()))
    assert float((split_gradient - gradient).abs().max()) <= TOLERANCE * largest
