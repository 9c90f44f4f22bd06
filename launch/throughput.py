"""RL's rate of trajectories beside the rate of the engines alone, in the same run.

Owner of `metrics/throughput.json`. When RL is over and the counts of every side are taken, whole
groups of its finished valid trajectories, evenly spaced over the stage, are sampled again by
`rollout.generate_only`: the same engines, the same numbers of prompt and sampled ids, as many
trajectories at a time as the harness has slots, and nothing else on the machine but idle services.

    rl_trajectories_per_s             valid attempts that finished within the RL wall
                                      (launch/overlap.py), over that wall; evaluations during RL
                                      are in both
    generate_only_trajectories_per_s  sampled tokens/s of the replay over the mean sampled
                                      tokens of the trajectories replayed
    ratio                             the first over the second: what remains of the engines'
                                      own rate in the whole loop, trainer included
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from launch.overlap import Timeline
from launch.programs import run_program
from launch.run_directory import RunDirectory, write_json
from proto import rollout_pb2

_PROGRAM_SLACK_S = 60.0
"""Start of the program and the end of the calls in flight, beyond its own time limit."""


def valid_in_rl(
    attempts: Sequence[rollout_pb2.AttemptSummary], timeline: Timeline
) -> list[rollout_pb2.AttemptSummary]:
    """Attempts with a reward and sampled tokens to train that finished within the RL wall."""
    return [
        a
        for a in attempts
        if a.ref.HasField("reward")
        and a.ref.num_trained_tokens
        and timeline.covers(a.ref.finished_at.ToNanoseconds() / 1e9)
    ]


def chosen(valid: Sequence[rollout_pb2.AttemptSummary], num_trajectories: int) -> list[str]:
    """Ids of about `num_trajectories` attempts: whole groups, evenly spaced over the stage.
    Evaluations' attempts are in no group and left out.
    """
    groups: dict[str, list[str]] = {}
    valid = [attempt for attempt in valid if attempt.ref.group_id]
    for attempt in valid:
        groups.setdefault(attempt.ref.group_id, []).append(attempt.ref.attempt_id)
    members = list(groups.values())
    if not members:
        return []
    num_groups = max(1, min(len(members), round(num_trajectories * len(members) / len(valid))))
    picked = [members[i * len(members) // num_groups] for i in range(num_groups)]
    return [attempt_id for group in picked for attempt_id in group]


async def measure(
    run: RunDirectory,
    manager_address: str,
    attempts: Sequence[rollout_pb2.AttemptSummary],
    timeline: Timeline,
    *,
    num_trajectories: int,
    concurrency: int,
    time_limit_s: float,
) -> None:
    """Writes metrics/throughput.json; without a replay when `num_trajectories` is 0.

    Raises JobFailed when the replay failed; RL's own rate is then written all the same.
    """
    valid = valid_in_rl(attempts, timeline)
    wall_s = timeline.wall_s
    result: dict[str, Any] = {
        "rl_num_trajectories": len(valid),
        "rl_wall_s": wall_s,
        "rl_trajectories_per_s": len(valid) / wall_s if wall_s else None,
    }
    path = run.metrics / "throughput.json"
    write_json(path, result)
    ids = chosen(valid, num_trajectories) if num_trajectories else []
    if not ids:
        return
    config = run.processes / "generate_only.json"
    write_json(
        config,
        {
            "manager_address": manager_address,
            "attempt_ids": ids,
            "concurrency": concurrency,
            "time_limit_s": time_limit_s,
        },
    )
    text = await run_program(
        "rollout.generate_only",
        "--config",
        config,
        log=run.logs / "generate_only.log",
        timeout_s=time_limit_s + _PROGRAM_SLACK_S,
    )
    replay = json.loads(text)
    rate = replay["trajectories_per_s"]
    result |= {
        "generate_only_trajectories_per_s": rate,
        "generate_only": replay,
        "concurrency": concurrency,
        "ratio": result["rl_trajectories_per_s"] / rate,
    }
    write_json(path, result)
