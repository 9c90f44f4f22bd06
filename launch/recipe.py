"""Recipes: one TOML file that composes every package's settings and says what the job does.

Owner: `launch`. A recipe holds what an engineer decides; addresses, paths inside the run and
interpreters are filled in by `launch` (see `deploy.py`) before a package's model is checked,
so each package's `config.py` stays the one place where its settings are explained.

Order of precedence: `--section.field=value` > the recipe > defaults of the models.
"""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from launch.errors import UsageError

M = TypeVar("M", bound=BaseModel)

RECIPES = Path(__file__).parent / "recipes"

_SHARED = {
    "rollout.batch_groups": "rl.groups_per_step",
    "rollout.group_size": "rl.group_size",
    "rollout.max_staleness": "rl.max_staleness",
    "rollout.seed": "run.seed",
    "trainer.rl.groups_per_step": "rl.groups_per_step",
    "trainer.rl.max_staleness": "rl.max_staleness",
    "trainer.seed": "run.seed",
}
"""Settings that several processes must agree on, and the one place where each is set."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RunSettings(_Section):
    """Where the run lives and how it is watched."""

    name: str = Field(default="", pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,99})?$")
    """Folder below `directory`, of letters, digits, `.`, `_` and `-`; empty: the recipe's name and
    the time of the start."""
    directory: Path = Path("runs")
    """Relative to where the command was given."""
    seed: int = 0
    """Seeds tasks, weights, data order and task order."""
    base_port: int = Field(default=0, ge=0, le=65000)
    """First of consecutive loopback ports; 0 takes free ones."""
    progress_interval_s: float = Field(default=1.0, gt=0)
    """Between refreshes of the progress display, in seconds."""
    status_interval_s: float = Field(default=1.0, gt=0)
    """Between samples in metrics/status.jsonl, in seconds."""
    start_timeout_s: float = Field(default=240.0, gt=0)
    """For one process to become healthy, in seconds."""
    stop_timeout_s: float = Field(default=20.0, gt=0)
    """For one process to drain before it is killed, in seconds."""
    max_restarts: int = Field(default=3, ge=0)
    """Of one process within ten minutes, before the run fails."""
    max_pause_s: float = Field(default=900.0, gt=0)
    """How long a run that paused itself (rollout.pause, the trainer's guards) waits for `resume`
    before it ends, in seconds."""


class TaskSettings(_Section):
    """The generated one-bug repositories of the learning tasks."""

    num_train: int = Field(default=400, gt=0)
    """Tasks that RL draws from."""
    num_dev: int = Field(default=40, gt=0)
    """Tasks of the evaluations during RL, which choose the checkpoint."""
    num_test: int = Field(default=100, gt=0)
    """Held-out tasks of the table."""
    second_look_share: float = Field(default=0.4, ge=0, le=1)
    """Share of the tasks whose failing test does not tell what is right: the agent has to look at
    the file before it can fix it."""


class SupervisedStage(_Section):
    """A supervised stage: how much data, how many steps."""

    num_rows: int = Field(gt=0)
    """Rows of training data that are generated."""
    num_steps: int = Field(gt=0)
    """Optimizer steps."""


class RlStage(_Section):
    """The RL stage."""

    num_steps: int = Field(default=24, gt=0)
    """Optimizer steps."""
    groups_per_step: int = Field(default=8, gt=0)
    """Groups in a batch: rollout.batch_groups and trainer.rl.groups_per_step."""
    group_size: int = Field(default=8, gt=1)
    """Attempts at one task: rollout.group_size."""
    max_staleness: int = Field(default=4, ge=0)
    """In optimizer updates: rollout.max_staleness and trainer.rl.max_staleness."""


class EvaluationSettings(_Section):
    """The held-out evaluations, and the probe of engine against trainer."""

    attempts_per_task: int = Field(default=4, gt=0)
    """Attempts at temperature 1."""
    greedy: bool = True
    """Also one greedy attempt a task."""
    timeout_s: float = Field(default=900.0, gt=0)
    """For one evaluation, in seconds."""
    probe_min_tokens: int = Field(default=5000, gt=0)
    """The probe fails the job when fewer tokens were compared."""
    generate_only_trajectories: int = Field(default=0, ge=0)
    """RL trajectories that the engines sample again after RL, with nothing else running: what RL's
    rate is compared with. 0: none. Whole groups are taken, so about as many."""
    generate_only_time_limit_s: float = Field(default=60.0, gt=0)
    """No trajectory of that comparison is started later, in seconds."""


class FleetSettings(_Section):
    """How many of each process."""

    num_gateways: int = Field(default=1, gt=0)
    """Gateway processes."""
    num_workers: int = Field(default=1, gt=0)
    """Harness worker processes."""


class Recipe(_Section):
    """A whole job. The last sections are handed to the packages that own them."""

    run: RunSettings = RunSettings()
    tasks: TaskSettings = TaskSettings()
    pretrain: SupervisedStage = SupervisedStage(num_rows=20800, num_steps=650)
    sft: SupervisedStage = SupervisedStage(num_rows=400, num_steps=25)
    rl: RlStage = RlStage()
    evaluation: EvaluationSettings = EvaluationSettings()
    fleet: FleetSettings = FleetSettings()
    sandbox: dict[str, Any] = {}
    """sandbox.config.SandboxConfig."""
    rollout: dict[str, Any] = {}
    """rollout.config.RolloutConfig."""
    gateway: dict[str, Any] = {}
    """rollout.gateway.config.GatewayConfig."""
    harness: dict[str, Any] = {}
    """rollout.harness.config.HarnessConfig."""
    trainer: dict[str, Any] = {}
    """trainer.config.TrainerConfig."""

    @model_validator(mode="after")
    def _shared_settings_live_in_rl(self) -> Recipe:
        for shared, instead in _SHARED.items():
            section, *keys = shared.split(".")
            at: Any = getattr(self, section)
            for key in keys:
                at = at.get(key) if isinstance(at, Mapping) else None
            if at is not None:
                raise ValueError(f"{shared} is shared by several processes: set {instead} instead")
        return self

    @model_validator(mode="after")
    def _replayed_experts_are_recorded(self) -> Recipe:
        rl, engines = self.trainer.get("rl"), self.rollout.get("engines")
        replays = isinstance(rl, Mapping) and rl.get("routing_replay")
        if replays and not (isinstance(engines, Mapping) and engines.get("routed_experts")):
            raise ValueError(
                "trainer.rl.routing_replay is on, and engines do not tell their experts: set "
                "rollout.engines.routed_experts too"
            )
        return self


def load_recipe(source: str, overrides: Sequence[str] = ()) -> tuple[str, Recipe]:
    """Reads `NAME` (below launch/recipes) or `PATH.toml` and applies `--section.field=value`.

    Returns the recipe's name and the recipe. Raises UsageError naming the key at fault.
    """
    path = Path(source) if source.endswith(".toml") else RECIPES / f"{source}.toml"
    try:
        values = tomllib.loads(path.read_text())
    except FileNotFoundError as error:
        known = sorted(p.stem for p in RECIPES.glob("*.toml"))
        raise UsageError(
            f"no recipe {source!r}: want one of {', '.join(known)}, or PATH.toml"
        ) from error
    except (OSError, ValueError) as error:  # torn TOML, or bytes that are no text
        raise UsageError(f"cannot read the recipe {path}: {error}") from error
    for override in overrides:
        _apply(values, override)
    _check_finite(values, f"recipe {source}")
    return path.stem, validated(Recipe, values, f"recipe {source}")


def validated(model: type[M], values: Mapping[str, Any], where: str) -> M:
    """values as model; the first problem becomes a one-line UsageError that says what to do."""
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        raise UsageError(_explain(model, error, where)) from error


def to_toml(recipe: Recipe) -> str:
    """The recipe as a file that load_recipe reads."""
    import tomli_w

    return tomli_w.dumps(recipe.model_dump(mode="json", exclude_none=True))


def _check_finite(value: Any, where: str, key: str = "") -> None:
    """Raises UsageError for inf and nan: no setting wants them, and JSON has no name for them."""
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"{where}: {key}: {value} is no finite number")
    if isinstance(value, Mapping):
        for name, inner in value.items():
            _check_finite(inner, where, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for inner in value:
            _check_finite(inner, where, key)


def _explain(model: type[BaseModel], error: ValidationError, where: str) -> str:
    problems = error.errors()
    first = problems[0]
    key = ".".join(str(part) for part in first["loc"]) or "the whole"
    if first["type"] == "extra_forbidden":
        known = _fields_at(model, first["loc"][:-1])
        close = difflib.get_close_matches(str(first["loc"][-1]), known, 1)
        hint = f"did you mean {close[0]}?" if close else f"known keys: {', '.join(sorted(known))}"
        text = f"{key}: unknown key; {hint}"
    else:
        message = first["msg"].removeprefix("Value error, ")
        text = f"{key}: {message}"
        if first["type"] not in ("missing", "value_error"):
            text += f" (got {first['input']!r})"
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{where}: {text}{more}"


def _fields_at(model: type[BaseModel], location: Sequence[int | str]) -> list[str]:
    """Field names of the nested model at location; empty where it is no model."""
    current: Any = model
    for part in location:
        field = getattr(current, "model_fields", {}).get(part)
        current = field.annotation if field is not None else None
    return list(getattr(current, "model_fields", {}))


def _apply(values: dict[str, Any], override: str) -> None:
    """Sets one `--section.field=value`; the value is read as TOML, else as a plain string."""
    name, equals, text = override.partition("=")
    if not name.startswith("--") or not equals or "." not in name:
        raise UsageError(f"cannot read {override!r}: want --section.field=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *sections, key = name[2:].split(".")
    target = values
    for section in sections:
        target = target.setdefault(section, {})
        if not isinstance(target, dict):
            raise UsageError(f"cannot set {name[2:]}: {section} is a value, not a section")
    target[key] = value
