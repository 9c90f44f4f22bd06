"""pass@1 with 95 % intervals over tasks, and paired differences between two stages.

Attempts at one task are not independent, so tasks are the unit: the interval is a percentile
bootstrap over tasks (Efron & Tibshirani 1993, ch. 13). Where every task has the same mean a
bootstrap has no width; then it is Wilson's interval (1927) with the number of tasks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

_RESAMPLES = 4000
_Z95 = 1.959963984540054


@dataclass(frozen=True)
class Interval:
    """A mean in 0..1 (or a difference in -1..1) with its 95 % interval."""

    mean: float
    low: float
    high: float
    num_tasks: int

    def percent(self) -> str:
        """`27.5 % [22.0, 33.1]`"""
        return f"{100 * self.mean:.1f} % [{100 * self.low:.1f}, {100 * self.high:.1f}]"


def pass_at_1(rewards_by_task: Mapping[str, Sequence[float]], seed: int = 0) -> Interval | None:
    """Mean over tasks of the mean reward; tasks without a scored attempt are left out.

    None when no task has a scored attempt.
    """
    means = np.array(
        [float(np.mean(r)) for r in rewards_by_task.values() if len(r)], dtype=np.float64
    )
    if means.size == 0:
        return None
    mean = float(means.mean())
    if np.ptp(means) == 0.0:
        low, high = _wilson(mean, means.size)
    else:
        low, high = _bootstrap(means, seed)
    return Interval(mean, low, high, int(means.size))


def paired_difference(
    after: Mapping[str, Sequence[float]], before: Mapping[str, Sequence[float]], seed: int = 0
) -> Interval | None:
    """Mean over common tasks of (after - before). None when they have no scored task in common."""
    common = [task for task in after if len(after[task]) and len(before.get(task, ()))]
    if not common:
        return None
    gains = np.array([np.mean(after[t]) - np.mean(before[t]) for t in common], dtype=np.float64)
    low, high = _bootstrap(gains, seed)
    return Interval(float(gains.mean()), low, high, len(common))


def _bootstrap(values: np.ndarray, seed: int) -> tuple[float, float]:
    """values float64[tasks] -> 2.5 % and 97.5 % percentiles of the resampled mean."""
    random = np.random.default_rng(seed)
    picks = random.integers(0, values.size, size=(_RESAMPLES, values.size))
    low, high = np.percentile(values[picks].mean(axis=1), [2.5, 97.5])
    return float(low), float(high)


def _wilson(p: float, n: int) -> tuple[float, float]:
    centre = (p + _Z95**2 / (2 * n)) / (1 + _Z95**2 / n)
    half = _Z95 * math.sqrt(p * (1 - p) / n + _Z95**2 / (4 * n * n)) / (1 + _Z95**2 / n)
    return max(0.0, centre - half), min(1.0, centre + half)
