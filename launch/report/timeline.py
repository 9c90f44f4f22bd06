"""The run over time, from samples of the manager's status. Pure.

Samples stop while no job works on the run: such a gap is cut out of the axis (a night between
a crash and its `resume` would leave nothing else to see) and marked. int64 fields of a sample
are strings, as protobuf's JSON has them.
"""

from __future__ import annotations

import bisect
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from launch.report.data import Row

_GAP_INTERVALS = 12.0
_MIN_GAP_S = 20.0


@dataclass(frozen=True)
class Cut:
    """A gap between samples: where it lies on the run's clock, and how long it was."""

    at_s: float
    length_s: float


class RunClock:
    """Unix seconds to seconds since the first sample, gaps cut out."""

    def __init__(self, status: Sequence[Row]) -> None:
        """Args: status is in the order of time. A gap lasts 20 s and 12 usual intervals."""
        times = [float(row["time_s"]) for row in status]
        steps = [b - a for a, b in itertools.pairwise(times)]
        longest = max(_MIN_GAP_S, _GAP_INTERVALS * statistics.median(steps)) if steps else 0.0
        self._begins = times[:1]
        self._offsets = [times[0] if times else 0.0]
        self.cuts: list[Cut] = []
        for before, after in itertools.pairwise(times):
            if after - before > longest:
                self._begins.append(after)
                self._offsets.append(self._offsets[-1] + after - before)
                self.cuts.append(Cut(after - self._offsets[-1], after - before))
        self.end_s = times[-1] - self._offsets[-1] if times else 0.0

    def __call__(self, unix_s: float) -> float:
        """Seconds on the run's clock; moments inside a gap fall on its cut."""
        index = self.piece(unix_s)
        at = unix_s - self._offsets[index]
        return min(at, self.cuts[index].at_s) if index < len(self.cuts) else at

    def piece(self, unix_s: float) -> int:
        """Which piece between two cuts a moment belongs to, from 0."""
        return max(bisect.bisect_right(self._begins, unix_s) - 1, 0)


@dataclass(frozen=True)
class Interval:
    """[begin_s, end_s] on the run's clock, during which something was so."""

    begin_s: float
    end_s: float
    label: str


def series(
    status: Sequence[Row], clock: RunClock, read: Callable[[Row], Mapping[str, float]]
) -> dict[str, list[tuple[float, float]]]:
    """Name -> (seconds, value); `read` gives the values of one sample."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for sample in status:
        for name, value in read(sample).items():
            lines.setdefault(name, []).append((clock(float(sample["time_s"])), float(value)))
    return lines


def intervals(
    status: Sequence[Row], clock: RunClock, read: Callable[[Row], Mapping[str, str]]
) -> dict[str, list[Interval]]:
    """Name -> intervals during which `read` named it with an equal label in each sample.

    An interval lasts from the first such sample to the first that is not one; a cut ends it.
    """
    found: dict[str, list[Interval]] = {}
    running: dict[str, tuple[float, str]] = {}
    now = before = 0.0
    piece = 0

    def close(name: str, at: float) -> None:
        begin, label = running.pop(name)
        found.setdefault(name, []).append(Interval(begin, at, label))

    for sample in status:
        at, labels = float(sample["time_s"]), read(sample)
        now, is_cut = clock(at), clock.piece(at) != piece
        for name, (_, label) in list(running.items()):
            if is_cut or labels.get(name) != label:
                close(name, before if is_cut else now)
        for name, label in labels.items():
            running.setdefault(name, (now, label))
        before, piece = now, clock.piece(at)
    for name in list(running):
        close(name, now)
    return found


def stages(status: Sequence[Row], clock: RunClock) -> list[Interval]:
    """What the job did, in order."""
    found = intervals(status, clock, lambda row: {str(row.get("stage", "")): "on"})
    named = [
        Interval(i.begin_s, i.end_s, name) for name, all_ in found.items() for i in all_ if name
    ]
    return sorted(named, key=lambda interval: interval.begin_s)


def outages(status: Sequence[Row], clock: RunClock) -> list[Interval]:
    """Breakers that were not closed, and pauses of admission, in the order of their begin."""
    found = intervals(status, clock, _outages)
    named = [
        Interval(i.begin_s, i.end_s, f"{name}: {i.label}")
        for name, all_ in found.items()
        for i in all_
    ]
    return sorted(named, key=lambda interval: interval.begin_s)


def _outages(sample: Row) -> dict[str, str]:
    out = {
        f"breaker {backend['name']}": "open"
        for backend in sample.get("backends", ())
        if backend.get("state") not in (None, "", "closed")
    }
    if sample.get("admission_held"):
        out["run paused"] = str(sample.get("admission_reason") or "no reason given")
    return out


def rates(points: Sequence[tuple[float, float]], num_bins: int = 160) -> list[tuple[float, float]]:
    """A counter's growth per second over equal bins; where it falls, its process began anew."""
    if len(points) < 2 or points[-1][0] <= points[0][0]:
        return []
    begin, end = points[0][0], points[-1][0]
    num_bins = min(num_bins, len(points) - 1)
    width = (end - begin) / num_bins
    grown = [0.0] * num_bins
    for (t0, n0), (t1, n1) in itertools.pairwise(points):
        amount = n1 - n0 if n1 >= n0 else n1
        first, last = (min(int((t - begin) / width), num_bins - 1) for t in (t0, t1))
        if first == last or t1 <= t0:
            grown[last] += amount
            continue
        for index in range(first, last + 1):  # a sample that spans bins counts in each by its share
            low, high = begin + index * width, begin + (index + 1) * width
            grown[index] += amount * (min(t1, high) - max(t0, low)) / (t1 - t0)
    return [(begin + (i + 0.5) * width, amount / width) for i, amount in enumerate(grown)]


def binned(times: Sequence[float], end_s: float, num_bins: int) -> list[int]:
    """How many moments fall into each of equal bins of [0, end_s]; later ones into the last."""
    counts = [0] * num_bins
    for at in times:
        counts[min(max(int(at / (end_s or 1.0) * num_bins), 0), num_bins - 1)] += 1
    return counts
