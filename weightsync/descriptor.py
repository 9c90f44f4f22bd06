"""What the sender tells a loader about an update, beside the bytes themselves.

Owner: WeightPublisher writes it, sglang_loader reads it. It travels as the one uint8 tensor of
an SGLang `update_weights_from_tensor` call, which carries only named tensors. Invariant: the
format is versioned, because sender and engine may run different checkouts.
"""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import asdict, dataclass, fields
from typing import Any

from weightsync.errors import PlanMismatchError
from weightsync.plan import Plan

TENSOR_NAME = "__swe_rl_weightsync__"
FORMAT = 4


def pack_plan(plan: Plan) -> str:
    """A plan as text that is short: base64 of its compressed JSON."""
    text = json.dumps(plan.to_json(), separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode(), level=1)).decode()


def unpack_plan(packed: str, digest: str) -> Plan:
    """The plan behind `pack_plan`'s text; PlanMismatchError unless its digest is `digest`."""
    try:
        return Plan.from_json(json.loads(zlib.decompress(base64.b64decode(packed))), digest)
    except (ValueError, KeyError, TypeError, zlib.error) as error:
        raise PlanMismatchError(f"the descriptor's plan cannot be read: {error!r}") from error


@dataclass(frozen=True, slots=True)
class Descriptor:
    """One update as one engine sees it."""

    epoch: int
    """The window's; a loader refuses one below the last that it saw."""
    weight_version: int
    """For messages only: the manager sets the version when the window closes."""
    endpoint: dict[str, Any]
    """How to reach the sender: what transports.open_receiver takes."""
    receiver: int
    """This engine's place among the receivers."""
    plan: str
    """What `pack_plan` made: a plan of 20,000 tensors is 1.5 MB of JSON, and an engine that is paused
    waits for every byte of it to be pickled and read back, once a tensor-parallel rank."""
    plan_digest: str
    bucket_timeout_s: float
    """Longest wait for one bucket, and for the connection."""
    verify_engine: bool
    """Buckets carry a sum of each tensor; compare them with the parameters once all is loaded."""

    def encode(self) -> bytes:
        """UTF-8 JSON."""
        return json.dumps({"format": FORMAT, **asdict(self)}, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes) -> Descriptor:
        """Reads what `encode` wrote; PlanMismatchError if it is something else."""
        try:
            values = json.loads(data)
            found = values.pop("format", None)
            if found != FORMAT:
                raise PlanMismatchError(
                    f"update descriptor has format {found}, wanted {FORMAT}: "
                    "trainer and engine run different versions of weightsync"
                )
            return cls(**{field.name: values[field.name] for field in fields(cls)})
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise PlanMismatchError(f"update descriptor cannot be read: {error!r}") from error
