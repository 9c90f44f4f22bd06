"""Times of turns, with windows at hand-set moments."""

from __future__ import annotations

import pytest

from proto import trajectory_pb2 as tpb
from rollout.turn_times import WindowLog, turn_times


def turn(
    received_s: float, queued_s: float, generating_s: float, engine_s: float
) -> tpb.TurnRecord:
    record = tpb.TurnRecord()
    record.timings.received_at.FromMilliseconds(round(received_s * 1e3))
    record.timings.queued.FromMilliseconds(round(queued_s * 1e3))
    record.timings.generating.FromMilliseconds(round(generating_s * 1e3))
    record.timings.engine_queued.FromMilliseconds(round(engine_s * 1e3))
    return record


def test_a_window_counts_where_a_turn_was_inside_an_engine() -> None:
    windows = WindowLog()
    for is_open, now_s in ((True, 12.0), (True, 12.5), (False, 14.0), (False, 15.0), (True, 20.0)):
        windows.follow(is_open, now_s)
    # In engines over [11, 13] and [19, 21]: one second of the closed window, one of the open one.
    times = turn_times([turn(10.0, 1.0, 2.0, 0.25), turn(18.5, 0.5, 2.0, 0.5)], windows)
    seconds = [
        part.ToNanoseconds() / 1e9
        for part in (times.queued, times.generating, times.engine_queued, times.window_paused)
    ]
    assert seconds == pytest.approx([1.5, 4.0, 0.75, 2.0])


def test_no_turn_and_no_window_is_no_time() -> None:
    assert not turn_times([], WindowLog()).generating.ToNanoseconds()
    assert not turn_times([turn(1.0, 0.0, 5.0, 0.0)], WindowLog()).window_paused.ToNanoseconds()
