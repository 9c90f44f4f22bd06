"""Log-probabilities of given tokens from hidden states, in chunks, in plain torch.

The distribution is the one that the engine sampled from: softmax over (logits / temperature)
with banned ids at minus infinity. The output embedding may be split over ranks by rows (VocabShard):
two small all-reduces combine the shards. `kernels` offers the same function fused; this one is its
reference and runs anywhere. Legend: M rows, H hidden size, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint


@dataclasses.dataclass(frozen=True)
class VocabShard:
    """This rank's rows of an output embedding that the ranks of `group` share."""

    group: dist.ProcessGroup
    first: int
    """The id of this rank's first row."""


def linear_logprobs(
    hidden_MH: torch.Tensor,
    weight_VH: torch.Tensor,
    target_M: torch.Tensor,
    *,
    temperature: float = 1.0,
    banned_V: torch.Tensor | None = None,
    chunk: int = 4096,
    with_entropy: bool = True,
    shard: VocabShard | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes log pi(target) for each row, without holding logits of all rows at once.

    Args:
      hidden_MH: hidden states at the positions that predict, any float dtype; equal on the ranks of
        a shard, whose gradients of it are to be summed.
      weight_VH: output embedding; with `shard` this rank's rows.
      target_M: int64, the predicted ids.
      temperature: softmax temperature, above 0.
      banned_V: bool, True on ids that cannot be sampled; with `shard` of this rank's rows.
      chunk: rows whose logits exist at one time; they are recomputed in the backward pass when
        there is more than one chunk.
      with_entropy: False returns zeros for the entropy and saves its work.
      shard: None when weight_VH is whole.

    Returns:
      (float32[M] log-probs with gradient, float32[M] entropies in nats without).

    Raises:
      ValueError: temperature is not positive (greedy data is never trained).
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be above 0, got {temperature}: greedy is not trained")

    def one(hidden: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = (hidden @ weight_VH.t()).float()
        if temperature != 1.0:
            logits = logits / temperature
        if banned_V is not None:
            logits = logits.masked_fill(banned_V, float("-inf"))
        if shard is not None:
            return _over_shards(logits, target, shard, with_entropy)
        all_logprobs = torch.log_softmax(logits, -1)
        logprobs = all_logprobs.gather(-1, target[:, None])[:, 0]
        if not with_entropy:
            return logprobs, torch.zeros_like(logprobs, requires_grad=False)
        with torch.no_grad():
            detached = all_logprobs.detach()
            # A banned id has probability 0 and log-prob -inf; their product must be 0.
            terms = detached.exp() * detached.clamp(min=torch.finfo(torch.float32).min)
            entropy = -terms.sum(-1)
        return logprobs, entropy

    rows = hidden_MH.size(0)
    if rows <= chunk:
        return one(hidden_MH, target_M)
    parts = [
        checkpoint(one, hidden_MH[i : i + chunk], target_M[i : i + chunk], use_reentrant=False)
        for i in range(0, rows, chunk)
    ]
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


class _Sum(torch.autograd.Function):
    """Sum over ranks that all go on alike: each one's gradient of the sum is that of its term."""

    @staticmethod
    def forward(_ctx: Any, values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def _over_shards(
    logits: torch.Tensor, target: torch.Tensor, shard: VocabShard, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the whole, from this rank's columns of the logits [M, V / ranks]."""
    largest = logits.detach().max(-1).values
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=shard.group)
    shifted = logits - largest[:, None]
    column = target - shard.first
    is_here = (column >= 0) & (column < logits.size(-1))
    picked = shifted.gather(-1, torch.where(is_here, column, 0)[:, None])[:, 0]
    terms = shifted.exp()
    total, picked = _Sum.apply(  # type: ignore[no-untyped-call]
        torch.stack([terms.sum(-1), torch.where(is_here, picked, 0.0)]), shard.group
    )
    log_total = total.log()
    logprobs = picked - log_total
    if not with_entropy:
        return logprobs, torch.zeros_like(logprobs, requires_grad=False)
    with torch.no_grad():
        # A banned id has term 0 and -inf beside it; their product must be 0.
        weighted = (terms * shifted.clamp(min=torch.finfo(torch.float32).min)).sum(-1)
        dist.all_reduce(weighted, group=shard.group)
        return logprobs, log_total.detach() - weighted / total.detach()
