"""Settings that a `resume` gives a run that has begun: checked, made the run's, and remembered.

Owner of `changed_settings` in state.json: [{after_step (RL steps done), settings (overrides)}]. The
run's config.toml is always what holds now.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launch.errors import UsageError
from launch.recipe import Recipe, to_toml
from launch.replay_comparison import read_steps
from launch.run_directory import RunDirectory, write_text

_FIXED = ("run.name=", "run.directory=", "run.seed=", "tasks.")
"""Settings that a run that has begun cannot change: its folders were made with them."""
_KEY = "changed_settings"


@dataclass(frozen=True)
class Change:
    """One setting, changed on the way."""

    after_step: int
    """RL steps done by then."""
    override: str
    """`--section.field=value`"""


def check(overrides: Sequence[str]) -> None:
    """Raises UsageError for a setting that a run has used up once it has begun."""
    for override in overrides:
        name = override.removeprefix("--")
        if name.startswith(_FIXED):
            raise UsageError(f"cannot change {name} of a run that has begun: start another")


def apply(run: RunDirectory, recipe: Recipe, overrides: Sequence[str]) -> None:
    """Makes `recipe`, which has the overrides, the run's, and remembers them."""
    text = to_toml(recipe)
    state = run.load_state()
    after = len(read_steps(run.metrics / "rl.jsonl"))
    state.setdefault(_KEY, []).append({"after_step": after, "settings": list(overrides)})
    run.save_state(state)
    write_text(run.config, text)


def changes(run: RunDirectory) -> list[Change]:
    """What was changed, in order."""
    return [
        Change(int(change["after_step"]), override)
        for change in run.load_state().get(_KEY, [])
        for override in change["settings"]
    ]
