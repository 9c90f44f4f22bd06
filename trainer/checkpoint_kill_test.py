"""kill -9 at random instants of a save: what was saved before is there, whole, and goes on."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

from trainer import testbed
from trainer.checkpoint import CheckpointStore

_NUM_KILLS = 20
_START_S = 120.0


def _lines_until(process: subprocess.Popen[str], wanted: str) -> list[str]:
    assert process.stdout is not None
    deadline = time.monotonic() + _START_S
    lines: list[str] = []
    while time.monotonic() < deadline:
        line = process.stdout.readline()
        assert line, f"the saving process ended by itself: {process.wait()}"
        lines.append(line.strip())
        if line.startswith(wanted):
            return lines
    raise AssertionError(f"no {wanted!r} in {_START_S} s")


def _steps(lines: list[str], word: str) -> list[int]:
    return [int(line.split()[1]) for line in lines if line.startswith(word + " ")]


def test_a_kill_in_a_save_costs_at_most_that_save(tmp_path: Path) -> None:
    model = testbed.write_model(tmp_path / "model")
    folder = tmp_path / "checkpoints"
    rng = random.Random(11)
    num_cut = saved = 0
    save_s = 0.1
    for kill in range(_NUM_KILLS):
        mode = ("asynchronous", "synchronous")[kill % 2]
        process = subprocess.Popen(
            [sys.executable, "-P", "-W", "ignore", "-m", "trainer.save_loop", model, folder, mode],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            _lines_until(process, "saving")
            begun_s = time.monotonic()
            before = _lines_until(process, "saved")
            save_s = time.monotonic() - begun_s
            lines = _lines_until(process, "saving")
            time.sleep(rng.random() * save_s)
        finally:
            process.kill()
        assert process.stdout is not None
        lines += [line.strip() for line in process.stdout]
        process.wait()
        num_cut += not any(line.startswith("saved") for line in lines)
        begun = max(_steps(lines, "saving"))
        # At least the save before the one that was cut; the cut one too, if it was done but not told.
        least = max(_steps([*before, *lines], "saved"))
        latest = CheckpointStore(folder, kept=2).latest()
        assert latest is not None
        assert least <= latest.progress.stage_step <= begun
        assert latest.progress.stage_step > saved
        saved = latest.progress.stage_step
    assert num_cut >= _NUM_KILLS // 4, "too few kills came within a save"
