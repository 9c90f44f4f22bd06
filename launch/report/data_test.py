"""The report of a small invented run says what the run's files say."""

from __future__ import annotations

import json

import pytest

from launch.report.data import load_run
from launch.report.page import write_report
from launch.report.sections import glance


def _evaluation(stage: str, rewards: dict[str, list[float]], causes: list[str]) -> dict:
    return {
        "stage": stage,
        "temperature": 1.0,
        "agent": "mini",
        "weight_version": 3,
        "tasks": [
            {"task_id": t, "rewards": r, "causes": causes, "attempt_ids": []}
            for t, r in rewards.items()
        ],
    }


@pytest.fixture(name="run")
def run_fixture(tmp_path):
    """A run directory with two evaluations, three RL steps (one of them twice), two attempts."""
    metrics = tmp_path / "metrics"
    metrics.mkdir()
    (tmp_path / "config.toml").write_text("[rl]\nnum_steps = 3\n")
    (tmp_path / "state.json").write_text(
        json.dumps({"stages": [{"name": "rl", "duration_s": 9.5}], "resumed_at_steps": [2]})
    )
    evaluations = {
        "sft-t1": _evaluation("sft", {"a": [0, 0], "b": [1, 0]}, ["submitted", "turn_cap"]),
        "rl-t1": _evaluation("rl", {"a": [1, 0], "b": [1, 1]}, ["submitted", "submitted"]),
    }
    (metrics / "evaluations.json").write_text(json.dumps(evaluations))
    steps = [
        {"step": s, "loss": v, "reward_mean": 0.5, "time_wait_s": 1.0, "time_update_s": 2.0,
         "staleness_histogram": {"0": 3, "1": 1}}
        for s, v in ((1, 0.1), (2, 0.9), (2, 0.2), (3, 0.3))
    ]  # fmt: skip
    lines = "".join(json.dumps(step) + "\n" for step in steps)
    (metrics / "rl.jsonl").write_text(lines + '{"step": 4, "lo')
    attempt = {"cause": "submitted", "duration_s": 2.0, "model_time_s": 1.0}
    (metrics / "attempts.jsonl").write_text(
        json.dumps(attempt) + "\n" + json.dumps({**attempt, "cause": "turn_cap"}) + "\n"
    )
    counters = {"model calls": {"gateway": 5, "engines": 5}, "execs": {"broker": 4, "harness": 3}}
    (metrics / "counters.json").write_text(json.dumps(counters))
    probe = {"weight_version": 2, "num_tokens": 5120, "mean_abs_nats": 2.5e-6, "max_abs_nats": 9e-6}
    (metrics / "probe.json").write_text(json.dumps(probe))
    return tmp_path


def test_data_keeps_the_surviving_lineage_and_pairs_stages(run):
    data = load_run(run)
    assert [(row["step"], row["loss"]) for row in data.steps["rl"]] == [
        (1, 0.1),
        (2, 0.2),
        (3, 0.3),
    ]
    assert data.staleness == {0: 9, 1: 3}
    assert data.causes == {"submitted": 1, "turn_cap": 1}
    sft, rl = data.evaluations
    assert sft.interval is not None
    assert rl.interval is not None
    assert rl.gain is not None
    assert (sft.interval.mean, rl.interval.mean) == (0.25, 0.75)
    assert sft.gain is None
    assert rl.gain.mean == 0.5
    assert sft.causes == {"submitted": 2, "turn_cap": 2}


def test_settings_that_a_resume_changed_are_told(run):
    state = json.loads((run / "state.json").read_text())
    state["changed_settings"] = [{"after_step": 2, "settings": ["--trainer.rl.optim.lr=1e-4"]}]
    (run / "state.json").write_text(json.dumps(state))
    data = load_run(run)
    assert data.changed_settings == [(2, "--trainer.rl.optim.lr=1e-4")]
    assert "trainer.rl.optim.lr=1e-4 was set after step 2." in glance.alerts(data)


def test_counters_that_differ_are_said_to(run):
    calls, execs = load_run(run).counters
    assert (calls.verdict, execs.verdict) == ("agree", "differ")
    told = {"processes": {"broker": 2}, "num_attempts_tried_again": 3}
    (run / "metrics" / "restarts.json").write_text(json.dumps(told))
    calls, execs = load_run(run).counters
    assert calls.verdict == "agree"
    assert execs.verdict == (
        "differ: broker was started again 2x and counts from its last start; 3 attempts were tried "
        "again, and the harness tells their last try"
    )


def test_evaluations_during_rl_are_points_of_their_own(run):
    path = run / "metrics" / "evaluations.json"
    evaluations = json.loads(path.read_text())
    for step, rewards in ((8, [1.0, 0.0]), (0, [0.0, 0.0])):
        made = _evaluation(f"rl-step-{step}", {"d": rewards, "e": [1.0, 1.0]}, ["submitted"] * 2)
        evaluations[made["stage"]] = made | {
            "pool": "dev",
            "step": step,
            "weight_version": step + 2,
        }
    path.write_text(json.dumps(evaluations))
    (run / "metrics" / "best.json").write_text(json.dumps({"step": 8}))
    data = load_run(run)
    assert [row.stage for row in data.evaluations] == ["sft", "rl"], "only held-out ones"
    points = [(p.step, p.weight_version, p.interval.mean) for p in data.dev_points]
    assert points == [(0, 2, 0.5), (8, 10, 0.75)]
    assert data.best == {"step": 8}


def test_while_rl_goes_on_the_trainer_tells_its_evaluations(run):
    rows = [
        {"step": 8, "weight_version": 10, "temperature": 1.0, "pass_at_1": 0.25},
        {"step": 16, "weight_version": 18, "temperature": 1.0, "pass_at_1": 0.5},
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (run / "metrics" / "selection.jsonl").write_text(text)
    data = load_run(run)
    assert [(p.step, p.interval.mean) for p in data.dev_points] == [(8, 0.25), (16, 0.5)]
    assert set(data.steps) == {"rl"}


def test_torn_and_missing_files_are_empty_tables(tmp_path):
    (tmp_path / "metrics").mkdir()
    for name in ("evaluations.json", "overlap.json", "counters.json", "rl.jsonl", "status.jsonl"):
        (tmp_path / "metrics" / name).write_text('[1, {"a": ')
    (tmp_path / "config.toml").write_text("[rl\n")
    data = load_run(tmp_path)
    assert (data.evaluations, data.overlap, data.rl, data.status, data.settings) == (
        [],
        {},
        [],
        [],
        {},
    )
    assert load_run(tmp_path / "nothing").attempts == []


def test_page_tells_what_the_files_say(run):
    text = write_report(run).read_text()
    assert "2.50e-06" in text
    assert "75.0 % [" in text
    assert "50.0 % [" in text
    assert "differ" in text
    assert "http" not in text.replace("http://www.w3.org", "").replace("http-equiv", "")


def test_an_empty_run_still_has_a_report(tmp_path):
    text = write_report(tmp_path).read_text()
    assert "No step and no evaluation has ended yet." in text
    assert "<svg" not in text


def test_names_in_the_data_cannot_break_the_page(run):
    (run / "metrics" / "attempts.jsonl").write_text(
        json.dumps(
            {
                "cause": "sandbox_failed", "duration_s": 1.0, "task_id": "</svg><script>alert(1)</script>",
                "attempt_id": "a", "evidence": "<img src=x onerror=alert(2)>", "finished_at_s": 5.0,
            }
        )
    )  # fmt: skip
    text = write_report(run).read_text()
    assert "<script>alert" not in text
    assert "<img" not in text
