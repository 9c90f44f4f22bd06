"""Compares recorded rollout_logprobs with the current weights' log-probs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Seq

import torch

from trainer import batch as batching
from trainer.batch import Sequence
from trainer.step import Learner


@dataclasses.dataclass(frozen=True)
class Gap:
    """|rollout_logprob - trainer_logprob| over tokens, in nats."""

    num_tokens: int
    mean_abs_nats: float
    max_abs_nats: float
    worst: dict[str, float | str]  # the worst token; empty when there is no token


def measure(
    learner: Learner, sequences: Seq[Sequence], weight_version: int, token_budget: int
) -> Gap:
    """Recomputes the log-probs of trained tokens and compares.

    Args:
      sequences: sampled ones, with rollout_logprobs.
      weight_version: only tokens of this version count; 0: all.
    """
    policy = learner.policy
    chosen = [
        dataclasses.replace(s, loss_mask=s.loss_mask & (s.versions == weight_version))
        if weight_version
        else s
        for s in sequences
    ]
    micros = batching.make_micro_batches(
        chosen, token_budget, policy.vocab_size, policy.device.torch_device
    )
    if not micros:
        return Gap(0, 0.0, 0.0, {})
    ours = torch.cat(learner.logprobs(micros)).double()
    theirs = torch.cat([m.rollout for m in micros]).double()
    difference = (ours - theirs).abs()
    worst = int(difference.argmax())
    owner = int(torch.cat([m.sequence for m in micros])[worst])
    # Trained tokens of a sequence keep their order, so the count before it finds the position.
    owners = torch.cat([m.sequence for m in micros])
    nth = int((owners[:worst] == owner).sum())
    position = int(chosen[owner].loss_mask.nonzero()[0][nth])
    return Gap(
        num_tokens=difference.numel(),
        mean_abs_nats=float(difference.mean()),
        max_abs_nats=float(difference.max()),
        worst={
            "attempt_id": chosen[owner].attempt_id,
            "position": float(position),
            "token_id": float(chosen[owner].token_ids[position]),
            "rollout_logprob": float(theirs[worst]),
            "trainer_logprob": float(ours[worst]),
        },
    )
