"""When each of the newest weight versions was first sampled with.

Owner: RolloutManager, which shows it every durable turn. Only the turn's first token counts, whose
time the engine tells: of a turn that an update came into, the time of the first newer token is
not known. So a time here is never too early, and late by what passes until a turn begins.
"""

from __future__ import annotations

from proto import rollout_pb2 as pb
from proto import trajectory_pb2 as tpb

_KEPT_VERSIONS = 16


class FirstTokens:
    """Of the newest versions."""

    def __init__(self) -> None:
        self._at_ns: dict[int, int] = {}

    def observe(self, turn: tpb.TurnRecord) -> None:
        """Takes note of a turn's first token."""
        if not turn.version_spans or not turn.timings.HasField("first_token_at"):
            return
        version = turn.version_spans[0].weight_version
        at_ns = turn.timings.first_token_at.ToNanoseconds()
        self._at_ns[version] = min(at_ns, self._at_ns.get(version, at_ns))
        for old in sorted(self._at_ns)[:-_KEPT_VERSIONS]:
            del self._at_ns[old]

    def messages(self) -> list[pb.FirstToken]:
        """By version."""
        found = []
        for version, at_ns in sorted(self._at_ns.items()):
            message = pb.FirstToken(weight_version=version)
            message.sampled_at.FromNanoseconds(at_ns)
            found.append(message)
        return found
