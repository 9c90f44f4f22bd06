"""Bad input: one clear message within seconds, exit code not 0, no traceback, nothing started."""

from __future__ import annotations

import json
import os
import socket
import tomllib

import pytest

from tests.command import swe_rl

_SECONDS = 30


def check(outcome, *wanted: str) -> None:
    """One `error:` line that holds every wanted text."""
    assert outcome.code != 0, outcome.out
    lines = [line for line in outcome.err.splitlines() if line.strip()]
    assert len(lines) == 1, outcome.err
    assert lines[0].startswith("error: ")
    for text in wanted:
        assert text in lines[0]
    assert "Traceback" not in outcome.out + outcome.err
    assert outcome.left == {}


def test_unknown_key_in_a_recipe(tmp_path):
    (tmp_path / "mine.toml").write_text("[rl]\nnum_stepz = 3\n")
    check(
        swe_rl(tmp_path, "@", "mine.toml", timeout_s=_SECONDS),
        "rl.num_stepz",
        "did you mean num_steps?",
    )


def test_unknown_key_of_a_package(tmp_path):
    outcome = swe_rl(tmp_path, "@", "smoke", "--trainer.rl.learning_rate=1", timeout_s=_SECONDS)
    check(outcome, "[trainer]", "rl.learning_rate: unknown key")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", ["../out", "a/b", "x" * 300, "a\nb"])
def test_a_run_name_that_is_no_folder_name(tmp_path, name):
    outcome = swe_rl(tmp_path, "@", "smoke", f"--run.name={name}", timeout_s=_SECONDS)
    check(outcome, "run.name")
    assert list(tmp_path.iterdir()) == []


def test_wrong_type(tmp_path):
    outcome = swe_rl(tmp_path, "@", "smoke", "--rl.num_steps=many", timeout_s=_SECONDS)
    check(outcome, "rl.num_steps", "got 'many'")


def test_caps_that_the_engines_would_refuse(tmp_path):
    outcome = swe_rl(
        tmp_path, "@", "smoke", "--rollout.engines.context_length=256", timeout_s=_SECONDS
    )
    check(outcome, "[rollout]", "caps.max_total_tokens 512 is above engines.context_length 256")


def test_nothing_to_replay(tmp_path):
    check(swe_rl(tmp_path, "replay", timeout_s=_SECONDS), "no run below", "metrics/rl.jsonl")
    check(swe_rl(tmp_path, "replay", "gone", timeout_s=_SECONDS), "no run 'gone'")


def test_a_setting_that_changes_nothing_in_a_replay(tmp_path):
    outcome = swe_rl(tmp_path, "replay", "--rl.group_size=4", timeout_s=_SECONDS)
    check(outcome, "rl.group_size changes nothing")


def test_a_setting_that_a_begun_run_cannot_change(tmp_path):
    outcome = swe_rl(tmp_path, "resume", "--run.seed=4", timeout_s=_SECONDS)
    check(outcome, "cannot change run.seed=4 of a run that has begun")


def test_a_resume_of_two_runs(tmp_path):
    check(swe_rl(tmp_path, "resume", "a", "b", timeout_s=_SECONDS), "cannot read 'b'")


def test_missing_task_directory(tmp_path):
    index = [{"task_id": "a", "path": str(tmp_path / "gone"), "pool": "test"}]
    (tmp_path / "index.json").write_text(json.dumps(index))
    outcome = swe_rl(
        tmp_path, "eval", "--tasks", "index.json", "--agent", "nop", timeout_s=2 * _SECONDS
    )
    check(outcome, "task directory", str(tmp_path / "gone"))


def test_a_task_index_without_a_task(tmp_path):
    (tmp_path / "index.json").write_text("[]")
    outcome = swe_rl(
        tmp_path, "eval", "--tasks", "index.json", "--agent", "nop", timeout_s=2 * _SECONDS
    )
    check(outcome, "index.json lists no task")


def test_missing_task_index(tmp_path):
    outcome = swe_rl(
        tmp_path, "eval", "--tasks", "nowhere.json", "--agent", "nop", timeout_s=_SECONDS
    )
    check(outcome, "no task set", "nowhere.json")


def test_port_in_use(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        outcome = swe_rl(tmp_path, "@", "smoke", f"--run.base_port={port}", timeout_s=_SECONDS)
    check(outcome, f"port {port} for broker is in use")


def test_engine_that_fails_to_start(tmp_path):
    """An engine flag that SGLang refuses: the engine's own reason reaches the terminal."""
    flags = '--rollout.engines.extra_flags=["--no-such-flag"]'
    outcome = swe_rl(
        tmp_path,
        "@",
        "smoke",
        flags,
        "--rollout.engines.max_restarts=0",
        "--pretrain.num_steps=1",
        timeout_s=240,
    )
    check(outcome, "engine engine0 failed", "no-such-flag")


@pytest.mark.parametrize("place", ["/proc/swe_rl", "file"])
def test_run_directory_that_cannot_be_written(tmp_path, place):
    """Permission bits do not stop root: /proc and a plain file in the way stop everybody."""
    (tmp_path / "file").write_text("")
    outcome = swe_rl(tmp_path, "@", "smoke", f"--run.directory={place}", timeout_s=_SECONDS)
    check(outcome, "cannot write the run directory")


def test_unknown_command_line_word(tmp_path):
    check(swe_rl(tmp_path, "@", "smoke", "please", timeout_s=_SECONDS), "cannot read 'please'")


def test_resume_without_a_run(tmp_path):
    check(swe_rl(tmp_path, "resume", timeout_s=_SECONDS), "no run below")


def test_a_run_is_not_overwritten(tmp_path):
    root = tmp_path / "runs" / "mine"
    root.mkdir(parents=True)
    (root / "config.toml").write_text("")
    check(
        swe_rl(tmp_path, "@", "smoke", "--run.name=mine", timeout_s=_SECONDS), "swe_rl resume mine"
    )


@pytest.mark.parametrize("command", ["resume", "replay"])
def test_a_run_whose_recipe_was_lost(tmp_path, command):
    """An empty file would be a recipe of defaults: another run under the same name."""
    root = tmp_path / "runs" / "mine"
    root.mkdir(parents=True)
    (root / "config.toml").write_text("")
    outcome = swe_rl(tmp_path, command, "mine", timeout_s=_SECONDS)
    check(outcome, "config.toml is not whole", "start another run")


def test_help_needs_no_torch(tmp_path):
    """The first import of torch would fail: a module of that name that raises comes first."""
    (tmp_path / "torch.py").write_text("raise ImportError('torch was imported')\n")
    env = {"PYTHONPATH": f"{tmp_path}:{os.environ['PYTHONPATH']}"}
    outcome = swe_rl(tmp_path, "--help", timeout_s=_SECONDS, env=env)
    assert outcome.code == 0
    for command in ("run", "resume", "eval", "report", "tasks"):
        assert command in outcome.out


def test_a_dry_run_shows_every_setting_and_starts_nothing(tmp_path):
    outcome = swe_rl(tmp_path, "run", "@", "smoke", "--dry-run", timeout_s=_SECONDS)
    assert outcome.code == 0, outcome.err
    resolved = tomllib.loads(outcome.out)
    assert resolved["rollout"]["caps"]["max_new_tokens_per_turn"] == 40
    assert resolved["trainer"]["rl"]["optim"]["lr"] == 2e-4
    assert resolved["harness"]["concurrency"] == 16
    assert resolved["trainer"]["weight_sync"]["bucket_bytes"] == 64 * 2**20
    assert not (tmp_path / "runs").exists()
    assert outcome.left == {}
