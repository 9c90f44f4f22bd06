"""What ended attempts, and the evidence for it. Pure.

Tries that were given up and started again count too: a run whose every second sandbox dies
looks healthy by the causes of finished attempts alone.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from launch.report.data import Row
from launch.report.trajectories import by_task

SCORED = (
    "submitted", "turn_cap", "token_cap", "time_budget", "loop", "agent_oom", "tests_hung",
    "tests_oom",
)  # fmt: skip
INFRASTRUCTURE = (
    "sandbox_failed", "engine_failed", "harness_failed", "verifier_failed", "interrupted",
)  # fmt: skip
OURS = ("cancelled", "early_stopped", "stale")
KINDS = ("scored", "infrastructure", "ours", "unclassified")
_VARYING = re.compile(r"0x[0-9a-f]+|[0-9a-f]{8,}|\d+")
_EVIDENCE_CHARS = 160


def kind_of(cause: str) -> str:
    """Who is answerable for a cause, as `rollout/group_filter.py` has it."""
    if cause in SCORED:
        return "scored"
    if cause in INFRASTRUCTURE:
        return "infrastructure"
    return "ours" if cause in OURS else "unclassified"


@dataclass(frozen=True)
class TryEnd:
    """One try that ended: an attempt's last, or one that was started again."""

    attempt_id: str
    task_id: str
    cause: str
    evidence: str
    ended_at_s: float
    is_last: bool


def try_ends(attempts: Iterable[Row]) -> list[TryEnd]:
    """Every try of finished attempts."""
    ends = []
    for attempt in attempts:
        name, task = str(attempt.get("attempt_id", "?")), str(attempt.get("task_id", "?"))
        for ended in attempt.get("earlier_tries", ()):
            ends.append(
                TryEnd(name, task, ended["cause"], ended["evidence"], ended["ended_at_s"], False)
            )
        at, evidence = float(attempt.get("finished_at_s", 0.0)), str(attempt.get("evidence", ""))
        ends.append(TryEnd(name, task, str(attempt["cause"]), evidence, at, True))
    return ends


def causes_by_task(attempts: Sequence[Row], num_tasks: int) -> dict[str, Counter[str]]:
    """Causes of tries of the tasks with most ends other than `submitted`, most first.

    Tasks whose every try was submitted are left out.
    """
    counted: dict[str, Counter[str]] = {
        task: Counter(end.cause for end in try_ends(rows))
        for task, rows in by_task(attempts).items()
    }

    def order(item: tuple[str, Counter[str]]) -> tuple[int, int, str]:
        task, causes = item
        others = causes.total() - causes["submitted"]
        failed = sum(n for cause, n in causes.items() if kind_of(cause) != "scored")
        return -failed, -others, task

    troubled = {t: c for t, c in counted.items() if c.total() > c["submitted"]}
    return dict(sorted(troubled.items(), key=order)[:num_tasks])


@dataclass(frozen=True)
class Evidence:
    """Ends whose evidence reads alike but for numbers and ids."""

    cause: str
    num: int
    num_tried_again: int
    text: str
    attempt_id: str
    """One of them, to look up in the logs and trajectories."""


def evidence(attempts: Sequence[Row], num_rows: int) -> list[Evidence]:
    """The most frequent evidence of ends that are not the policy's doing, most frequent first."""
    groups: dict[tuple[str, str], list[TryEnd]] = {}
    for end in try_ends(attempts):
        if kind_of(end.cause) != "scored":
            key = (end.cause, _VARYING.sub("#", end.evidence)[:_EVIDENCE_CHARS])
            groups.setdefault(key, []).append(end)
    rows = [
        Evidence(
            cause, len(ends), sum(not e.is_last for e in ends), ends[0].evidence, ends[0].attempt_id
        )
        for (cause, _), ends in groups.items()
    ]
    return sorted(rows, key=lambda row: (-row.num, row.cause, row.text))[:num_rows]
