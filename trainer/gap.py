"""Compares recorded rollout_logprobs with the current weights' log-probs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Seq

import torch
from megatron.core import parallel_state

from trainer import batch as batching
from trainer import ranks
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
      sequences: sampled ones, with rollout_logprobs; the same on every rank, and each scores its
        share. The result is the first rank's.
      weight_version: only tokens of this version count; 0: all.
    """
    policy = learner.policy
    chosen = [
        dataclasses.replace(s, loss_mask=s.loss_mask & (s.versions == weight_version))
        if weight_version
        else s
        for s in sequences
    ]
    multiple = parallel_state.get_tensor_model_parallel_world_size()
    device = policy.device.torch_device
    micros = batching.make_micro_batches(
        chosen, token_budget, policy.vocab_size, device, multiple=multiple
    )
    if not micros:
        return Gap(0, 0.0, 0.0, {})
    micros = batching.own_share(
        micros,
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_data_parallel_world_size(),
        multiple,
        device,
    )
    scored = learner.logprobs(micros)
    own = None
    if ranks.holds_tokens():
        own = (
            torch.cat(scored).cpu(),
            torch.cat([m.rollout for m in micros]).cpu(),
            torch.cat([m.sequence for m in micros]).cpu(),
        )
    parts = [part for part in ranks.to_first(own) if part is not None]
    if not parts:
        return Gap(0, 0.0, 0.0, {})  # the first rank's to tell
    ours, theirs, owners = (torch.cat(column) for column in zip(*parts, strict=True))
    ours, theirs = ours.double(), theirs.double()
    difference = (ours - theirs).abs()
    worst = int(difference.argmax())
    owner = int(owners[worst])
    # Trained tokens of a sequence keep their order, so the count before it finds the position.
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
