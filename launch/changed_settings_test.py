"""Settings that a resume changes: checked, written, remembered."""

from __future__ import annotations

import pytest

from launch import changed_settings
from launch.changed_settings import Change
from launch.errors import UsageError
from launch.recipe import load_recipe, to_toml
from launch.run_directory import RunDirectory


def test_changed_settings_are_the_runs_from_then_on(tmp_path):
    run = RunDirectory(tmp_path)
    run.create()
    _, recipe = load_recipe("smoke")
    run.config.write_text(to_toml(recipe))
    run.save_state({"stages": []})
    first = ["--trainer.rl.guards.max_grad_norm=off"]
    _, recipe = load_recipe(str(run.config), first)
    changed_settings.apply(run, recipe, first)
    (run.metrics / "rl.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"ste')
    second = ["--trainer.rl.optim.lr=1e-4", "--run.max_pause_s=5"]
    _, recipe = load_recipe(str(run.config), second)
    changed_settings.apply(run, recipe, second)
    _, now = load_recipe(str(run.config))
    assert now == recipe
    assert now.trainer["rl"]["guards"] == {"max_grad_norm": "off"}
    assert now.trainer["rl"]["optim"]["lr"] == 1e-4
    assert now.run.max_pause_s == 5
    assert changed_settings.changes(run) == [
        Change(0, first[0]),
        Change(2, second[0]),
        Change(2, second[1]),
    ]
    assert run.load_state()["stages"] == []


@pytest.mark.parametrize("name", ["run.seed=2", "run.name=x", "tasks.num_test=3"])
def test_what_a_run_was_made_with_stays(name):
    with pytest.raises(UsageError, match="of a run that has begun"):
        changed_settings.check([f"--{name}"])
    changed_settings.check(["--run.max_pause_s=3", "--trainer.rl.optim.lr=1e-4"])
