from __future__ import annotations

import json
from pathlib import Path

from trainer.metrics_log import MetricsLog, StepRecord
from trainer.step_clock import StepClock


def step(number: int, loss: float = 0.5) -> StepRecord:
    spans = [("wait", 0.25, 1.0), ("update", 1.0, 1.5)]
    return StepRecord("rl", number, number + 1, 1.5, {"loss": loss}, {0: 3, 2: 1}, spans)


def test_lines_are_flat_and_come_back(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    log.begin_stage("rl", 0)
    log.append(step(1))
    (line,) = (tmp_path / "rl.jsonl").read_text().splitlines()
    assert json.loads(line)["loss"] == 0.5
    assert StepRecord.from_json(line) == step(1)
    assert MetricsLog(tmp_path).since("rl", 1) == [step(1)]
    log.close()


def test_resuming_drops_steps_that_will_be_redone_and_a_cut_line(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    log.begin_stage("rl", 0)
    for number in (1, 2, 3):
        log.append(step(number))
    log.close()
    with (tmp_path / "rl.jsonl").open("a") as file:
        file.write('{"step": 4, "sta')
    again = MetricsLog(tmp_path)
    again.begin_stage("rl", 2)
    assert again.since("rl", 1) == [step(1), step(2)]
    again.append(step(3, loss=0.1))
    assert again.since("rl", 3) == [step(3, loss=0.1)]
    assert len((tmp_path / "rl.jsonl").read_text().splitlines()) == 3
    again.close()


def test_what_is_not_finite_is_left_out_of_json(tmp_path: Path) -> None:
    assert "loss" not in json.loads(step(1, loss=float("nan")).to_json())


def test_listeners_hear_of_each_step(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    log.begin_stage("rl", 0)
    heard: list[int] = []

    def listener() -> None:
        heard.append(len(log.since("rl", 1)))

    log.add_listener(listener)
    log.append(step(1))
    log.remove_listener(listener)
    log.append(step(2))
    assert heard == [1]
    log.close()


def test_parts_of_a_step_add_up() -> None:
    ticks = iter([10.0, 11.0, 13.0, 13.5, 20.0])
    clock = StepClock(lambda: next(ticks), wall_clock=lambda: 1000.0)
    clock.lap("wait")
    clock.lap("fetch")
    clock.lap("wait")
    got = clock.scalars()
    assert (got["time_wait_s"], got["time_fetch_s"], got["time_other_s"]) == (1.5, 2.0, 6.5)
    assert got["time_step_s"] == 10.0
    assert clock.spans == [
        ("wait", 1000.0, 1001.0),
        ("fetch", 1001.0, 1003.0),
        ("wait", 1003.0, 1003.5),
        ("other", 1003.5, 1010.0),
    ]
