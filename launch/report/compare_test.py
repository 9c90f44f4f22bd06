"""Two runs side by side."""

from __future__ import annotations

import json

from launch.report.compare import differing_settings, render, write_comparison
from launch.report.data import RunData, load_run


def _run(root, max_staleness: int, wait_s: float) -> None:
    metrics = root / "metrics"
    metrics.mkdir(parents=True)
    (root / "config.toml").write_text(
        f'[run]\nname = "{root.name}"\nseed = 1\n[rl]\nmax_staleness = {max_staleness}\nnum_steps = 2\n'
    )
    row = {"step": 1, "time_wait_s": wait_s, "time_update_s": 2.0, "time_step_s": wait_s + 2.0,
           "reward_mean": 0.5, "staleness_histogram": {"0": 3, str(max_staleness): 1}}  # fmt: skip
    (metrics / "rl.jsonl").write_text(json.dumps(row) + "\n")
    overlap = {
        "ratio_in_trainer_steps_to_outside": 0.75 if max_staleness else 0.0,
        "wall_s": wait_s + 2,
    }
    (metrics / "overlap.json").write_text(json.dumps(overlap))
    (metrics / "throughput.json").write_text(
        json.dumps({"ratio": 0.625, "note": "text is left out"})
    )


def test_settings_that_differ_and_no_others(tmp_path):
    for name, staleness in (("async", 2), ("sync", 0)):
        _run(tmp_path / name, staleness, 1.0)
    runs = [load_run(tmp_path / name) for name in ("async", "sync")]
    assert differing_settings(runs) == [("rl.max_staleness", "2", "0")]
    assert differing_settings([runs[0], runs[0]]) == []


def test_both_runs_are_in_one_page(tmp_path):
    _run(tmp_path / "async", 2, 1.5)
    _run(tmp_path / "sync", 0, 6.0)
    path = write_comparison([tmp_path / "async", tmp_path / "sync"])
    assert path == tmp_path / "compare-async-sync.html"
    text = path.read_text()
    for figure in ("step-breakdown", "staleness", "curve-reward-mean", "measured", "figures"):
        assert f'id="{figure}"' in text
    assert ">0.75<" in text
    assert ">0.625<" in text
    assert "text is left out" not in text
    assert text.count("config.toml of") == 2


def test_runs_without_data_and_of_one_name_can_be_compared():
    text = render([RunData("a"), RunData("a")])
    assert "swe_rl runs: a (1), a (2)" in text
    assert "<svg" not in text
