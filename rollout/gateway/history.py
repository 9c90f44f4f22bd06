"""The turns of one session as a tree, and where a client's messages stand in it.

Owner: Session. Pure: no I/O, no tokenizer. Invariants:
  * A turn's whole ids are its parent's whole ids, then its prompt ids, then its sampled ids.
    Nothing is ever re-tokenised or cut.
  * A client's history matches a turn when role and text of every message on the turn's chain
    are equal, the assistant's included. What follows the deepest match is new.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

ROOT = -1


class Message(NamedTuple):
    """One chat message, reduced to what is rendered."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Turn:
    """One durable turn."""

    index: int
    parent: int  # ROOT for a first turn
    new_messages: tuple[Message, ...]
    answer: Message
    prompt_ids: array[int]  # between the parent's last id and the first sampled one
    sampled_ids: array[int]
    cut: bool  # a cap on tokens ended it
    total_length: int  # of the whole chain, this turn included


class PlanKind(StrEnum):
    """How a request stands to the turns before it."""

    EXTEND = "extend"  # follows the newest turn (or is the first)
    BRANCH = "branch"  # leaves the history at an earlier turn, or at the root
    RESEND = "resend"  # asks again what a turn that nothing follows was sampled for


@dataclass(frozen=True, slots=True)
class Plan:
    """What to render: `new_messages` after `parent`."""

    kind: PlanKind
    parent: int
    new_messages: tuple[Message, ...]
    resent: int | None = None  # the newest turn with the same parent and messages


class History:
    """Every durable turn of a session, in the order of turn_index."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self._children: dict[int, list[int]] = {}

    def add(
        self,
        parent: int,
        new_messages: Sequence[Message],
        answer: Message,
        prompt_ids: array[int],
        sampled_ids: array[int],
        *,
        cut: bool,
    ) -> Turn:
        """Appends a turn that is durable already."""
        turn = Turn(
            index=len(self.turns),
            parent=parent,
            new_messages=tuple(new_messages),
            answer=answer,
            prompt_ids=prompt_ids,
            sampled_ids=sampled_ids,
            cut=cut,
            total_length=self.length(parent) + len(prompt_ids) + len(sampled_ids),
        )
        self.turns.append(turn)
        self._children.setdefault(parent, []).append(turn.index)
        return turn

    def length(self, index: int) -> int:
        """Number of ids of a turn's whole chain; 0 for ROOT."""
        return 0 if index == ROOT else self.turns[index].total_length

    def ids(self, index: int) -> list[int]:
        """All ids of a turn's chain; none for ROOT."""
        chain: list[Turn] = []
        while index != ROOT:
            chain.append(self.turns[index])
            index = self.turns[index].parent
        result: list[int] = []
        for turn in reversed(chain):
            result += turn.prompt_ids
            result += turn.sampled_ids
        return result

    def plan(self, messages: Sequence[Message]) -> Plan:
        """Finds the deepest turn whose chain the messages repeat; the newest one if several.

        Raises ValueError when nothing new follows, because the last message is the
        assistant's or there is none.
        """
        if not messages or messages[-1].role == "assistant":
            raise ValueError("the last message must be the user's or a tool's")
        parent, consumed = self._deepest_match(messages)
        new = tuple(messages[consumed:])
        resent = next(
            (
                i
                for i in reversed(self._children.get(parent, []))
                if self.turns[i].new_messages == new
            ),
            None,
        )
        if resent is not None and resent not in self._children:
            return Plan(PlanKind.RESEND, parent, new, resent)
        kind = PlanKind.EXTEND if parent == len(self.turns) - 1 else PlanKind.BRANCH
        return Plan(kind, parent, new, resent)

    def _deepest_match(self, messages: Sequence[Message]) -> tuple[int, int]:
        best = (0, ROOT)
        open_ends = [(0, ROOT)]
        while open_ends:
            consumed, parent = open_ends.pop()
            best = max(best, (consumed, parent))
            for index in self._children.get(parent, []):
                turn = self.turns[index]
                end = consumed + len(turn.new_messages)
                if (
                    end < len(messages)
                    and messages[end] == turn.answer
                    and tuple(messages[consumed:end]) == turn.new_messages
                ):
                    open_ends.append((end + 1, index))
        consumed, parent = best
        return parent, consumed
