"""Choices of experts that a turn is recorded with: what to ask an engine for, and how to read it.

Pure. Choices of one turn may come from several engine calls, each of which goes on where those
before ended; one that an aborted call did not give is asked for again.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass

import numpy as np

from proto import trajectory_pb2 as tpb
from rollout.experts import bytes_per_token, first_routed, id_type, num_routed


@dataclass(frozen=True, slots=True)
class Routing:
    """Which choices an engine is to return: those at tokens from `start` on."""

    layout: tpb.ExpertLayout
    start: int


@dataclass(frozen=True, slots=True)
class TurnRouting:
    """What one turn is to be recorded with; `layout` None: nothing."""

    layout: tpb.ExpertLayout | None
    history_length: int

    def next_call(self, experts: bytes) -> Routing | None:
        """What to ask for after calls that gave `experts`."""
        if self.layout is None:
            return None
        known = len(experts) // bytes_per_token(self.layout)
        return Routing(self.layout, first_routed(self.history_length) + known)

    def is_whole(self, experts: bytes, total_length: int) -> bool:
        """Whether `experts` are all of a turn that ends at `total_length`."""
        wanted = num_routed(self.history_length, total_length)
        return self.layout is None or len(experts) == wanted * bytes_per_token(self.layout)


def read_experts(encoded: str | None, routing: Routing, num_tokens: int) -> bytes:
    """SGLang's `routed_experts` (base64 of int32) as RoutedExperts.ids.

    Args:
      encoded: choices at the tokens from routing.start to the last but one.
      num_tokens: of the prompt and the answer.

    Raises ValueError when they are missing, or are no choices at those tokens.
    """
    layout = routing.layout
    shape = (num_tokens - 1 - routing.start, layout.num_layers, layout.top_k)
    try:
        ids = np.frombuffer(base64.b64decode(encoded or "", validate=True), "<i4")
    except (binascii.Error, ValueError, TypeError) as error:
        raise ValueError(f"experts that cannot be read: {error}") from error
    if ids.size != shape[0] * shape[1] * shape[2]:
        raise ValueError(
            f"{ids.size} experts, want {shape} of them: is it started with "
            "--enable-return-routed-experts, and does it serve this model?"
        )
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= layout.num_experts):
        raise ValueError(
            f"experts from {ids.min()} to {ids.max()}, want them below {layout.num_experts}"
        )
    return ids.astype(id_type(layout)).tobytes()
