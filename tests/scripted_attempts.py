"""What every attempt of causes_test does, which of its tries fail how, and what must come of it.

Pure. An attempt is known by (group number, member). Its first tries end by its failures, one
each; the try after the last one ends by the policy's own doing. Tries that the manager makes
again for free do not count: the failure of a try is found by the retries that were spent.
"""

from __future__ import annotations

import random
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

GROUP_SIZE = 5
NUM_GROUPS = 13
NUM_ATTEMPTS = GROUP_SIZE * NUM_GROUPS
DOOMED_GROUP = 7
"""Each of its members fails one time more than it may."""
MAX_RETRIES = 3
MAX_TURNS = 6
LOOP_LIMIT = 3
TURN_TOKENS = 160
"""Bytes of an answer; the tokenizer has one id a byte."""

FIX = "sed -i s/-/+/ calc.py"
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
EAT = "python3 -S -c 'x = [bytes(1 << 20) + bytes([i % 256]) for i in range(900)]'"
EAT_AT_IMPORT = "echo 'X = [bytes(1 << 20) + bytes([i % 256]) for i in range(900)]' >> calc.py"

TEST_SH = textwrap.dedent("""\
    #!/bin/sh
    if grep -q hang calc.py; then sleep 60; fi
    if grep -q half calc.py; then echo 0.5 > /logs/verifier/reward.txt; exit 0; fi
    out=$(python3 -S -B -E /tests/check.py)
    [ "$out" = "5 8" ] && r=1 || r=0
    echo $r > /logs/verifier/reward.txt
""")
"""The reward of every task: 1 when calc.py is fixed, 0.5 with the word `half`, else 0."""


class Failure(StrEnum):
    """Where a try is made to fail, and with which cause it must then end."""

    START = "sandbox_failed in setup"
    AGENT = "sandbox_failed in mid-agent"
    VERIFY = "sandbox_failed in verify"
    ENGINE = "engine_failed"
    HARNESS = "harness_failed"
    VERIFIER = "verifier_failed"
    FENCED = "interrupted"

    @property
    def cause(self) -> str:
        """Name of the cause, in lower case."""
        return self.value.partition(" ")[0]


@dataclass(frozen=True)
class Play:
    """What the policy does when nothing fails."""

    cause: str
    reward: float
    answers: tuple[str, ...]
    """Answers by turn; the last is repeated."""
    cut: bool = False
    """The last answer runs into the cap on one turn."""
    dies_at: int | None = None
    """The sandbox dies when the command of this turn begins."""


PLAYS = {
    "solves": Play("submitted", 1.0, (FIX, SUBMIT)),
    "fails": Play("submitted", 0.0, ("cat calc.py", SUBMIT)),
    "half": Play("submitted", 0.5, ("echo '# half' >> calc.py", SUBMIT)),
    "turn_cap": Play("turn_cap", 1.0, (FIX, "ls", "pwd", "ls", "pwd", "ls", "pwd")),
    "token_cap": Play("token_cap", 0.0, ("ls", "x" * TURN_TOKENS), cut=True),
    "token_cap_solved": Play("token_cap", 1.0, (FIX, "x" * TURN_TOKENS), cut=True),
    "loop": Play("loop", 0.0, ("ls",)),
    "time_budget": Play("time_budget", 1.0, (FIX, "sleep 300", SUBMIT)),
    "agent_oom": Play("agent_oom", 0.0, (FIX, EAT, "true"), dies_at=2),
    "tests_hung": Play("tests_hung", 0.0, (f"{FIX}; echo '# hang' >> calc.py", SUBMIT)),
    "tests_oom": Play("tests_oom", 0.0, (f"{FIX}; {EAT_AT_IMPORT}", SUBMIT)),
}
_SLOW = ("time_budget", "tests_hung")
_COMMON = ("solves", "fails", "solves", "half", "fails", "solves")


@dataclass(frozen=True)
class Script:
    """One attempt."""

    play: Play
    failures: tuple[Failure, ...] = ()

    @property
    def causes(self) -> list[str]:
        """Causes of the tries that count, the last one the attempt's own."""
        failed = [f.cause for f in self.failures[: MAX_RETRIES + 1]]
        return failed if len(failed) > MAX_RETRIES else [*failed, self.play.cause]

    @property
    def reward(self) -> float | None:
        """The attempt's reward; None when its retries are spent."""
        return None if len(self.failures) > MAX_RETRIES else self.play.reward


EXTRA = Script(PLAYS["fails"])
"""Of groups beyond the script, which start when one of its own is dropped before the last began."""


@dataclass
class Outcome:
    """What must come of a group."""

    rewards: list[float] = field(default_factory=list)

    @property
    def drop_reason(self) -> str:
        """Empty: it is ready."""
        if len(self.rewards) < 2:
            return "too_few_valid_members"
        return "zero_variance" if len(set(self.rewards)) == 1 else ""


def write_scripts(seed: int) -> dict[tuple[int, int], Script]:
    """A script for each (group number from 1, member); each kind of failure hits a fifth of them."""
    chooser = random.Random(seed)
    members = [(g + 1, m) for g in range(NUM_GROUPS) for m in range(GROUP_SIZE)]
    failures: dict[tuple[int, int], list[Failure]] = {member: [] for member in members}
    kinds = list(Failure)
    for index in range(GROUP_SIZE):
        doomed = [kinds[(index + k) % len(kinds)] for k in range(MAX_RETRIES + 1)]
        failures[DOOMED_GROUP, index] = doomed
    others = [member for member in members if member[0] != DOOMED_GROUP]
    for kind in kinds:
        used = sum(kind in given for given in failures.values())
        for member in chooser.sample(others, NUM_ATTEMPTS // 5 - used):
            failures[member].append(kind)
    plays = _plays(len(others))
    chooser.shuffle(plays)
    by_member = dict(zip(others, plays, strict=True))
    for given in failures.values():
        chooser.shuffle(given)
    return {
        member: Script(PLAYS[by_member.get(member, "solves")], tuple(failures[member]))
        for member in members
    }


def _plays(count: int) -> list[str]:
    """Every play at least twice, the slow ones no more than that."""
    rare = [name for name in PLAYS if name not in _COMMON]
    names = rare * 2 + [name for name in rare if name not in _SLOW]
    return names + [_COMMON[i % len(_COMMON)] for i in range(count - len(names))]


def outcome(scripts: dict[tuple[int, int], Script], group: int) -> Outcome:
    """What must come of a group of the script."""
    rewards = [scripts[group, member].reward for member in range(GROUP_SIZE)]
    return Outcome([reward for reward in rewards if reward is not None])


def parse(attempt_id: str) -> tuple[int, int]:
    """`g000012-03` -> (12, 3)"""
    group, _, member = attempt_id.removeprefix("g").partition("-")
    return int(group), int(member)


def failure_of(script: Script, num_retries: int) -> Failure | None:
    """How the try after `num_retries` spent ones is made to fail."""
    failures: Sequence[Failure] = script.failures
    return failures[num_retries] if num_retries < len(failures) else None
