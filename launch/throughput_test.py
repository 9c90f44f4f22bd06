"""Which trajectories the engines sample again, and which count as RL's."""

from __future__ import annotations

from launch.overlap import Timeline
from launch.throughput import chosen, valid_in_rl
from proto import rollout_pb2, trajectory_pb2

TIMELINE = Timeline([{"step": 1, "spans": [["wait", 100.0, 200.0]]}])


def attempt(
    group: int,
    member: int,
    finished_at: float = 150.0,
    reward: float | None = 0.0,
    trained: int = 5,
) -> rollout_pb2.AttemptSummary:
    ref = trajectory_pb2.TrajectoryRef(
        attempt_id=f"g{group}-{member}",
        group_id=f"g{group}",
        num_trained_tokens=trained,
        reward=reward,
    )
    ref.finished_at.FromMicroseconds(int(finished_at * 1e6))
    return rollout_pb2.AttemptSummary(ref=ref)


def test_only_scored_attempts_with_tokens_that_finished_during_rl_count() -> None:
    attempts = [
        attempt(1, 0),
        attempt(1, 1, reward=1.0),
        attempt(1, 2, reward=None),
        attempt(1, 3, trained=0),
        attempt(1, 4, finished_at=99.0),
        attempt(1, 5, finished_at=201.0),
    ]
    assert [a.ref.attempt_id for a in valid_in_rl(attempts, TIMELINE)] == ["g1-0", "g1-1"]


def test_whole_groups_are_taken_from_all_over_the_stage() -> None:
    valid = [attempt(group, member) for group in range(8) for member in range(2)]
    assert chosen(valid, 8) == [f"g{g}-{m}" for g in (0, 2, 4, 6) for m in range(2)]
    assert chosen(valid, 1) == ["g0-0", "g0-1"]
    assert chosen(valid, 99) == [a.ref.attempt_id for a in valid]
    evaluated = attempt(9, 0)
    evaluated.ref.group_id = ""
    assert chosen([*valid, evaluated], 99) == chosen(valid, 99)
    assert chosen([], 8) == chosen([evaluated], 8) == []
