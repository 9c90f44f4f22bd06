"""From a claimed batch of groups to the sequences that are trained and their advantages. Pure.

Statistics use the reward of every valid member, also of one whose tokens cannot be trained:
masking tokens must not change what its siblings are compared with. Tokens older than
`max_staleness` updates are masked; a trajectory is dropped only if too few remain.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import numpy.typing as npt

from proto import rollout_pb2, trajectory_pb2
from trainer.advantage import group_advantages
from trainer.batch import ExpertLayout, Sequence, broken_reason, mask_stale
from trainer.config import RlConfig
from trainer.diagnostics import staleness_histogram

# Ends that a cap of ours brought about, not the agent.
_CUT_SHORT = (
    trajectory_pb2.CAUSE_TURN_CAP,
    trajectory_pb2.CAUSE_TOKEN_CAP,
    trajectory_pb2.CAUSE_TIME_BUDGET,
)


@dataclasses.dataclass(frozen=True)
class GroupBatch:
    """What one RL step trains."""

    sequences: list[Sequence]
    advantages: list[float]  # of each sequence
    trajectory: list[int]  # trajectory of each sequence: branches share one
    dropped_groups: dict[str, str]  # group_id -> reason
    scalars: dict[str, float]
    staleness: dict[int, int]
    trajectories: list[rollout_pb2.TrainedTrajectory]  # each looked at

    @property
    def num_trained(self) -> int:
        """Trained tokens, the N of the token mean."""
        return sum(s.num_trained for s in self.sequences)

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


def build(
    groups: Iterable[rollout_pb2.BatchGroup],
    sequences: Iterable[Sequence],
    config: RlConfig,
    weight_version: int,
    max_staleness: int,
    aged: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.int64]] = lambda versions: versions,
    unreadable: Mapping[str, str] | None = None,
    replayed: ExpertLayout | None = None,
) -> GroupBatch:
    """Chooses what is trained.

    Args:
      groups: of the claimed batch, valid members only.
      sequences: every branch of every member, in any order.
      config: advantage kind, scale of negative ones, least tokens of a trajectory.
      weight_version: the trainer's.
      max_staleness: in updates.
      aged: int64[T] versions -> int64[T], counted so that one is one update: VersionSteps.aged.
      unreadable: group_id -> reason, of groups of the batch that could not be fetched.
      replayed: the model's experts, where the engines' choices are replayed: a trajectory without
        them is rejected. None: choices that were recorded are left out.
    """
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
    batch = GroupBatch([], [], [], dict(unreadable or {}), {}, {}, [])
    rewards: list[float] = []
    trained_lengths: list[int] = []
    oldest: list[int] = []
    num_trajectories = 0
    for group in groups:
        members = [m for m in group.members if m.HasField("reward")]
        counts["num_groups"] += 1
        counts["num_members_masked"] += group.num_masked + len(group.members) - len(members)
        rewards += [m.reward for m in members]
        oldest += aged(np.asarray([m.oldest_weight_version for m in members], np.int64)).tolist()
        advantages = group_advantages(
            [m.reward for m in members], config.advantage, config.negative_advantage_scale
        )
        if advantages is None:
            few = len(members) < 2
            batch.dropped_groups[group.group_id] = "too_few_members" if few else "zero_variance"
            continue
        added = 0
        for member, advantage in zip(members, advantages, strict=True):
            branches, told = _trainable(
                by_attempt[member.attempt_id],
                config,
                weight_version,
                max_staleness,
                replayed,
                counts,
            )
            told.attempt_id = member.attempt_id
            batch.trajectories.append(told)
            batch.sequences.extend(branches)
            batch.advantages.extend([float(advantage)] * len(branches))
            batch.trajectory.extend([num_trajectories] * len(branches))
            num_trajectories += bool(branches)
            added += len(branches)
            trained_lengths.append(sum(s.num_trained for s in branches))
        if not added:
            batch.dropped_groups[group.group_id] = "no_trained_tokens"
    scalars = {name: float(value) for name, value in counts.items()} | {
        "num_groups_dropped": float(len(batch.dropped_groups)),
        "num_trajectories": float(num_trajectories),
        "num_trained_tokens": float(batch.num_trained),
        "num_tokens": float(sum(len(s.token_ids) for s in batch.sequences)),
        "advantage_abs_mean": float(np.mean(np.abs(batch.advantages))) if batch.sequences else 0.0,
    }
    if rewards:
        scalars |= {"reward_mean": float(np.mean(rewards)), "reward_std": float(np.std(rewards))}
        scalars["staleness_max"] = float(weight_version - min(oldest))
        scalars["staleness_mean"] = float(np.mean([weight_version - v for v in oldest]))
    if trained_lengths:
        scalars["trained_tokens_per_trajectory_mean"] = float(np.mean(trained_lengths))
    return dataclasses.replace(
        batch, scalars=scalars, staleness=staleness_histogram(oldest, weight_version)
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
