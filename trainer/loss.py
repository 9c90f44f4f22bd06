"""Objectives over flat arrays of tokens, and how a batch normalises them.

All arrays are [T], aligned to the token that is predicted. Legend of the log-probs:
  new      the current policy's, with gradient
  old      the trainer's before the first optimizer step on this batch (proximal)
  rollout  the engine's, recorded when the token was sampled (behaviour)
A slot whose mask is False is replaced before any arithmetic: 0 * NaN is NaN, and junk in a
masked slot must change neither the loss nor any gradient.

PPO: arXiv 1707.06347 eq. 7. Decoupled objective: arXiv 2505.24298 section 5; the weight is
truncated, and detached. DAPO's clip-higher: arXiv 2503.14476. A new member of the family is a
function `(TokenBatch, LossConfig) -> TokenLoss` in OBJECTIVES.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from trainer.config import LossConfig


@dataclasses.dataclass(frozen=True)
class TokenBatch:
    """Tokens of a micro-batch as an objective sees them; every field is [T]."""

    new: torch.Tensor
    old: torch.Tensor
    rollout: torch.Tensor
    advantage: torch.Tensor
    mask: torch.Tensor  # bool
    weight: torch.Tensor  # what the token counts in the batch's mean; see `token_weights`
    sequence: torch.Tensor  # int64: trajectory of each token, for sequence-level objectives


@dataclasses.dataclass(frozen=True)
class TokenLoss:
    """What an objective returns: the weighted sum, and counts for diagnostics."""

    loss: torch.Tensor  # scalar with gradient; sums over micro-batches to the batch's loss
    num_clamped: int  # active tokens whose log-ratio hit the clamp


def token_weights(
    mask: torch.Tensor, sequence: torch.Tensor, norm: str, constant_length: float = 0.0
) -> torch.Tensor:
    """Weights that turn a sum over the GLOBAL batch into its mean.

    Args:
      mask: bool[T] over the whole batch, not one micro-batch: a mean of micro-batch means
        would depend on packing.
      sequence: int64[T], trajectory of each token, in 0..B-1.
      norm: see LossConfig.norm.

    Returns:
      float32[T], 0 on masked slots. All zero when nothing is trained.
    """
    counts = torch.zeros(int(sequence.max()) + 1 if sequence.numel() else 0)
    counts = counts.index_add(0, sequence, mask.float())
    num_sequences = int((counts > 0).sum())
    if num_sequences == 0:
        return torch.zeros(mask.shape)
    if norm == "token_mean":
        return mask.float() / counts.sum()
    if norm == "sequence_mean":
        return mask.float() / (num_sequences * counts.clamp(min=1)[sequence])
    if norm == "constant":
        return mask.float() / (num_sequences * constant_length)
    raise ValueError(f"unknown norm {norm!r}: want token_mean, sequence_mean or constant")


def _log_ratio(
    numerator: torch.Tensor, denominator: torch.Tensor, mask: torch.Tensor, clamp: float
) -> tuple[torch.Tensor, int]:
    """Clamped difference, 0 on masked slots, and how many slots the clamp changed."""
    difference = torch.where(mask, numerator, 0.0) - torch.where(mask, denominator, 0.0)
    num_clamped = int((difference.detach().abs() > clamp).sum())
    return difference.clamp(-clamp, clamp), num_clamped


def _ppo(log_ratio: torch.Tensor, advantage: torch.Tensor, config: LossConfig) -> torch.Tensor:
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    loss = torch.maximum(-ratio * advantage, -clipped * advantage)
    if config.dual_clip is not None:
        bound = -config.dual_clip * advantage
        loss = torch.where(advantage < 0, torch.minimum(loss, bound), loss)
    return loss


def _weighted_sum(loss: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    return (torch.where(batch.mask, loss, 0.0) * batch.weight).sum()


def decoupled(batch: TokenBatch, config: LossConfig) -> TokenLoss:
    """sum w * PPO(exp(new - old)), with w = min(exp(old - rollout), C) detached."""
    log_ratio, clamped = _log_ratio(batch.new, batch.old, batch.mask, config.log_ratio_clamp)
    log_w, clamped_w = _log_ratio(batch.old, batch.rollout, batch.mask, config.log_ratio_clamp)
    w = log_w.detach().exp().clamp(max=config.tis_cap)
    loss = w * _ppo(log_ratio, batch.advantage, config)
    return TokenLoss(_weighted_sum(loss, batch), clamped + clamped_w)


def bypass(batch: TokenBatch, config: LossConfig) -> TokenLoss:
    """sum PPO(exp(new - rollout)): the engine's policy is the proximal one; never weighted."""
    log_ratio, clamped = _log_ratio(batch.new, batch.rollout, batch.mask, config.log_ratio_clamp)
    return TokenLoss(_weighted_sum(_ppo(log_ratio, batch.advantage, config), batch), clamped)


def recompute_only(batch: TokenBatch, config: LossConfig) -> TokenLoss:
    """sum PPO(exp(new - old)), no correction; only for data of the current version."""
    log_ratio, clamped = _log_ratio(batch.new, batch.old, batch.mask, config.log_ratio_clamp)
    return TokenLoss(_weighted_sum(_ppo(log_ratio, batch.advantage, config), batch), clamped)


OBJECTIVES: dict[str, Callable[[TokenBatch, LossConfig], TokenLoss]] = {
    "decoupled": decoupled,
    "bypass": bypass,
    "recompute_only": recompute_only,
}
"""Every objective by its name in LossConfig."""


def sft_loss(new: torch.Tensor, mask: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Negative log-likelihood summed with `weight`; [T] each. Junk in masked slots is ignored."""
    return -(torch.where(mask, new, 0.0) * weight).sum()
