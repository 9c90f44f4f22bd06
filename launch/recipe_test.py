"""Recipes: what is shipped loads; what is wrong is one clear line."""

from __future__ import annotations

import pytest

from launch.errors import UsageError
from launch.recipe import RECIPES, load_recipe


@pytest.mark.parametrize("name", sorted(path.stem for path in RECIPES.glob("*.toml")))
def test_shipped_recipes_load(name):
    loaded, recipe = load_recipe(name)
    assert loaded == name
    assert recipe.rl.num_steps > 0


def test_overrides_win_over_the_recipe():
    _, recipe = load_recipe(
        "smoke",
        [
            "--rl.num_steps=7",
            "--run.name=mine",
            "--evaluation.greedy=true",
            "--rollout.caps.max_turns=3",
            "--trainer.rl.optim.lr=1e-3",
        ],
    )
    assert recipe.rl.num_steps == 7
    assert recipe.run.name == "mine"
    assert recipe.evaluation.greedy is True
    assert recipe.rollout["caps"]["max_turns"] == 3
    assert recipe.trainer["rl"]["optim"]["lr"] == 1e-3


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("--rl.num_stepz=3", r"rl\.num_stepz: unknown key; did you mean num_steps\?"),
        ("--nonsense.x=3", r"nonsense: unknown key; known keys: .*rollout"),
        ("--rl.num_steps=many", r"rl\.num_steps: Input should be a valid integer.*got 'many'"),
        ("--rl.num_steps=0", r"rl\.num_steps: Input should be greater than 0 \(got 0\)"),
        ("--rollout.group_size=3", r"rollout\.group_size is shared .* set rl\.group_size instead"),
        ("--trainer.rl.groups_per_step=3", r"is shared .* set rl\.groups_per_step instead"),
        ("--trainer.rl.max_staleness=3", r"is shared .* set rl\.max_staleness instead"),
        ("--trainer.rl.routing_replay=true", r"set rollout\.engines\.routed_experts too"),
        ("--trainer.rl.optim.lr=inf", r"trainer\.rl\.optim\.lr: inf is no finite number"),
        ("--trainer.rl.guards.max_grad_norm=nan", r"max_grad_norm: nan is no finite number"),
        ("--rl=3", r"cannot read '--rl=3': want --section\.field=value"),
        ("--rl.num_steps.x=3", r"num_steps is a value, not a section"),
    ],
)
def test_a_wrong_setting_is_one_clear_line(override, message):
    with pytest.raises(UsageError, match=message) as raised:
        load_recipe("smoke", [override])
    assert "\n" not in str(raised.value)


def test_an_unknown_recipe_names_the_known_ones():
    with pytest.raises(UsageError, match=r"no recipe 'nope': want one of cpu, .*smoke"):
        load_recipe("nope")


@pytest.mark.parametrize("content", [b"[rl\n", b'[run]\nname = "\xff"\n'], ids=["torn", "no_text"])
def test_a_file_that_is_no_toml_is_named(tmp_path, content):
    path = tmp_path / "torn.toml"
    path.write_bytes(content)
    with pytest.raises(UsageError, match="cannot read the recipe"):
        load_recipe(str(path))


def test_the_resolved_recipe_loads_again(tmp_path):
    import tomli_w

    _, recipe = load_recipe("cpu", ["--rl.num_steps=9"])
    path = tmp_path / "config.toml"
    path.write_text(tomli_w.dumps(recipe.model_dump(mode="json", exclude_none=True)))
    assert load_recipe(str(path))[1] == recipe
