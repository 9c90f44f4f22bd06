"""What one running attempt has done so far: the facts that its cause and report are made of.

Owner: the attempt's runner makes it; environment, agent and verifier write to it from the
worker's loop; the agent's thread writes its messages and end before it returns.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from rollout.harness.causes import AgentEnd, Evidence, Verdict


class Phase(StrEnum):
    """What the sandbox is being used for; every exec is counted under one."""

    SETUP = "setup"
    AGENT = "agent"
    VERIFIER = "verifier"
    CONTROL = "control"
    """Grading the task's own solution beside a rerun."""


@dataclass
class AttemptRecord:
    """Mutable facts of one attempt. Times are seconds of wall clock."""

    attempt_id: str
    epoch: int
    task_id: str
    agent: str
    session_key: str
    max_turns: int = 0
    """0: no limit known."""
    time_budget_s: float | None = None

    phase: Phase = Phase.SETUP
    num_execs: Counter[Phase] = field(default_factory=Counter)
    num_model_calls: int = 0
    environment_s: float = 0.0
    grading_environment_s: float = 0.0
    """Part of environment_s: the sandboxes for grading."""
    model_s: float = 0.0
    decode_s: float = 0.0
    tool_s: float = 0.0
    agent_s: float = 0.0
    verifier_s: float = 0.0
    agent_end: AgentEnd | None = None
    notes: list[str] = field(default_factory=list)
    """The evidence in words, in the order in which it came."""
    failed_phase: str = ""
    sandbox_died: bool = False
    backend_away: bool = False
    agent_oom: bool = False
    abandoned: bool = False
    verdict: Verdict | None = None
    reward: float | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Adds to the evidence in words; nothing for an empty text."""
        if text:
            self.notes.append(text)

    def spent_s(self) -> float:
        """What counts against the time budget: decoding and tool time."""
        return self.decode_s + self.tool_s

    def evidence(self, exception_type: str | None) -> Evidence:
        """A snapshot for `causes.classify`."""
        return Evidence(
            agent_end=self.agent_end,
            exception_type=exception_type,
            detail="; ".join(self.notes),
            abandoned=self.abandoned,
            failed_phase=self.failed_phase,
            sandbox_died=self.sandbox_died,
            backend_away=self.backend_away,
            agent_oom=self.agent_oom,
            verdict=self.verdict,
            reward=self.reward,
            agent_wall_s=self.agent_s,
            model_s=self.model_s,
            decode_s=self.decode_s,
            tool_s=self.tool_s,
        )
