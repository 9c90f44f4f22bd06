"""How far sampling goes on while the trainer computes: engine tokens against trainer time.

Owner of the definitions in `metrics/overlap.json`. Pure: the trainer's spans of each RL step
(`metrics/rl.jsonl`) and the times of durable turns come in, figures go out.

    RL wall        from the start of the first RL step to the end of the last. Time between two
                   steps of different lineages is left out: a trainer was started again.
    trainer step   of it, `logprob` and `update`: log-probs, forward, backward, optimizer.
    publish        of it, `publish`: the window pauses the engines on purpose, so it is told apart.
    outside        of it, the rest of a step: waiting for a batch, fetching it, acknowledging.
    between        of it, what lies between steps: checkpoints, evaluations on dev tasks, a guard's
                   pause. Told apart: the trainer neither computes nor waits for a batch.

A turn's sampled tokens count as spread evenly over its time in the engine, from admission to
answer (prefill and update windows included). Turns last longer than the edges of a step are
sharp, so a ratio near 1 is exact and one near 0 is somewhat too high. Every durable turn
counts, evaluations' too; turns of tries that were thrown away do not.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

STEP_PARTS = frozenset({"logprob", "update"})
PUBLISH_PART = "publish"
WAIT_PART = "wait"
_KINDS = ("step", "publish", "outside", "between")


@dataclass(frozen=True)
class DecodedTurn:
    """When a turn was in the engine, in Unix seconds, and what it sampled."""

    began_at: float
    ended_at: float
    num_tokens: int


class Timeline:
    """The RL wall, cut at the edges of the trainer's parts."""

    def __init__(self, steps: Iterable[Mapping[str, Any]]) -> None:
        """Args: rows of metrics/rl.jsonl; those without `spans` are left out."""
        measured = sorted((s for s in steps if s.get("spans")), key=lambda s: s["spans"][0][1])
        self.num_steps = len(measured)
        self.wait_s = 0.0
        self._segments: list[tuple[float, float, str]] = []
        lineage = None
        for step in measured:
            spans = step["spans"]
            if self._segments and step.get("lineage") == lineage:
                self._segments.append((self._segments[-1][1], float(spans[0][1]), "between"))
            lineage = step.get("lineage")
            for part, began, ended in spans:
                self._segments.append((float(began), float(ended), _kind(part)))
                self.wait_s += (ended - began) * (part == WAIT_PART)
        self._segments.sort()
        self._ends = [end for _, end, _ in self._segments]

    @property
    def wall_s(self) -> float:
        """Seconds of RL."""
        return sum(end - begin for begin, end, _ in self._segments)

    def seconds(self, kind: str) -> float:
        """Seconds of RL that are of one kind."""
        return sum(end - begin for begin, end, k in self._segments if k == kind)

    def covers(self, at: float) -> bool:
        """True when a moment (Unix seconds) belongs to RL."""
        index = bisect.bisect_left(self._ends, at)
        return index < len(self._segments) and self._segments[index][0] <= at

    def touches(self, began_at: float, ended_at: float) -> bool:
        """True when some of the time between two moments belongs to RL."""
        return any(True for _ in self._touching(began_at, ended_at))

    def tokens(self, turns: Iterable[DecodedTurn]) -> dict[str, float]:
        """Sampled tokens that fall into each kind of segment."""
        totals = dict.fromkeys(_KINDS, 0.0)
        for turn in turns:
            duration = turn.ended_at - turn.began_at
            for begin, end, kind in self._touching(turn.began_at, turn.ended_at):
                if duration <= 0:  # the whole turn falls on one moment
                    totals[kind] += turn.num_tokens
                    break
                shared = min(end, turn.ended_at) - max(begin, turn.began_at)
                totals[kind] += turn.num_tokens * max(shared, 0.0) / duration
        return totals

    def _touching(self, began_at: float, ended_at: float) -> Iterator[tuple[float, float, str]]:
        index = bisect.bisect_left(self._ends, began_at)
        while index < len(self._segments) and self._segments[index][0] <= ended_at:
            yield self._segments[index]
            index += 1


def _kind(part: str) -> str:
    if part in STEP_PARTS:
        return "step"
    return "publish" if part == PUBLISH_PART else "outside"


def measure(
    steps: Sequence[Mapping[str, Any]], turns: Iterable[DecodedTurn], max_staleness: int
) -> dict[str, float | None]:
    """The content of metrics/overlap.json; the terms are defined above.

    Args:
        steps: rows of metrics/rl.jsonl of the surviving lineage.
        turns: durable turns, of any time.
        max_staleness: in versions; 0 is the synchronous mode.

    A rate over no time, and a ratio to a rate of 0, are None.
    """
    timeline = Timeline(steps)
    tokens = timeline.tokens(turns)
    rates = {kind: _over(tokens[kind], timeline.seconds(kind)) for kind in _KINDS}
    wall_s = timeline.wall_s
    return {
        "max_staleness": max_staleness,
        "num_steps": timeline.num_steps,
        "wall_s": wall_s,
        "trainer_wait_s": timeline.wait_s,
        "trainer_step_s": timeline.seconds("step"),
        "publish_s": timeline.seconds("publish"),
        "outside_s": timeline.seconds("outside"),
        "between_steps_s": timeline.seconds("between"),
        "sampled_tokens_in_trainer_steps": tokens["step"],
        "sampled_tokens_in_publish": tokens["publish"],
        "sampled_tokens_outside": tokens["outside"],
        "sampled_tokens_between_steps": tokens["between"],
        "engine_tokens_per_s": _over(sum(tokens.values()), wall_s),
        "engine_tokens_per_s_in_trainer_steps": rates["step"],
        "engine_tokens_per_s_in_publish": rates["publish"],
        "engine_tokens_per_s_outside": rates["outside"],
        "ratio_in_trainer_steps_to_outside": _over(rates["step"], rates["outside"]),
    }


def _over(amount: float | None, by: float | None) -> float | None:
    return amount / by if amount is not None and by else None
