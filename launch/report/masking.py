"""What became of finished attempts, by outcome and by length: whom masking and dropping leave out.

Pure. If long or failed work is trained less often than short or solved work, the policy is
taught by a biased sample. A trajectory has one fate; of a trained one, the tokens older than
`max_staleness` have a fate of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from launch.report.data import Row
from launch.report.failures import kind_of

TRAINED, STALE, PENDING = "trained", "masked as stale", "not consumed yet"
OVERLONG = "filtered as overlong"
ZERO_VARIANCE, TOO_FEW = "zero variance", "too few valid"
FATES = (
    TRAINED,
    PENDING,
    ZERO_VARIANCE,
    TOO_FEW,
    STALE,
    OVERLONG,
    "rejected or empty",
    "infrastructure",
    "ours",
    "unclassified",
)
_DROPPED = {
    "zero_variance": ZERO_VARIANCE,
    "too_few_valid_members": TOO_FEW,
    "too_few_members": TOO_FEW,
}
OUTCOMES = ("solved", "partly", "failed", "no reward")
_NUM_LENGTHS = 5


def trained_share(attempts: Iterable[Row]) -> float | None:
    """Of attempts whose fate is known; None when there are none."""
    fates = Counter(fate(attempt) for attempt in attempts)
    known = fates.total() - fates[PENDING]
    return fates[TRAINED] / known if known else None


def fate(attempt: Row) -> str:
    """One of FATES."""
    kind = kind_of(str(attempt["cause"]))
    if kind != "scored" or attempt.get("reward") is None:
        return kind if kind != "scored" else "rejected or empty"
    if attempt.get("group_state") == "dropped" and attempt.get("group_reason") in _DROPPED:
        return _DROPPED[attempt["group_reason"]]
    reason = attempt.get("untrained_reason")
    if reason:
        return {"stale": STALE, "overlong": OVERLONG}.get(reason, "rejected or empty")
    if attempt.get("group_state") == "dropped":
        return "rejected or empty"
    if not attempt.get("num_trainable_tokens", 1):
        return "rejected or empty"
    return TRAINED if attempt.get("consumed_at_version") else PENDING


def outcome(attempt: Row) -> str:
    """One of OUTCOMES."""
    reward = attempt.get("reward")
    if reward is None:
        return "no reward"
    return "solved" if reward >= 1 else "partly" if reward > 0 else "failed"


def tokens_by_fate(attempt: Row) -> dict[str, int]:
    """Sampled tokens that a loss could have covered, by what became of them."""
    trainable, what = int(attempt.get("num_trainable_tokens") or 0), fate(attempt)
    if what != TRAINED or attempt.get("num_tokens_trained") is None:
        return {what: trainable}
    stale = int(attempt.get("num_tokens_masked_stale") or 0)
    stale = min(stale, trainable)
    return {TRAINED: trainable - stale} | ({STALE: stale} if stale else {})


@dataclass(frozen=True)
class FateRow:
    """Trajectories and tokens of one bucket, by fate."""

    bucket: str
    trajectories: dict[str, int]
    tokens: dict[str, int]

    @property
    def num(self) -> int:
        """Trajectories in the bucket."""
        return sum(self.trajectories.values())


def by_outcome(attempts: Sequence[Row]) -> list[FateRow]:
    """One row an outcome that occurs, in the order of OUTCOMES."""
    rows = _rows(attempts, outcome)
    return [rows[name] for name in OUTCOMES if name in rows]


def by_length(attempts: Sequence[Row]) -> list[FateRow]:
    """Five buckets of equally many trajectories by `num_tokens`, fewer where lengths repeat."""
    lengths = np.array([int(a.get("num_tokens") or 0) for a in attempts])
    if not lengths.size:
        return []
    inner = np.quantile(lengths, np.arange(1, _NUM_LENGTHS) / _NUM_LENGTHS, method="inverted_cdf")
    edges = np.unique(inner)
    buckets = np.searchsorted(edges, lengths, side="left")
    names = {}
    for bucket in np.unique(buckets):
        inside = lengths[buckets == bucket]
        low, high = int(inside.min()), int(inside.max())
        names[int(bucket)] = f"{low:,}" if low == high else f"{low:,} to {high:,}"
    name_of = {id(a): names[int(b)] for a, b in zip(attempts, buckets, strict=True)}
    rows = _rows(attempts, lambda attempt: name_of[id(attempt)])
    return [rows[name] for name in names.values()]


def _rows(attempts: Sequence[Row], bucket_of: Callable[[Row], str]) -> dict[str, FateRow]:
    rows: dict[str, FateRow] = {}
    for attempt in attempts:
        bucket = bucket_of(attempt)
        row = rows.setdefault(bucket, FateRow(bucket, {}, {}))
        what = fate(attempt)
        row.trajectories[what] = row.trajectories.get(what, 0) + 1
        for name, num in tokens_by_fate(attempt).items():
            row.tokens[name] = row.tokens.get(name, 0) + num
    return rows


@dataclass(frozen=True)
class Bias:
    """The mean of something over scored trajectories, and over those that were trained."""

    scored: float
    trained: float


def bias(attempts: Sequence[Row], field: str) -> Bias | None:
    """Of `reward` or `num_tokens`. Not consumed ones are left out; None when nothing was trained."""
    decided = [a for a in attempts if a.get("reward") is not None and fate(a) != PENDING]
    trained = [a for a in decided if fate(a) == TRAINED]
    if not trained:
        return None
    return Bias(
        float(np.mean([float(a[field]) for a in decided])),
        float(np.mean([float(a[field]) for a in trained])),
    )
