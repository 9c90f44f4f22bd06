from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from proto import rollout_pb2
from proto import trajectory_pb2 as tpb
from trainer import batch, group_batch
from trainer.config import RlConfig
from trainer.testbed import VOCAB, ScriptedManager, record, with_experts

LAYOUT = batch.ExpertLayout(num_layers=2, top_k=2, num_experts=4)


def member(name: str, reward: float, version: int = 5, **changes: Any) -> Any:
    fields: dict[str, Any] = {"logprobs": [0, -1, -1], "version": version} | changes
    return record([6, 7, 8], [0, 1, 1], attempt_id=name, reward=reward, **fields)


def build(
    groups: dict[str, list],
    config: RlConfig | None = None,
    version: int = 6,
    replayed: batch.ExpertLayout | None = None,
) -> group_batch.GroupBatch:
    manager = ScriptedManager()
    manager.add_batch(groups)
    sequences = [batch.from_proto(s, VOCAB) for ss in manager.sequences.values() for s in ss]
    return group_batch.build(
        manager.replies[0].groups,
        sequences,
        config or RlConfig(),
        version,
        max_staleness=4,
        replayed=replayed,
    )


def test_advantages_follow_their_trajectories() -> None:
    got = build({"g": [member("a", 1.0), member("b", 0.0)]})
    assert [s.attempt_id for s in got.sequences] == ["a", "b"]
    assert got.advantages == pytest.approx([0.7071, -0.7071], abs=1e-4)
    assert got.trajectory == [0, 1]
    assert got.num_trained == 4
    assert got.staleness == {1: 2}
    assert got.scalars["reward_mean"] == 0.5


def test_groups_that_say_nothing_are_dropped_with_a_reason() -> None:
    got = build(
        {
            "same": [member("a", 1.0), member("b", 1.0)],
            "alone": [member("c", 1.0)],
            "stale": [member("d", 1.0, version=1), member("e", 0.0, version=1)],
        }
    )
    assert got.dropped_groups == {
        "same": "zero_variance",
        "alone": "too_few_members",
        "stale": "no_trained_tokens",
    }
    assert got.sequences == []
    assert got.scalars["num_trajectories_dropped_stale"] == 2
    assert [(t.attempt_id, t.num_tokens, t.untrained_reason) for t in got.trajectories] == [
        ("d", 0, "stale"),
        ("e", 0, "stale"),
    ]
    assert [t.num_tokens_masked_stale for t in got.trajectories] == [2, 2]


def test_a_rejected_trajectory_keeps_its_reward_in_the_statistics() -> None:
    bad = member("a", 1.0, logprobs=[0, float("nan"), -1])
    got = build({"g": [bad, member("b", 0.0), member("c", 0.0)]})
    assert [s.attempt_id for s in got.sequences] == ["b", "c"]
    assert [(t.attempt_id, t.num_tokens, t.untrained_reason) for t in got.trajectories] == [
        ("a", 0, "nonfinite_rollout_logprob"),
        ("b", 2, ""),
        ("c", 2, ""),
    ]
    assert got.advantages == pytest.approx([-0.57735, -0.57735], abs=1e-4)
    assert got.scalars["num_trajectories_rejected_nonfinite_rollout_logprob"] == 1


def test_only_tokens_beyond_max_staleness_are_masked() -> None:
    # Version 6, max_staleness 4: tokens of version 1 are masked, those of version 2 are not.
    old = member("a", 1.0, version=1)
    old.version_spans[0].end = 2
    old.version_spans.add(weight_version=2, start=2, end=3)
    got = build({"g": [old, member("b", 0.0, version=2), member("c", 0.0, version=1)]})
    assert [(s.attempt_id, s.loss_mask.tolist()) for s in got.sequences] == [
        ("a", [False, False, True]),
        ("b", [False, True, True]),
    ]
    # The reward of "c", which has no fresh token, stays in the mean that "a" and "b" are set against.
    assert got.advantages == pytest.approx([1.1547, -0.57735], abs=1e-4)
    assert got.scalars["num_tokens_masked_stale"] == 3
    assert got.scalars["num_trajectories_dropped_stale"] == 1
    assert got.scalars["reward_mean"] == pytest.approx(1 / 3)
    assert got.dropped_groups == {}


def test_branches_share_an_advantage_and_count_once() -> None:
    manager = ScriptedManager()
    main, side = member("a", 1.0), member("a", 1.0, branch_index=1)
    manager.add_batch({"g": [main, member("b", 0.0)]})
    sequences = [batch.from_proto(s, VOCAB) for s in (main, side, manager.sequences["b"][0])]
    got = group_batch.build(manager.replies[0].groups, sequences, RlConfig(), 6, 4)
    assert got.trajectory == [0, 0, 1]
    assert got.advantages[0] == got.advantages[1] == pytest.approx(0.7071, abs=1e-4)


def test_a_member_without_reward_leaves_the_group() -> None:
    group = rollout_pb2.BatchGroup(group_id="g", num_masked=1)
    for name, reward in (("a", 1.0), ("b", 0.0), ("c", None)):
        group.members.add(attempt_id=name, reward=reward, oldest_weight_version=6)
    sequences = [batch.from_proto(member(n, 0.0), VOCAB) for n in ("a", "b")]
    got = group_batch.build([group], sequences, RlConfig(), 6, 4)
    assert got.advantages == pytest.approx([0.7071, -0.7071], abs=1e-4)
    assert got.scalars["num_members_masked"] == 2


def test_overlong_trajectories_are_filtered_where_asked_and_still_compared_with() -> None:
    groups = {"g": [member("a", 1.0), member("b", 0.0), member("c", 0.0)]}
    groups["g"][1].cause = tpb.CAUSE_TOKEN_CAP
    groups["g"][2].cause = tpb.CAUSE_LOOP  # the agent's own doing
    assert build(groups).num_trained == 6
    got = build(groups, RlConfig(overlong_filtering=True))
    assert [s.attempt_id for s in got.sequences] == ["a", "c"]
    assert got.advantages == pytest.approx([1.1547, -0.57735], abs=1e-4)
    assert [t.untrained_reason for t in got.trajectories] == ["", "overlong", ""]
    assert got.scalars["num_trajectories_overlong"] == 1


def test_a_trajectory_whose_experts_cannot_be_replayed_is_rejected_and_counted() -> None:
    choice = np.broadcast_to([1, 3], (2, 2, 2))
    groups = {
        "g": [
            with_experts(member("sound", 1.0), choice),
            with_experts(member("unknown", 0.0), choice + 1),
            member("missing", 0.0),
        ]
    }
    got = build(groups, replayed=LAYOUT)
    assert [s.attempt_id for s in got.sequences] == ["sound"]
    assert got.sequences[0].experts is not None
    assert {t.attempt_id: t.untrained_reason for t in got.trajectories} == {
        "sound": "",
        "unknown": "routed_expert_unknown",
        "missing": "no_routed_experts",
    }
    assert got.scalars["num_trajectories_rejected_routed_expert_unknown"] == 1
    assert got.scalars["num_trajectories_rejected_no_routed_experts"] == 1
    # Its siblings are compared with its reward all the same.
    assert got.advantages == pytest.approx([1.1547], abs=1e-3)
    without = build(groups)
    assert len(without.sequences) == 3
    assert all(s.experts is None for s in without.sequences)


def test_rewards_that_are_no_numbers_are_as_good_as_none() -> None:
    got = build({"g": [member("a", float("nan")), member("b", 1.0), member("c", 0.0)]})
    assert [s.attempt_id for s in got.sequences] == ["b", "c"]
    assert got.scalars["num_members_masked"] == 1
    assert got.scalars["reward_mean"] == 0.5


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"logprobs": [0, 50.0, -1.0]}, "positive_rollout_logprob"),
        ({"logprobs": None}, "no_rollout_logprob"),
        ({"temperature": float("inf")}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": 1e-30}, "temperature"),
    ],
)
def test_what_no_engine_can_have_sampled_is_rejected_and_counted(
    changes: dict[str, Any], reason: str
) -> None:
    got = build({"g": [member("a", 1.0, **changes), member("b", 0.0)]})
    assert [s.attempt_id for s in got.sequences] == ["b"]
    assert got.scalars[f"num_trajectories_rejected_{reason}"] == 1
