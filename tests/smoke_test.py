"""The whole loop: recipe `smoke`, from nothing to its table, with every process real."""

from __future__ import annotations

import json

import pytest

from tests.command import run_root, swe_rl

_TIMEOUT_S = 400


@pytest.fixture(scope="module", name="finished")
def finished_fixture(tmp_path_factory):
    """(outcome, run directory) of one smoke run."""
    workdir = tmp_path_factory.mktemp("smoke")
    outcome = swe_rl(workdir, "@", "smoke", timeout_s=_TIMEOUT_S)
    assert outcome.code == 0, outcome.out[-4000:] + outcome.err[-4000:]
    return outcome, run_root(workdir)


def test_it_ends_with_the_table_and_the_report(finished):
    outcome, root = finished
    for stage in ("base", "sft", "rl"):
        assert stage in outcome.out
    assert f"report: {root / 'report.html'}" in outcome.out
    assert "<svg" in (root / "report.html").read_text()


def test_nothing_is_left(finished):
    assert finished[0].left == {}


def test_engine_and_trainer_agree_in_the_probe(finished):
    probe = json.loads((finished[1] / "metrics" / "probe.json").read_text())
    assert probe["num_tokens"] >= 100
    assert probe["mean_abs_nats"] <= 1e-5


def test_every_side_counted_the_same(finished):
    counters = json.loads((finished[1] / "metrics" / "counters.json").read_text())
    assert set(counters) == {"model calls", "sampled tokens", "answered model calls", "execs"}
    for what, sides in counters.items():
        assert len(sides) >= 2
        assert len(set(sides.values())) == 1, (what, sides)
        assert min(sides.values()) > 0


def test_every_attempt_ended_with_a_scored_cause(finished):
    lines = (finished[1] / "metrics" / "attempts.jsonl").read_text().splitlines()
    attempts = [json.loads(line) for line in lines]
    assert len(attempts) >= 3 * 2 * 4
    assert {attempt["cause"] for attempt in attempts} <= {
        "submitted",
        "turn_cap",
        "token_cap",
        "loop",
    }
    assert all(attempt["reward"] in (0.0, 1.0) for attempt in attempts)


def test_the_ledger_and_the_trainer_tell_the_same_of_what_was_trained(finished):
    metrics = finished[1] / "metrics"
    attempts = [json.loads(line) for line in (metrics / "attempts.jsonl").read_text().splitlines()]
    steps = [json.loads(line) for line in _lines(finished[1])]
    trained = [a for a in attempts if a["num_tokens_trained"]]
    assert {a["group_state"] for a in trained} == {"trained"}
    assert len(trained) == sum(s["num_trajectories"] for s in steps)
    assert sum(a["num_tokens_trained"] for a in trained) == sum(
        s["num_trained_tokens"] for s in steps
    )
    assert {a["group_state"] for a in attempts} <= {"trained", "dropped", "ready"}
    assert all(bool(a["group_reason"]) == (a["group_state"] == "dropped") for a in attempts)


def test_the_worker_the_gateway_and_the_manager_agree_on_an_attempts_time(finished):
    lines = (finished[1] / "metrics" / "attempts.jsonl").read_text().splitlines()
    for attempt in map(json.loads, lines):
        inside = attempt["queued_time_s"] + attempt["generating_time_s"]
        assert 0 < inside <= attempt["model_time_s"] + 0.01
        assert attempt["window_paused_time_s"] <= attempt["generating_time_s"] + 0.01
        assert attempt["grading_environment_time_s"] <= attempt["environment_time_s"]
        worker = ("environment", "model", "tool", "verifier", "overhead")
        assert sum(attempt[f"{part}_time_s"] for part in worker) <= attempt["duration_s"] + 0.01


def test_two_runs_are_put_side_by_side(finished):
    _, root = finished
    outcome = swe_rl(root.parent.parent, "report", root.name, str(root), timeout_s=60)
    assert outcome.code == 0, outcome.err
    page = root.parent / f"compare-{root.name}-{root.name}.html"
    assert outcome.out.split() == ["report:", str(page)]
    assert 'id="step-breakdown"' in page.read_text()


def test_versions_are_on_every_step_and_grow(finished):
    lines = (finished[1] / "metrics" / "rl.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    versions = [step["weight_version"] for step in steps]
    assert [step["step"] for step in steps] == [1, 2, 3]
    # base and sft took versions 1 and 2
    assert versions == [3, 4, 5]


def test_the_time_from_an_update_to_its_first_token_is_told(finished):
    lines = (finished[1] / "metrics" / "rl.jsonl").read_text().splitlines()
    delays = [step.get("publish_to_first_token_s") for step in map(json.loads, lines)]
    assert delays[0] is None
    known = [delay for delay in delays if delay is not None]
    assert known
    assert all(0 < delay < 120 for delay in known)


def test_a_steps_parts_add_up(finished):
    lines = (finished[1] / "metrics" / "rl.jsonl").read_text().splitlines()
    for step in map(json.loads, lines):
        parts = [
            step[f"time_{p}_s"] for p in ("wait", "fetch", "logprob", "update", "publish", "other")
        ]
        assert sum(parts) == pytest.approx(step["time_step_s"], abs=1e-6)


def test_a_replay_repeats_every_step_bit_for_bit(finished):
    _, root = finished
    recorded = (root / "metrics" / "rl.jsonl").read_bytes()
    outcome = swe_rl(root.parent.parent, "replay", "--name", "again", timeout_s=_TIMEOUT_S)
    assert outcome.code == 0, outcome.out + outcome.err
    assert "3 steps" in outcome.out
    assert "equal bit for bit" in outcome.out
    assert outcome.left == {}
    replayed = [json.loads(line) for line in _lines(root / "replays" / "again")]
    for step, again in zip(map(json.loads, _lines(root)), replayed, strict=True):
        for name in ("loss", "grad_norm", "entropy_mean_nats", "gap_total_mean_nats"):
            assert step[name].hex() == again[name].hex()
    assert (root / "metrics" / "rl.jsonl").read_bytes() == recorded


def test_a_replay_with_another_loss_shows_the_difference(finished):
    _, root = finished
    changed = "--trainer.rl.negative_advantage_scale=1.0"
    outcome = swe_rl(
        root.parent.parent,
        "replay",
        "--name",
        "other",
        "--steps",
        "1",
        changed,
        timeout_s=_TIMEOUT_S,
    )
    assert outcome.code == 0, outcome.out + outcome.err
    assert "the first is loss of step 1" in outcome.out


def test_resuming_a_finished_run_shows_it_again_and_changes_nothing(finished):
    _, root = finished
    counters = (root / "metrics" / "counters.json").read_bytes()
    outcome = swe_rl(root.parent.parent, "resume", timeout_s=60)
    assert outcome.code == 0, outcome.err
    assert "pass@1" in outcome.out
    assert outcome.left == {}
    assert (root / "metrics" / "counters.json").read_bytes() == counters


def _lines(root):
    return (root / "metrics" / "rl.jsonl").read_text().splitlines()


def test_rl_was_evaluated_on_dev_and_ended_with_its_best(finished):
    metrics = finished[1] / "metrics"
    evaluations = json.loads((metrics / "evaluations.json").read_text())
    dev = {e["step"]: e for e in evaluations.values() if e["pool"] == "dev"}
    assert sorted(dev) == [0, 2, 3]
    assert [dev[step]["weight_version"] for step in (0, 2, 3)] == [2, 4, 5]
    assert all(len(e["tasks"]) == 4 for e in dev.values())
    best = json.loads((metrics / "best.json").read_text())
    # The stage's last step needs no publication of its own; the best of an earlier one has it.
    assert evaluations["rl-t1"]["weight_version"] == (5 if best["step"] == 3 else 6)
    assert best["pass_at_1"] == max(
        sum(task["rewards"][0] for task in e["tasks"]) / 4 for e in dev.values()
    )
