"""`swe_rl replay`: the RL stage of a recorded run again, from its batches, without engines.

Owner: `launch`. Two processes: the trainer, as in the run, and in the manager's place a server that
reads the run's ledger and tokens. The run itself is only read, so that one under way may be
replayed too.

    RUN/checkpoints (start of RL) --> trainer <--NextBatch, FetchSequences-- recorded server
                                        |                                     ^ RUN/ledger.db, tokens/
                                        `--> RUN/replays/NAME/metrics/rl.jsonl --compare--> RUN/metrics

With the run's own settings every step must be the same, bit for bit: a trainer that is not
deterministic, or a record that is not what was trained, shows here. With other settings the
differences are the result.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import grpc.aio
from pydantic import BaseModel
from rich.console import Console
from rich.table import Table

from launch import changed_settings
from launch.deploy import Deployment, server_spec
from launch.errors import JobFailed, ReplayDiffers, UsageError
from launch.ports import choose_ports
from launch.recipe import Recipe
from launch.replay_comparison import Comparison, Row, compare, read_steps
from launch.run_directory import RunDirectory, write_json
from launch.supervisor import Supervisor
from proto import serving, trainer_pb2
from rollout.config import RecordedRunConfig
from trainer.client import TrainerClient
from trainer.config import TrainerConfig
from weightsync.config import WeightSyncConfig

STAGE = "rl"
_REPLAYED_SETTINGS = ("trainer.", "run.", "rl.num_steps", "rl.max_staleness")
_UNTRAINED = ("run.", "trainer.rl.guards.", "trainer.rl.checkpoint_every_steps=")
"""Settings on which no number of a step depends."""
_POLL_S = 0.2
_PROGRESS_S = 10.0
_MAX_ROWS = 40
"""Of the table of steps; of a longer replay the first and last are shown."""


def check_overrides(overrides: Sequence[str]) -> None:
    """Raises UsageError for a setting that a replay does not use: it would change nothing."""
    for override in overrides:
        name = override.removeprefix("--").partition("=")[0]
        if not name.startswith(_REPLAYED_SETTINGS):
            raise UsageError(
                f"a replay takes its batches from the record, so that {name} changes nothing; want "
                "a setting of trainer, rl.num_steps or rl.max_staleness"
            )


async def replay(
    run: RunDirectory,
    recipe: Recipe,
    *,
    name: str,
    num_steps: int,
    overrides: Sequence[str],
    console: Console,
) -> None:
    """Replays the first num_steps RL steps (0: all recorded) into run/replays/name and compares.

    Args: recipe is the run's, with `overrides` applied.

    Raises:
      UsageError: there is nothing to replay, or the name is taken.
      ReplayDiffers: without overrides, a value is not the same.
      ProcessFailed, JobFailed: it could not be replayed.
    """
    recorded = read_steps(run.metrics / f"{STAGE}.jsonl")
    num_steps = num_steps or len(recorded)
    if not recorded or num_steps > recipe.rl.num_steps:
        raise UsageError(
            f"{run.root} has {len(recorded)} RL steps in metrics/{STAGE}.jsonl and rl.num_steps = "
            f"{recipe.rl.num_steps}: nothing to replay {num_steps} steps from"
        )
    deployment = Deployment(recipe, run)  # a bad setting leaves no folder behind
    target = _make_folder(run, name)
    console.print(f"replay: {target.root}", highlight=False, soft_wrap=True)
    changed = [o for o in overrides if _is_trained(o)]
    for change in changed_settings.changes(run):
        if not _is_trained(change.override):
            continue
        changed.append(change.override)
        console.print(
            f"{change.override} was set after step {change.after_step} of the run: the replay has "
            "it from the start",
            highlight=False,
            soft_wrap=True,
        )
    await _train(deployment, recipe, target, num_steps, console)
    steps = recorded[:num_steps]
    replayed = read_steps(target.metrics / f"{STAGE}.jsonl")[:num_steps]
    comparison = compare(steps, replayed)
    if len(comparison.steps) < len(steps):
        raise JobFailed(
            f"only {len(replayed)} of {num_steps} steps were replayed: see {target.logs}"
        )
    write_json(target.root / "comparison.json", dataclasses.asdict(comparison))
    show(comparison, steps, replayed, console)
    if not comparison.equal and not changed:
        first = comparison.differences[0]
        raise ReplayDiffers(
            f"the replay differs from the run at step {first.step}: {first.metric} was "
            f"{first.recorded!r} and is {first.replayed!r} ({target.root}/comparison.json has all)"
        )


def _make_folder(run: RunDirectory, name: str) -> RunDirectory:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise UsageError(f"--name {name!r}: want letters, digits, `.`, `_` and `-`")
    target = RunDirectory(run.root / "replays" / name)
    if target.root.exists():
        raise UsageError(f"{target.root} exists: choose another --name")
    try:
        for path in (target.logs, target.metrics, target.processes):
            path.mkdir(parents=True)
    except OSError as error:
        raise UsageError(f"cannot write {target.root}: {error.strerror}") from error
    return target


def _is_trained(override: str) -> bool:
    """True for a setting on which the numbers of a step depend."""
    name = override.removeprefix("--")
    return name.startswith(_REPLAYED_SETTINGS) and not name.startswith(_UNTRAINED)


async def _train(
    deployment: Deployment, recipe: Recipe, target: RunDirectory, num_steps: int, console: Console
) -> None:
    ports = choose_ports(("recorded", "trainer"), 0)
    address = {name: f"127.0.0.1:{port}" for name, port in ports.items()}
    configs: dict[str, BaseModel] = {
        "recorded": RecordedRunConfig(
            rollout=deployment.config_of("manager"),
            scratch_dir=target.root / "scratch",
            num_steps=num_steps,
        ),
        "trainer": trainer_config(
            deployment.config_of("trainer"), target.root, address["recorded"]
        ),
    }
    modules = {"recorded": "rollout.recorded_server", "trainer": "trainer.server"}
    # Nothing is worth a restart: it would begin again, from the start.
    settings = recipe.run.model_copy(update={"max_restarts": 0})
    supervisor = Supervisor()
    try:
        async with AsyncExitStack() as stack:
            for name, config in configs.items():
                path = target.processes / f"{name}.json"
                path.write_text(config.model_dump_json(indent=1))
                spec = server_spec(settings, target, name, modules[name], address[name])
                await supervisor.guard(supervisor.start(spec))
            channel = await stack.enter_async_context(serving.dial(address["trainer"]))
            stage = _run_stage(TrainerClient(channel), recipe, target, num_steps, console)
            await supervisor.guard(stage)
    finally:
        await supervisor.close()
        with contextlib.suppress(OSError):
            (target.root / "scratch").rmdir()


def trainer_config(config: TrainerConfig, run_dir: Path, manager_address: str) -> TrainerConfig:
    """The run's trainer, told to replay. What changes nothing about a step is left out."""
    guards = config.rl.guards.model_copy(update={"action": "warn"})
    evaluation = config.rl.evaluation.model_copy(update={"every_steps": 0})
    rl = config.rl.model_copy(
        update={"checkpoint_every_steps": 0, "guards": guards, "evaluation": evaluation}
    )
    return config.model_copy(
        update={
            "replay_of": config.run_dir,
            "run_dir": run_dir,
            "manager_address": manager_address,
            "checkpoints_kept": 1,
            "keep_stage_ends": False,
            "weight_sync": WeightSyncConfig(),  # nothing is sent
            "rl": rl,
        }
    )


async def _run_stage(
    trainer: TrainerClient, recipe: Recipe, target: RunDirectory, num_steps: int, console: Console
) -> None:
    """Until num_steps are done. The schedule of the learning rate is that of the whole stage."""
    kind = trainer_pb2.STAGE_KIND_RL
    await trainer.run_stage(kind, STAGE, recipe.rl.num_steps)
    next_line = time.monotonic() + _PROGRESS_S
    while True:
        try:
            status = await trainer.get_status()
        except grpc.aio.AioRpcError as error:
            # A trainer that died is the supervisor's to tell of, in a moment.
            if error.code() != grpc.StatusCode.UNAVAILABLE:
                raise
            status = trainer_pb2.GetStatusReply()
        if status.state == trainer_pb2.STAGE_STATE_FAILED:
            raise JobFailed(
                f"the trainer failed in step {status.step + 1}: {status.error} (log: "
                f"{target.logs / 'trainer.log'})"
            )
        if STAGE in status.finished_stages or status.step >= num_steps:
            await trainer.stop()
            return
        if time.monotonic() >= next_line:
            console.print(f"replayed {status.step} of {num_steps} steps", highlight=False)
            next_line = time.monotonic() + _PROGRESS_S
        await asyncio.sleep(_POLL_S)


def show(
    comparison: Comparison, recorded: Sequence[Row], replayed: Sequence[Row], console: Console
) -> None:
    """Prints the steps side by side, and one line that says whether they are the same."""
    differing: dict[int, list[str]] = {}
    for difference in comparison.differences:
        differing.setdefault(difference.step, []).append(difference.metric)
    table = Table(title="run and replay, step by step", title_justify="left")
    for column in ("step", "loss, run", "loss, replay", "grad_norm, run", "grad_norm, replay"):
        table.add_column(column, justify="right")
    table.add_column("bits")
    rows = list(zip(recorded, replayed, strict=False))
    hidden = range(_MAX_ROWS // 2, len(rows) - _MAX_ROWS // 2)
    for index, (left, right) in enumerate(rows):
        if index in hidden:
            if index == hidden[0]:
                table.add_row("...")
            continue
        names = differing.get(int(left["step"]), [])
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        told = f"differ: {', '.join(names[:3])}{more}" if names else "equal"
        values = [_number(side, key) for key in ("loss", "grad_norm") for side in (left, right)]
        table.add_row(str(left["step"]), *values, told)
    console.print(table)
    told = f"{len(comparison.steps)} steps, {comparison.num_values} values"
    if comparison.equal:
        console.print(f"replay: {told}: equal bit for bit", highlight=False)
        return
    first = comparison.differences[0]
    console.print(
        f"replay: {told}: {len(comparison.differences)} differ in {len(differing)} steps; the first "
        f"is {first.metric} of step {first.step}: {first.recorded!r} in the run, "
        f"{first.replayed!r} in the replay",
        highlight=False,
        soft_wrap=True,
    )


def _number(row: Row, name: str) -> str:
    return f"{row[name]:.7g}" if name in row else ""
