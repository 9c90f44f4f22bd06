"""Log-probabilities of given tokens from hidden states, in chunks, in plain torch.

The distribution is the one that the engine sampled from: softmax over (logits / temperature)
with banned ids at minus infinity. `kernels` offers the same function fused; this one is its
reference and runs anywhere. Legend: M rows, H hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint


def linear_logprobs(
    hidden_MH: torch.Tensor,
    weight_VH: torch.Tensor,
    target_M: torch.Tensor,
    *,
    temperature: float = 1.0,
    banned_V: torch.Tensor | None = None,
    chunk: int = 4096,
    with_entropy: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes log pi(target) for each row, without holding logits of all rows at once.

    Args:
      hidden_MH: hidden states at the positions that predict, any float dtype.
      weight_VH: output embedding.
      target_M: int64, the predicted ids.
      temperature: softmax temperature, above 0.
      banned_V: bool, True on ids that cannot be sampled.
      chunk: rows whose logits exist at one time; they are recomputed in the backward pass when
        there is more than one chunk.
      with_entropy: False returns zeros for the entropy and saves its work.

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
