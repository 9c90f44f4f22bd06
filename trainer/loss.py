"""The policy's loss over flat arrays of tokens, and how a batch normalises it.

    policy_loss = sum over tokens of  weight * correction * (surrogate + kl_coef * kl)

Four choices of LossConfig make a member of the family:
  objective   whose log-probs the ratio is taken to: the trainer's before the step, corrected for the
              engine's (decoupled) or not (recompute_only), or the engine's own (bypass)
  surrogate   what is made of ratio and advantage: ppo, gspo or cispo
  correction  the detached weight of a token that the engine sampled under another policy
  kl          how far the policy is from a reference: not at all (none), k2 or k3. The estimators
              speak of tokens that the policy samples, so the correction weighs them too; published
              trainers leave that out

All arrays are [T], aligned to the token that is predicted. Legend of the log-probs:
  new      the current policy's, with gradient
  old      the trainer's before the first optimizer step on this batch (proximal)
  rollout  the engine's, recorded when the token was sampled (behaviour)
  reference  those of the policy that the KL term is to
A slot whose mask is False is replaced before any arithmetic: 0 * NaN is NaN, and junk in a
masked slot must change neither the loss nor any gradient. What a correction rejects stays in the
divisor of the mean.

Sources: PPO arXiv 1707.06347 eq. 7; decoupled objective 2505.24298 section 5, with the weight
truncated and detached; clip-higher 2503.14476; GSPO 2507.18071 eq. 5-7; CISPO 2506.13585 eq. 4-5;
IcePop 2510.18855; KL estimators and their gradients 2512.21852.
"""

from __future__ import annotations

import dataclasses

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
    sequence: torch.Tensor  # int64: trajectory of each token, all of whose tokens are here where
    # LossConfig.needs_whole_trajectories
    reference: torch.Tensor | None = None  # needed by LossConfig.kl


@dataclasses.dataclass(frozen=True)
class TokenLoss:
    """What an objective returns: the weighted sum, and counts for diagnostics."""

    loss: torch.Tensor  # scalar with gradient; sums over micro-batches to the batch's loss
    num_clamped: int  # active tokens whose log-ratio hit the clamp
    num_rejected: int = 0  # active tokens whose correction is 0
    kl: float = 0.0  # what the KL term adds to `loss`


def token_weights(
    mask: torch.Tensor,
    sequence: torch.Tensor,
    norm: str,
    constant_length: float = 0.0,
    elsewhere: tuple[int, int] = (0, 0),
) -> torch.Tensor:
    """Weights that turn a sum over the GLOBAL batch into its mean.

    Args:
      mask: bool[T] over the whole batch, not one micro-batch: a mean of micro-batch means
        would depend on packing.
      sequence: int64[T], trajectory of each token, in 0..B-1.
      norm: see LossConfig.norm.
      elsewhere: trained (tokens, trajectories) of the batch that other ranks hold.

    Returns:
      float32[T], 0 on masked slots. All zero when nothing is trained.
    """
    counts = torch.zeros(int(sequence.max()) + 1 if sequence.numel() else 0)
    counts = counts.index_add(0, sequence, mask.float())
    num_sequences = int((counts > 0).sum()) + elsewhere[1]
    if num_sequences == 0:
        return torch.zeros(mask.shape)
    if norm == "token_mean":
        return mask.float() / (counts.sum() + elsewhere[0])
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


def policy_loss(batch: TokenBatch, config: LossConfig) -> TokenLoss:
    """The weighted sum of the batch's tokens, by the choices of `config`."""
    base = batch.rollout if config.objective == "bypass" else batch.old
    log_ratio, num_clamped = _log_ratio(batch.new, base, batch.mask, config.log_ratio_clamp)
    loss = _surrogate(log_ratio, batch, config)
    w, num_rejected = torch.ones_like(loss), 0
    if config.objective == "decoupled":
        w, num_clamped_w = _correction(batch, config)
        num_clamped += num_clamped_w
        num_rejected = int(((w == 0) & batch.mask).sum())
    total = (torch.where(batch.mask, w * loss, 0.0) * batch.weight).sum()
    if not config.needs_reference:
        return TokenLoss(total, num_clamped, num_rejected)
    estimate, num_clamped_kl = _kl(batch, config)
    kl = config.kl_coef * (torch.where(batch.mask, w * estimate, 0.0) * batch.weight).sum()
    return TokenLoss(total + kl, num_clamped + num_clamped_kl, num_rejected, float(kl.detach()))


def _kl(batch: TokenBatch, config: LossConfig) -> tuple[torch.Tensor, int]:
    """Estimates [T] of the KL to the reference, with gradient, and how many were clamped."""
    if batch.reference is None:
        raise ValueError(f"loss.kl is {config.kl!r}: the batch needs log-probs of the reference")
    u, num_clamped = _log_ratio(batch.new, batch.reference, batch.mask, config.log_ratio_clamp)
    if config.kl == "k2":
        return u.square() / 2, num_clamped
    k3 = torch.expm1(-u) + u
    return k3.clamp(max=config.kl_k3_cap), num_clamped


def _surrogate(log_ratio: torch.Tensor, batch: TokenBatch, config: LossConfig) -> torch.Tensor:
    """float[T], with gradient."""
    if config.surrogate == "cispo":
        # The ratio only weighs the log-prob, so that no token loses its gradient to a clip.
        ratio = log_ratio.detach().exp().clamp(max=config.cispo_cap)
        return -ratio * batch.advantage * torch.where(batch.mask, batch.new, 0.0)
    if config.surrogate == "gspo":
        log_ratio = _mean_over_trajectory(log_ratio, batch)
    return _ppo(log_ratio, batch.advantage, config)


def _ppo(log_ratio: torch.Tensor, advantage: torch.Tensor, config: LossConfig) -> torch.Tensor:
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    loss = torch.maximum(-ratio * advantage, -clipped * advantage)
    if config.dual_clip is not None:
        bound = -config.dual_clip * advantage
        loss = torch.where(advantage < 0, torch.minimum(loss, bound), loss)
    return loss


def _correction(batch: TokenBatch, config: LossConfig) -> tuple[torch.Tensor, int]:
    """Detached weights [T] for tokens of another policy, and how many log-ratios were clamped."""
    clamp = config.log_ratio_clamp
    log_w, num_clamped = _log_ratio(batch.old, batch.rollout, batch.mask, clamp)
    log_w = log_w.detach()
    token = log_w.exp()
    match config.correction:
        case "tis_token":
            w = token.clamp(max=config.tis_cap)
        case "tis_sequence":
            total = _sum_over_trajectory(log_w, batch).clamp(-clamp, clamp)
            w = total.exp().clamp(max=config.tis_cap)
        case "icepop":
            w = torch.where((token >= config.band_low) & (token <= config.band_high), token, 0.0)
        case "mis_geometric":
            mean = _mean_over_trajectory(log_w, batch).exp()
            kept = (mean >= config.band_low) & (mean <= config.band_high)
            w = torch.where(kept, token.clamp(max=config.tis_cap), 0.0)
    if config.veto is not None:
        vetoed = _sum_over_trajectory(((token < config.veto) & batch.mask).float(), batch) > 0
        w = torch.where(vetoed, 0.0, w)
    return w, num_clamped


def _sum_over_trajectory(values: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """[T]: for each token the sum over the active tokens of its trajectory."""
    size = int(batch.sequence.max()) + 1 if batch.sequence.numel() else 0
    active = torch.where(batch.mask, values, 0.0)
    return active.new_zeros(size).index_add(0, batch.sequence, active)[batch.sequence]


def _mean_over_trajectory(values: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    count = _sum_over_trajectory(torch.ones_like(values), batch)
    return _sum_over_trajectory(values, batch) / count.clamp(min=1)


def sft_loss(new: torch.Tensor, mask: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Negative log-likelihood summed with `weight`; [T] each. Junk in masked slots is ignored."""
    return -(torch.where(mask, new, 0.0) * weight).sum()
