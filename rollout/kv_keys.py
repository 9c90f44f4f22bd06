"""Which entries of an engine's KV cache a model call may read, and how old they may be.

Owner: rollout.turn_admission. Under `flush` every update empties the caches, so that nothing older
than the engine's version is there. Under `keep` entries outlive an update, and a call is given a key:
engines share prefixes only between calls of one key.

    session starts on an engine at version 3     key v3, bound 3
    the engine takes 4, 5; the session goes on   key v3, bound 3: it reads what it wrote under 3
    another session starts there                 key v5, bound 5: it shares nothing with the first
    the first moves to an engine at version 5    key v5, bound 5: what it wrote is not there anyway

Invariant: a key vN is only ever given out for an engine that serves N or newer, and the version of a
living process never falls; so whatever lies under vN was written at N or later. A restarted engine
has an empty cache and is another place, even where its address is the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol


class KvEngine(Protocol):
    """What is read of rollout.engines' Engine."""

    @property
    def name(self) -> str: ...
    @property
    def weight_version(self) -> int: ...
    @property
    def incarnation(self) -> int: ...


@dataclass(frozen=True, slots=True)
class KvKey:
    """The entries that one call may read."""

    extra_key: str
    """Sent with the call; empty: no key."""
    version_lower_bound: int
    """No entry that the call reads was written under an older weight_version."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a session's entries lie."""

    engine: str
    incarnation: int
    first_version: int


class KvKeys:
    """Keys of all living sessions."""

    def __init__(self, policy: Literal["flush", "keep"]) -> None:
        self._policy = policy
        self._places: dict[str, _Place] = {}

    def grant(self, session: str, engine: KvEngine) -> KvKey:
        """The key of the session's next call, which runs on `engine`."""
        if self._policy == "flush":
            return KvKey("", engine.weight_version)
        place = self._places.get(session)
        if place is None or (place.engine, place.incarnation) != (engine.name, engine.incarnation):
            place = _Place(engine.name, engine.incarnation, engine.weight_version)
            self._places[session] = place
        return KvKey(f"v{place.first_version}", place.first_version)

    def end_session(self, session: str) -> None:
        """Forgets a session; its entries stay until the engine needs their room."""
        self._places.pop(session, None)
