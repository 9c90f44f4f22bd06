"""Messages of an attempt as an ATIF document (Harbor's trajectory format), for people and tools.

Owner: the attempt's runner. These files are never trained on: the token store is.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from harbor.models.trajectories import Agent, FinalMetrics, Step, Trajectory

from rollout.harness.attempt_record import AttemptRecord

_SOURCES = {"system": "system", "user": "user", "assistant": "agent"}


def to_atif(
    record: AttemptRecord, model_name: str, version: str, outcome: dict[str, Any]
) -> Trajectory | None:
    """The attempt as ATIF, or None when there is no message. `outcome` goes to its extra."""
    steps: list[Step] = []
    for message in record.messages:
        source = _SOURCES.get(message["role"])
        if source is None or (source == "system" and not message["content"]):
            continue
        agent_only: dict[str, Any] = {"llm_call_count": 1} if source == "agent" else {}
        steps.append(
            Step(
                step_id=len(steps) + 1,
                source=source,
                message=message["content"],
                extra=_plain(message.get("extra")),
                **agent_only,
            )
        )
    if not steps:
        return None
    return Trajectory(
        session_id=record.attempt_id,
        trajectory_id=f"{record.attempt_id}-{record.epoch}",
        agent=Agent(name=record.agent, version=version, model_name=model_name),
        steps=steps,
        final_metrics=FinalMetrics(total_steps=len(steps)),
        extra={"task_id": record.task_id, **outcome},
    )


def _plain(extra: dict[str, Any] | None) -> dict[str, Any] | None:
    kept = {k: v for k, v in (extra or {}).items() if k not in ("cost", "traceback")}
    return kept or None


def write_atif(folder: Path, attempt_id: str, trajectory: Trajectory) -> Path:
    """Writes ATTEMPT_ID.json below folder, atomically. Returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{attempt_id}.json"
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(trajectory.to_json_dict(), ensure_ascii=False), "utf-8")
    os.replace(temporary, path)
    return path
