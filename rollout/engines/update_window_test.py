"""Update windows over fake engines that fail on command.

These tests prove what becomes of each engine under faults, and which calls are made. That the
calls have the wanted effect on SGLang is proved by engine_update_test.py.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import pytest

from rollout.engines.update_window import OpenedWindow, TransferResult, UpdateWindows
from rollout.errors import BadRequestError, FencedError, UnavailableError

DIGEST = "ab" * 32
OK_CALLS = [
    "/pause_generation",
    "/begin_weight_update",
    "/end_weight_update",
    "/flush_cache",
    "/update_weight_version",
    "/continue_generation",
]


@dataclass
class Window:
    epoch: int
    weight_version: int
    phase: str
    engines: dict[str, str]


class MemoryStore:
    """Keeps what the ledger would."""

    def __init__(self) -> None:
        self.saved: list[Window] = []

    def save_window(self, epoch, weight_version, phase, engines):
        self.saved.append(Window(epoch, weight_version, phase, engines))

    def load_open_window(self):
        return self.saved[-1] if self.saved and self.saved[-1].phase != "closed" else None

    def next_window_epoch(self):
        return max((w.epoch for w in self.saved), default=0) + 1


def ok(name: str) -> TransferResult:
    return TransferResult(name, complete=True, touched=True)


async def open_window(windows: UpdateWindows, version: int) -> OpenedWindow:
    return await windows.open(version, DIGEST, 10, 1000)


@pytest.fixture
async def rig(make_fleet):
    fleet = await make_fleet()
    store = MemoryStore()
    return fleet, store, UpdateWindows(fleet.pool, store, fleet.config, time.monotonic)


async def publish(windows: UpdateWindows, version: int):
    opened = await open_window(windows, version)
    return await windows.close(opened.epoch, version, [ok(t.engine) for t in opened.targets])


async def test_a_window_waits_for_engines_commits_and_is_saved_phase_by_phase(rig):
    fleet, store, windows = rig
    opened = await open_window(windows, 5)  # right after start: engines are still starting
    assert windows.phase == "buckets"
    assert [(t.engine, t.weight_version) for t in opened.targets] == [
        ("engine0", 0),
        ("engine1", 0),
    ]
    assert {e.state for e in fleet.pool.engines.values()} == {"updating"}
    closed = await windows.close(opened.epoch, 5, [ok("engine0"), ok("engine1")])
    assert closed.engines_serving == ("engine0", "engine1")
    assert closed.paused_s > 0
    assert windows.phase == ""
    assert [w.phase for w in store.saved] == ["pause", "begin", "buckets", "commit", "closed"]
    for name, engine in fleet.pool.engines.items():
        state = await fleet.state(name)
        assert state["calls"] == OK_CALLS
        assert state["pause_mode"] == "retract"
        assert (state["weight_version"], state["is_paused"]) == ("5", False)
        assert (engine.state, engine.weight_version) == ("serving", 5)


async def test_under_keep_engines_freeze_and_nothing_is_flushed(make_fleet):
    fleet = await make_fleet(kv_policy="keep")
    windows = UpdateWindows(fleet.pool, MemoryStore(), fleet.config, time.monotonic)
    await publish(windows, 1)
    for name in fleet.pool.engines:
        state = await fleet.state(name)
        assert state["calls"] == [call for call in OK_CALLS if call != "/flush_cache"]
        assert state["pause_mode"] == "in_place"


async def test_close_is_idempotent_and_other_epochs_are_fenced(rig):
    _fleet, _store, windows = rig
    closed = await publish(windows, 1)
    assert await windows.close(closed.epoch, 1, []) is closed
    with pytest.raises(FencedError, match="update window 99 is not open"):
        await windows.close(99, 1, [])
    opened = await open_window(windows, 2)
    with pytest.raises(FencedError):
        await windows.close(opened.epoch + 1, 2, [])
    with pytest.raises(BadRequestError, match="is for weight_version 2"):
        await windows.close(opened.epoch, 3, [])


async def test_an_engine_that_no_bucket_reached_keeps_its_version(rig):
    fleet, _store, windows = rig
    await publish(windows, 1)
    opened = await open_window(windows, 2)
    closed = await windows.close(
        opened.epoch, 2, [ok("engine0"), TransferResult("engine1", False, False, "no shm")]
    )
    assert closed.engines_serving == ("engine0",)
    assert closed.engines_restarting == ()
    versions = {n: (e.state, e.weight_version) for n, e in fleet.pool.engines.items()}
    assert versions == {"engine0": ("serving", 2), "engine1": ("serving", 1)}
    state = await fleet.state("engine1")
    assert (state["is_paused"], state["in_update"], state["weight_version"]) == (False, False, "1")


@pytest.mark.parametrize(
    "results",
    [[TransferResult("engine1", False, True, "bucket 3 was late")], []],
    ids=["touched", "no_result"],
)
async def test_an_engine_with_half_an_update_is_restarted_and_then_stale(rig, results):
    fleet, _store, windows = rig
    await publish(windows, 1)
    opened = await open_window(windows, 2)
    closed = await windows.close(opened.epoch, 2, [ok("engine0"), *results])
    assert (closed.engines_serving, closed.engines_restarting) == (("engine0",), ("engine1",))
    assert fleet.pool.engines["engine1"].state == "starting"
    await fleet.wait_for("stale", "engine1")
    assert "weights are incomplete" in fleet.pool.engines["engine1"].detail
    await publish(windows, 3)
    assert {e.weight_version for e in fleet.pool.engines.values()} == {3}


@pytest.mark.parametrize("action", ["error", "hang", "die"])
@pytest.mark.parametrize("path", OK_CALLS)
async def test_a_fault_at_any_call_leaves_the_other_engine_updated(make_fleet, path, action):
    # The other engine must be able to answer in time on a busy machine.
    fleet = await make_fleet(control_timeout_s=3.0 if action == "hang" else 20.0)
    windows = UpdateWindows(fleet.pool, MemoryStore(), fleet.config, time.monotonic)
    await publish(windows, 1)
    await fleet.fail("engine1", path, action)
    opened = await open_window(windows, 2)
    closed = await windows.close(opened.epoch, 2, [ok(t.engine) for t in opened.targets])
    assert "engine0" in closed.engines_serving
    assert "engine1" not in closed.engines_serving
    engine = fleet.pool.engines["engine1"]
    is_early = path in ("/pause_generation", "/begin_weight_update")
    if is_early and action != "die":
        assert (engine.state, engine.weight_version) == ("serving", 1)
        assert not (await fleet.state("engine1"))["is_paused"]
    else:
        await fleet.wait_for("stale", "engine1")
        assert (engine.weight_version, engine.num_restarts) == (0, 1)


async def test_an_engine_that_dies_during_the_transfer_is_not_committed(rig):
    fleet, _store, windows = rig
    await publish(windows, 1)
    opened = await open_window(windows, 2)
    await fleet.fail("engine1", "/flush_cache", "die")
    with pytest.raises(Exception, match="flush_cache"):
        await fleet.pool.client("engine1").flush_cache()
    await fleet.wait_for("stale", "engine1")
    closed = await windows.close(opened.epoch, 2, [ok("engine0"), ok("engine1")])
    assert (closed.engines_serving, closed.engines_restarting) == (("engine0",), ("engine1",))
    assert fleet.pool.engines["engine1"].weight_version == 0


async def test_a_newer_window_ends_one_whose_sender_is_gone(rig):
    fleet, _store, windows = rig
    await publish(windows, 1)
    first = await open_window(windows, 2)
    # Both engines may hold half an update: they restart, and the new window waits for them.
    second = await open_window(windows, 3)
    assert second.epoch > first.epoch
    # The late sender learns that nobody took its weights, whatever it says.
    late = await windows.close(first.epoch, 2, [ok("engine0"), ok("engine1")])
    assert (late.engines_serving, late.engines_restarting) == ((), ("engine0", "engine1"))
    closed = await windows.close(second.epoch, 3, [ok(t.engine) for t in second.targets])
    assert closed.engines_serving
    assert {e.num_restarts for e in fleet.pool.engines.values()} == {1}


async def test_a_silent_sender_is_given_up(make_fleet):
    fleet = await make_fleet(num_engines=1, window_timeout_s=0.2)
    windows = UpdateWindows(fleet.pool, MemoryStore(), fleet.config, time.monotonic)
    opened = await open_window(windows, 1)
    await fleet.wait(lambda: windows.phase == "")
    await fleet.wait_for("stale")
    assert "engines.window_timeout_s" in fleet.pool.engines["engine0"].detail
    closed = await windows.close(opened.epoch, 1, [ok("engine0")])
    assert closed.engines_serving == ()


async def test_no_engine_that_can_begin_is_unavailable(make_fleet):
    fleet = await make_fleet(num_engines=1, max_restarts=0)
    windows = UpdateWindows(fleet.pool, MemoryStore(), fleet.config, time.monotonic)
    await fleet.wait_for("stale")
    await fleet.fail("engine0", "/begin_weight_update", "error")
    with pytest.raises(UnavailableError, match="no engine could begin"):
        await open_window(windows, 1)
    assert windows.phase == ""
    assert fleet.pool.engines["engine0"].state == "stale"


async def test_an_impossible_plan_is_refused(rig):
    _fleet, _store, windows = rig
    with pytest.raises(BadRequestError, match="SHA-256"):
        await windows.open(1, "short", 1, 1)


async def test_a_window_found_open_at_start_is_marked_closed(rig):
    fleet, store, _windows = rig
    store.save_window(4, 9, "buckets", {"engine0": "begun"})
    windows = UpdateWindows(fleet.pool, store, fleet.config, time.monotonic)
    assert store.saved[-1] == Window(4, 9, "closed", {})
    opened = await open_window(windows, 10)
    assert opened.epoch == 5
    await asyncio.sleep(0)
