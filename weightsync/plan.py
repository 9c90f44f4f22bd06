"""Which tensor lies where in which bucket: pure arithmetic that sender and receiver share.

Purpose: cut a list of named tensors into buckets of bounded size. Owner: WeightPublisher makes
a plan, and the loader in each engine rebuilds it from its JSON and checks the digest.

Invariants: order is kept; a tensor lies whole in one bucket, so that a receiver loads it from
where it lies (a tensor larger than bucket_bytes is refused, never cut); each starts at a
multiple of ALIGNMENT; equal inputs give equal plans. Parts of one fused parameter may lie in
different buckets.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from weightsync.errors import PlanMismatchError

ALIGNMENT = 64
"""Bytes; a cache line, and more than any element type wants."""

MAX_VERSION = 2**63 - 1
"""Largest version of weights: the protocols' int64."""

SUM_BYTES = 8
"""Bytes of a tensor's XXH64, which follows its bucket's tensors if engines are to be verified."""

DTYPE_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "int64": 8,
    "int32": 4,
    "uint8": 1,
}
"""Element types that can be sent, by torch's name without the prefix."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor's Hugging Face name, shape and element type."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class PlannedBucket:
    """Tensors [first, first + len(offsets)) of the plan and where each starts, in bytes."""

    first: int
    offsets: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Every tensor of one update, and the buckets that carry them."""

    tensors: tuple[TensorSpec, ...]
    buckets: tuple[PlannedBucket, ...]
    bucket_bytes: int

    @property
    def total_bytes(self) -> int:
        """Bytes of the tensors, gaps not counted."""
        return sum(tensor.num_bytes for tensor in self.tensors)

    @property
    def largest_bucket(self) -> int:
        """Bytes of the largest bucket."""
        return max(bucket.num_bytes for bucket in self.buckets)

    def sums_offset(self, index: int) -> int:
        """Where the sums of bucket `index` begin, if it carries them: 8 bytes a tensor, in order."""
        return -(-self.buckets[index].num_bytes // ALIGNMENT) * ALIGNMENT

    def bucket_size(self, index: int, with_sums: bool) -> int:
        """Bytes of bucket `index` as it is sent."""
        bucket = self.buckets[index]
        if not with_sums:
            return bucket.num_bytes
        return self.sums_offset(index) + SUM_BYTES * len(bucket.offsets)

    def largest_size(self, with_sums: bool) -> int:
        """Bytes of the largest bucket as it is sent."""
        return max(self.bucket_size(index, with_sums) for index in range(len(self.buckets)))

    @property
    def digest(self) -> str:
        """Hex SHA-256 over names, shapes and dtypes in order; bucket_bytes has no part in it."""
        rows = [[t.name, list(t.shape), t.dtype] for t in self.tensors]
        return hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()

    def label(self, index: int) -> str:
        """Names bucket `index` for people: its first tensor and how many follow."""
        bucket = self.buckets[index]
        more = len(bucket.offsets) - 1
        return self.tensors[bucket.first].name + (f" and {more} more" if more else "")

    def to_json(self) -> dict[str, Any]:
        """What a receiver needs to rebuild the plan."""
        return {
            "bucket_bytes": self.bucket_bytes,
            "tensors": [[t.name, list(t.shape), t.dtype] for t in self.tensors],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any], digest: str) -> Plan:
        """Rebuilds a plan; PlanMismatchError unless its digest is `digest`."""
        specs = [TensorSpec(name, tuple(shape), dtype) for name, shape, dtype in data["tensors"]]
        plan = make_plan(specs, data["bucket_bytes"])
        if plan.digest != digest:
            raise PlanMismatchError(
                f"plan of {len(specs)} tensors has digest {plan.digest}, wanted {digest}: "
                "the descriptor was changed on its way"
            )
        return plan


def make_plan(tensors: Iterable[TensorSpec], bucket_bytes: int) -> Plan:
    """Fills buckets of at most `bucket_bytes` in order, each as far as whole tensors fit.

    Raises ValueError for no tensors, a name given twice, an empty tensor, an unknown dtype or
    a tensor that is larger than a bucket.
    """
    specs = tuple(tensors)
    _check(specs, bucket_bytes)
    buckets: list[PlannedBucket] = []
    first, offsets, end = 0, [0], specs[0].num_bytes
    for index, spec in enumerate(specs[1:], start=1):
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        if offset + spec.num_bytes > bucket_bytes:
            buckets.append(PlannedBucket(first, tuple(offsets), end))
            first, offsets, offset = index, [], 0
        offsets.append(offset)
        end = offset + spec.num_bytes
    buckets.append(PlannedBucket(first, tuple(offsets), end))
    return Plan(specs, tuple(buckets), bucket_bytes)


def _check(specs: Sequence[TensorSpec], bucket_bytes: int) -> None:
    if not specs:
        raise ValueError("a plan needs tensors, got none")
    seen: set[str] = set()
    for spec in specs:
        if spec.name in seen:
            raise ValueError(f"tensor {spec.name} is listed twice")
        seen.add(spec.name)
        if spec.dtype not in DTYPE_BYTES:
            raise ValueError(
                f"tensor {spec.name} has dtype {spec.dtype}, wanted one of {sorted(DTYPE_BYTES)}"
            )
        if spec.num_bytes == 0:
            raise ValueError(f"tensor {spec.name} of shape {spec.shape} is empty")
        if spec.num_bytes > bucket_bytes:
            raise ValueError(
                f"tensor {spec.name} has {spec.num_bytes} bytes and a bucket {bucket_bytes}: "
                "raise bucket_bytes (trainer.weight_sync.bucket_bytes) to the largest tensor's"
            )
