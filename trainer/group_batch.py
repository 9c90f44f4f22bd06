"""From a claimed batch of groups to the sequences that are trained and their advantages. Pure.

Statistics use the reward of every valid member, also of one whose tokens cannot be trained:
masking tokens must not change what its siblings are compared with. Tokens older than
`max_staleness` updates are masked; a trajectory is dropped only if too few remain.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Container, Iterable, Mapping

import numpy as np
import numpy.typing as npt

from proto import rollout_pb2, trajectory_pb2
from trainer.advantage import group_advantages
from trainer.batch import ExpertLayout, Sequence, broken_reason, deal, mask_stale
from trainer.config import RlConfig
from trainer.diagnostics import staleness_histogram

# Ends that a cap of ours brought about, not the agent.
_CUT_SHORT = (
    trajectory_pb2.CAUSE_TURN_CAP,
    trajectory_pb2.CAUSE_TOKEN_CAP,
    trajectory_pb2.CAUSE_TIME_BUDGET,
)


@dataclasses.dataclass(frozen=True)
class Share:
    """What one rank makes of its trajectories, for the others: no tokens."""

    advantages: list[float] = dataclasses.field(default_factory=list)  # of each sequence
    trained_lengths: list[int] = dataclasses.field(default_factory=list)  # of each trajectory
    num_trajectories: int = 0  # with a trained token
    num_tokens: int = 0
    num_token_pairs: int = 0  # of tokens of one sequence; what attention costs grows with it
    num_branches: dict[str, int] = dataclasses.field(default_factory=dict)  # group_id -> trained
    counts: dict[str, int] = dataclasses.field(default_factory=dict)
    trajectories: list[bytes] = dataclasses.field(default_factory=list)  # TrainedTrajectory


@dataclasses.dataclass(frozen=True)
class GroupBatch:
    """What one RL step trains. Sequences are this rank's, the rest is the whole batch's."""

    sequences: list[Sequence]
    advantages: list[float]  # of each sequence
    trajectory: list[int]  # trajectory of each sequence: branches share one
    num_trained: int  # trained tokens, the N of the token mean
    num_trajectories: int  # with a trained token
    dropped_groups: dict[str, str]  # group_id -> reason
    scalars: dict[str, float]
    staleness: dict[int, int]
    trajectories: list[rollout_pb2.TrainedTrajectory]  # each looked at

    def left_out(self, group_ids: Iterable[str], reason: str) -> GroupBatch:
        """The same batch when nothing of it was trained after all."""
        told = []
        for trajectory in self.trajectories:
            why = trajectory.untrained_reason or reason
            told.append(
                rollout_pb2.TrainedTrajectory(
                    attempt_id=trajectory.attempt_id,
                    num_tokens_masked_stale=trajectory.num_tokens_masked_stale,
                    untrained_reason=why,
                )
            )
        dropped = dict.fromkeys(group_ids, reason) | self.dropped_groups
        return dataclasses.replace(self, dropped_groups=dropped, trajectories=told)


def own_members(
    groups: Iterable[rollout_pb2.BatchGroup], rank: int, num_ranks: int
) -> list[list[str]]:
    """attempt_ids of each group whose tokens data-parallel rank `rank` reads and trains. Pure.

    Trajectories are dealt out so that ranks get near equally many tokens.
    """
    groups = list(groups)
    members = [m for group in groups for m in group.members]
    hand = set(deal([m.num_tokens for m in members], num_ranks)[rank])
    own, place = [], 0
    for group in groups:
        own.append([m.attempt_id for i, m in enumerate(group.members, place) if i in hand])
        place += len(group.members)
    return own


def build(
    groups: Iterable[rollout_pb2.BatchGroup],
    sequences: Iterable[Sequence],
    config: RlConfig,
    weight_version: int,
    max_staleness: int,
    aged: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.int64]] = lambda versions: versions,
    unreadable: Mapping[str, str] | None = None,
    replayed: ExpertLayout | None = None,
    own: Container[str] | None = None,
    malformed: Container[str] = (),
    exchange: Callable[[Share], list[Share]] = lambda share: [share],
) -> GroupBatch:
    """Chooses what is trained.

    Args:
      groups: of the claimed batch, valid members only.
      sequences: every branch of every member that is this rank's, in any order.
      config: advantage kind, scale of negative ones, least tokens of a trajectory.
      weight_version: the trainer's.
      max_staleness: in updates.
      aged: int64[T] versions -> int64[T], counted so that one is one update: VersionSteps.aged.
      unreadable: group_id -> reason, of groups of the batch that could not be fetched.
      replayed: the model's experts, where the engines' choices are replayed: a trajectory without
        them is rejected. None: choices that were recorded are left out.
      own: attempt_ids that are this rank's; None: all.
      malformed: attempt_ids whose records break the contract; they are rejected.
      exchange: gives what every data-parallel rank made of its own.
    """
    groups = list(groups)
    by_attempt: dict[str, list[Sequence]] = collections.defaultdict(list)
    for sequence in sequences:
        by_attempt[sequence.attempt_id].append(
            dataclasses.replace(
                sequence,
                versions=aged(sequence.versions),
                experts=sequence.experts if replayed else None,
            )
        )
    counts: collections.Counter[str] = collections.Counter()
    dropped = dict(unreadable or {})
    chosen: list[Sequence] = []
    owner: list[int] = []
    share = Share()
    told_here: list[rollout_pb2.TrainedTrajectory] = []
    num_here = 0
    rewards: list[float] = []
    oldest: list[int] = []
    for group in groups:
        # A reward that is no number is as good as none.
        members = [m for m in group.members if m.HasField("reward") and math.isfinite(m.reward)]
        counts["num_groups"] += 1
        counts["num_members_masked"] += group.num_masked + len(group.members) - len(members)
        rewards += [m.reward for m in members]
        oldest += aged(np.asarray([m.oldest_weight_version for m in members], np.int64)).tolist()
        advantages = group_advantages(
            [m.reward for m in members], config.advantage, config.negative_advantage_scale
        )
        if advantages is None:
            few = len(members) < 2
            dropped[group.group_id] = "too_few_members" if few else "zero_variance"
            continue
        share.num_branches[group.group_id] = 0
        found: collections.Counter[str] = collections.Counter()
        for member, advantage in zip(members, advantages, strict=True):
            if own is not None and member.attempt_id not in own:
                continue
            if member.attempt_id in malformed:
                found["num_trajectories_rejected_malformed"] += 1
                told_here.append(
                    rollout_pb2.TrainedTrajectory(
                        attempt_id=member.attempt_id, untrained_reason="malformed"
                    )
                )
                share.trained_lengths.append(0)
                continue
            branches, told = _trainable(
                by_attempt[member.attempt_id],
                config,
                weight_version,
                max_staleness,
                replayed,
                found,
            )
            told.attempt_id = member.attempt_id
            told_here.append(told)
            chosen.extend(branches)
            share.advantages.extend([float(advantage)] * len(branches))
            owner.extend([num_here] * len(branches))
            num_here += bool(branches)
            share.num_branches[group.group_id] += len(branches)
            share.trained_lengths.append(sum(s.num_trained for s in branches))
        for name, count in found.items():
            share.counts[name] = share.counts.get(name, 0) + count
    share = dataclasses.replace(
        share,
        num_trajectories=num_here,
        num_tokens=sum(len(s.token_ids) for s in chosen),
        num_token_pairs=sum(len(s.token_ids) ** 2 for s in chosen),
        trajectories=[told.SerializeToString() for told in told_here],
    )
    shares = exchange(share)
    for group_id in share.num_branches:
        if not any(other.num_branches[group_id] for other in shares):
            dropped[group_id] = "no_trained_tokens"
    for other in shares:
        counts.update(other.counts)
    lengths = [length for other in shares for length in other.trained_lengths]
    every_advantage = [value for other in shares for value in other.advantages]
    num_trajectories = sum(other.num_trajectories for other in shares)
    scalars = {name: float(value) for name, value in counts.items()} | {
        "num_groups_dropped": float(len(dropped)),
        "num_trajectories": float(num_trajectories),
        "num_trained_tokens": float(sum(lengths)),
        "num_tokens": float(sum(other.num_tokens for other in shares)),
        "num_token_pairs": float(sum(other.num_token_pairs for other in shares)),
        "advantage_abs_mean": float(np.mean(np.abs(every_advantage))) if every_advantage else 0.0,
    }
    if rewards:
        scalars |= {"reward_mean": float(np.mean(rewards)), "reward_std": float(np.std(rewards))}
        scalars["staleness_max"] = float(weight_version - min(oldest))
        scalars["staleness_mean"] = float(np.mean([weight_version - v for v in oldest]))
    if lengths:
        scalars["trained_tokens_per_trajectory_mean"] = float(np.mean(lengths))
    return GroupBatch(
        sequences=chosen,
        advantages=share.advantages,
        trajectory=owner,
        num_trained=sum(lengths),
        num_trajectories=num_trajectories,
        dropped_groups=dropped,
        scalars=scalars,
        staleness=staleness_histogram(oldest, weight_version),
        trajectories=[
            rollout_pb2.TrainedTrajectory.FromString(told)
            for other in shares
            for told in other.trajectories
        ],
    )


def _trainable(
    branches: list[Sequence],
    config: RlConfig,
    weight_version: int,
    max_staleness: int,
    replayed: ExpertLayout | None,
    counts: collections.Counter[str],
) -> tuple[list[Sequence], rollout_pb2.TrainedTrajectory]:
    """Branches of one trajectory that are trained, stale tokens masked; counts what is not."""
    told = rollout_pb2.TrainedTrajectory()
    for sequence in branches:
        if reason := broken_reason(sequence, replayed):
            counts[f"num_trajectories_rejected_{reason}"] += 1
            told.untrained_reason = reason
            return [], told
    if config.overlong_filtering and branches and branches[0].cause in _CUT_SHORT:
        counts["num_trajectories_overlong"] += 1
        told.untrained_reason = "overlong"
        return [], told
    fresh = [mask_stale(s, weight_version, max_staleness) for s in branches]
    left = sum(s.num_trained for s in fresh)
    masked = sum(s.num_trained for s in branches) - left
    counts["num_tokens_masked_stale"] += masked
    told.num_tokens_masked_stale = masked
    if left < config.min_trained_tokens:
        counts["num_trajectories_dropped_stale" if masked else "num_trajectories_empty"] += 1
        told.untrained_reason = "stale" if masked else "empty"
        return [], told
    told.num_tokens = left
    return [s for s in fresh if s.num_trained], told
