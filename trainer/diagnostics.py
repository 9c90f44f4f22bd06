"""What a step tells about itself: gaps, effective sample sizes, clipping, staleness.

Each metric's name states its pair, level and unit. Sums are float64. Definitions, over active
tokens, d = old - rollout (trainer minus engine, in nats), w = exp(d), r = exp(new - old):

  gap_total_*            |d| over all tokens: engine mismatch plus staleness
  gap_engine_*           |d| over tokens whose weight_version equals the trainer's
  gap_*_k3_nats          mean(w - 1 - d), an estimate of KL(engine || trainer)
  ess_token_raw_*        (sum w)^2 / (N sum w^2) over tokens; `cap` uses the truncated w
  ess_sequence_raw_*     the same over W_i = exp(sum d) of the B trajectories; `cap` as above
  clip_fraction_active   tokens whose gradient the trust region removes
  clip_fraction_any_side tokens whose r lies outside it
  tis_capped_fraction    tokens whose w is above the cap

With a KL term, u = new - reference, over all active tokens, however stale:
  kl_reference_k1_nats   mean(u); kl_reference_k2_nats mean(u^2 / 2);
  kl_reference_k3_nats   mean(exp(-u) - 1 + u), not capped
  kl_k3_capped_fraction  tokens beyond kl_k3_cap: with kl=k3 they pull no more

With one optimizer step a batch r is 1 and the clip fractions are 0.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from trainer.config import LossConfig

_Floats = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class ActiveTokens:
    """The trained tokens of a whole batch; every array is [N]."""

    new: _Floats
    old: _Floats
    rollout: _Floats
    advantage: _Floats
    sequence: npt.NDArray[np.int64]
    versions: npt.NDArray[np.int64]


def joined(parts: Sequence[ActiveTokens]) -> ActiveTokens:
    """One batch of what ranks hold; each numbers its own trajectories from 0."""
    firsts = np.cumsum([0, *(int(p.sequence.max(initial=-1)) + 1 for p in parts)])
    return ActiveTokens(
        new=np.concatenate([p.new for p in parts]),
        old=np.concatenate([p.old for p in parts]),
        rollout=np.concatenate([p.rollout for p in parts]),
        advantage=np.concatenate([p.advantage for p in parts]),
        sequence=np.concatenate(
            [p.sequence + first for p, first in zip(parts, firsts, strict=False)]
        ),
        versions=np.concatenate([p.versions for p in parts]),
    )


def effective_sample_size(log_weights: _Floats) -> float:
    """(sum w)^2 / (n sum w^2) in 0..1, by log-sum-exp so that long products cannot overflow."""
    if log_weights.size == 0:
        return 1.0
    shifted = np.exp(log_weights - log_weights.max())
    return float(shifted.sum() ** 2 / (log_weights.size * (shifted**2).sum()))


def _gap(prefix: str, d: _Floats) -> dict[str, float]:
    if d.size == 0:
        return {}
    absolute = np.abs(d)
    return {
        f"{prefix}_mean_nats": float(absolute.mean()),
        f"{prefix}_p99_nats": float(np.quantile(absolute, 0.99)),
        f"{prefix}_max_nats": float(absolute.max()),
        f"{prefix}_k3_nats": float((np.expm1(d) - d).mean()),
    }


def off_policy_metrics(
    tokens: ActiveTokens, config: LossConfig, weight_version: int
) -> dict[str, float]:
    """Computes the metrics of the module's docstring. Empty when no token is active."""
    if tokens.new.size == 0:
        return {}
    d = tokens.old - tokens.rollout
    log_ratio = tokens.new - tokens.old
    ratio = np.exp(np.clip(log_ratio, -config.log_ratio_clamp, config.log_ratio_clamp))
    high = ratio > 1 + config.clip_high
    low = ratio < 1 - config.clip_low
    positive = tokens.advantage > 0
    negative = tokens.advantage < 0
    per_sequence = np.bincount(tokens.sequence, weights=d).astype(np.float64)
    lengths = np.bincount(tokens.sequence)
    log_cap = math.log(config.tis_cap)
    clamped = (np.abs(d) > config.log_ratio_clamp) | (np.abs(log_ratio) > config.log_ratio_clamp)
    return {
        **_gap("gap_total", d),
        **_gap("gap_engine", d[tokens.versions == weight_version]),
        "ess_token_raw_rollout_to_trainer": effective_sample_size(d),
        f"ess_token_cap{config.tis_cap:g}_rollout_to_trainer": effective_sample_size(
            np.minimum(d, log_cap)
        ),
        "ess_sequence_raw_rollout_to_trainer": effective_sample_size(per_sequence[lengths > 0]),
        f"ess_sequence_cap{config.tis_cap:g}_rollout_to_trainer": effective_sample_size(
            np.minimum(per_sequence[lengths > 0], log_cap)
        ),
        "clip_fraction_active": float(((positive & high) | (negative & low)).mean()),
        "clip_fraction_any_side": float((high | low).mean()),
        "tis_capped_fraction": float((d > log_cap).mean()),
        "log_ratio_clamped_fraction": float(clamped.mean()),
    }


def reference_metrics(new: _Floats, reference: _Floats, config: LossConfig) -> dict[str, float]:
    """How far the policy is from the reference of its KL term. Empty when no token is active."""
    if new.size == 0:
        return {}
    u = np.clip(new - reference, -config.log_ratio_clamp, config.log_ratio_clamp)
    k3 = np.expm1(-u) + u
    return {
        "kl_reference_k1_nats": float(u.mean()),
        "kl_reference_k2_nats": float((u**2).mean() / 2),
        "kl_reference_k3_nats": float(k3.mean()),
        "kl_k3_capped_fraction": float((k3 > config.kl_k3_cap).mean()),
    }


def staleness_histogram(oldest_versions: list[int], weight_version: int) -> dict[int, int]:
    """Counts trajectories by staleness: weight_version minus the oldest version they hold."""
    histogram: dict[int, int] = {}
    for version in oldest_versions:
        staleness = weight_version - version
        histogram[staleness] = histogram.get(staleness, 0) + 1
    return dict(sorted(histogram.items()))
