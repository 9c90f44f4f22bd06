"""The policy loss once more, in float64 NumPy, with its gradient worked out by hand.

Owner: tests. It takes a batch trajectory by trajectory, as the formulas are written, and shares no
code with loss.py. Legend: ragged lists of [n_i] arrays, one a trajectory.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from trainer.config import LossConfig

Ragged = list[npt.NDArray[np.float64]]


@dataclasses.dataclass(frozen=True)
class Reference:
    """Value, gradient to `new`, and how near the batch comes to where a branch is taken."""

    loss: float
    gradient: Ragged
    distance_to_kink: float


def reference_loss(
    new: Ragged,
    old: Ragged,
    rollout: Ragged,
    mask: list[npt.NDArray[np.bool_]],
    advantage: npt.NDArray[np.float64],
    config: LossConfig,
    reference: Ragged | None = None,
) -> Reference:
    """Of a whole batch. Log-ratios must lie inside the clamp. `reference` is of LossConfig.kl."""
    trained = [i for i, m in enumerate(mask) if m.any()]
    num_tokens = sum(int(m.sum()) for m in mask)
    total, distance = 0.0, np.inf
    gradient = [np.zeros(len(m)) for m in mask]
    for i in trained:
        on = mask[i]
        n = int(on.sum())
        divisor = {
            "token_mean": num_tokens,
            "sequence_mean": len(trained) * n,
            "constant": len(trained) * config.constant_length,
        }[config.norm]
        p, o, b = new[i][on], old[i][on], rollout[i][on]
        base = b if config.objective == "bypass" else o
        w, near = _weights(o - b, config)
        values, slopes, near_too = _surrogate(p, p - base, float(advantage[i]), w, config)
        if config.kl != "none":
            assert reference is not None
            estimates, pulls, nearest = _kl(p - reference[i][on], config)
            values, slopes = values + w * estimates, slopes + w * pulls
            distance = min(distance, nearest)
        total += float(values.sum()) / divisor
        gradient[i][on] = slopes / divisor
        distance = min(distance, near, near_too)
    return Reference(total, gradient, float(distance))


def _kl(
    u: npt.NDArray[np.float64], config: LossConfig
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], float]:
    """Terms, their slopes in the log-prob, and the distance to the cap, of one trajectory."""
    if config.kl == "k2":
        return config.kl_coef * u**2 / 2, config.kl_coef * u, np.inf
    k3 = np.exp(-u) - 1 + u
    near = float(np.abs(k3 - config.kl_k3_cap).min())
    slopes = np.where(k3 > config.kl_k3_cap, 0.0, 1 - np.exp(-u))
    return config.kl_coef * np.minimum(k3, config.kl_k3_cap), config.kl_coef * slopes, near


def _weights(
    d: npt.NDArray[np.float64], config: LossConfig
) -> tuple[npt.NDArray[np.float64], float]:
    """Weights of one trajectory's tokens, and their distance to a bound."""
    if config.objective != "decoupled":
        return np.ones_like(d), np.inf
    w = np.exp(d)
    bounds: list[float] = []
    if config.correction == "icepop":
        bounds += [np.abs(w - config.band_low).min(), np.abs(w - config.band_high).min()]
        result = w * (config.band_low <= w) * (w <= config.band_high)
    elif config.correction == "tis_sequence":
        product = float(np.prod(w))
        bounds.append(abs(product - config.tis_cap))
        result = np.full_like(w, min(product, config.tis_cap))
    else:
        bounds.append(np.abs(w - config.tis_cap).min())
        result = np.minimum(w, config.tis_cap)
        if config.correction == "mis_geometric":
            mean = float(np.exp(d.mean()))
            bounds += [abs(mean - config.band_low), abs(mean - config.band_high)]
            result = result * (config.band_low <= mean <= config.band_high)
    if config.veto is not None:
        bounds.append(np.abs(w - config.veto).min() / config.veto)
        result = result * (w.min() >= config.veto)
    return result, float(min(bounds))


def _surrogate(
    p: npt.NDArray[np.float64],
    log_ratio: npt.NDArray[np.float64],
    advantage: float,
    w: npt.NDArray[np.float64],
    config: LossConfig,
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], float]:
    """Values, d(sum of values)/dp and the distance to a bound, of one trajectory's tokens."""
    if config.surrogate == "cispo":
        ratio = np.exp(log_ratio)
        used = np.minimum(ratio, config.cispo_cap)
        return -w * used * advantage * p, -w * used * advantage, abs(ratio - config.cispo_cap).min()
    if config.surrogate == "gspo":
        log_ratio = np.full_like(log_ratio, log_ratio.mean())
    ratio = np.exp(log_ratio)
    low, high = 1 - config.clip_low, 1 + config.clip_high
    bounds = [np.abs(ratio - low).min(), np.abs(ratio - high).min()]
    is_clipped = (advantage > 0) & (ratio > high) | (advantage < 0) & (ratio < low)
    values = np.where(is_clipped, -np.clip(ratio, low, high), -ratio) * advantage
    slopes = np.where(is_clipped, 0.0, -ratio * advantage)
    if config.dual_clip is not None and advantage < 0:
        bounds.append(np.abs(ratio - config.dual_clip).min())
        is_bounded = ratio > config.dual_clip
        values = np.where(is_bounded, -config.dual_clip * advantage, values)
        slopes = np.where(is_bounded, 0.0, slopes)
    values, slopes = w * values, w * slopes
    if config.surrogate == "gspo":  # every token moves the mean that all share
        slopes = np.full_like(slopes, slopes.mean())
    return values, slopes, float(min(bounds))
