"""Where the model calls of a trajectory spent their time.

Owner: rollout.manager. A turn says how long it waited and how long it was inside an engine;
only the manager knows when update windows were open, so the part that a window took is
worked out here. Clocks are Unix seconds: gateway and manager agree to within the clocks of
their hosts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from proto import rollout_pb2 as pb
from proto import trajectory_pb2 as tpb

_NUM_KEPT = 256  # windows; an attempt that spans more loses the older ones' part


class WindowLog:
    """When update windows were open, the newest `_NUM_KEPT` of them."""

    def __init__(self) -> None:
        self._spans: deque[tuple[float, float]] = deque(maxlen=_NUM_KEPT)
        self._opened_at_s: float | None = None

    def follow(self, is_open: bool, now_s: float) -> None:
        """Tells whether a window is open now; repeating it changes nothing."""
        if is_open and self._opened_at_s is None:
            self._opened_at_s = now_s
        elif not is_open and self._opened_at_s is not None:
            self._spans.append((self._opened_at_s, now_s))
            self._opened_at_s = None

    def overlap_s(self, begin_s: float, end_s: float) -> float:
        """Seconds of [begin_s, end_s] during which a window was open."""
        spans = list(self._spans)
        if self._opened_at_s is not None:
            spans.append((self._opened_at_s, end_s))
        return sum(max(0.0, min(end_s, end) - max(begin_s, begin)) for begin, end in spans)


def turn_times(turns: Iterable[tpb.TurnRecord], windows: WindowLog) -> pb.TurnTimes:
    """Sums over turns. A turn's time in engines is taken to follow its wait in one piece."""
    queued_s = generating_s = engine_queued_s = paused_s = 0.0
    for turn in turns:
        timings = turn.timings
        waited_s = timings.queued.ToNanoseconds() / 1e9
        inside_s = timings.generating.ToNanoseconds() / 1e9
        begin_s = timings.received_at.ToNanoseconds() / 1e9 + waited_s
        queued_s += waited_s
        generating_s += inside_s
        engine_queued_s += timings.engine_queued.ToNanoseconds() / 1e9
        paused_s += windows.overlap_s(begin_s, begin_s + inside_s)
    times = pb.TurnTimes()
    times.queued.FromMicroseconds(round(queued_s * 1e6))
    times.generating.FromMicroseconds(round(generating_s * 1e6))
    times.engine_queued.FromMicroseconds(round(engine_queued_s * 1e6))
    times.window_paused.FromMicroseconds(round(paused_s * 1e6))
    return times
