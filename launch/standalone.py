"""Commands that need some of a run's processes but no training: eval, tasks build, tasks validate.

Owner: `launch`. Each makes a run directory of its own (`runs/eval-...`), whose metrics/ and
logs/ stay for inspection.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from launch import collect, programs
from launch.deploy import Deployment
from launch.errors import JobFailed, UsageError
from launch.evaluation import evaluate, evaluation_name
from launch.intervals import pass_at_1
from launch.recipe import load_recipe
from launch.run_directory import RunDirectory, write_json
from proto import rollout_pb2
from rollout.client import RolloutClient

_PYPI_TASKS = Path("~/.cache/swe_rl/tasks/pypi").expanduser()
_NUM_TOY_TASKS = 24
_TIMEOUT_S = 1800.0


async def build_pypi(out: Path, console: Console) -> None:
    """Builds the PyPI bug tasks in out."""
    log = _build_log(out)
    await programs.run_program("rollout.tasks.pypi", "--out", out, log=log)
    index = json.loads((out / "index.json").read_text())
    console.print(f"{len(index)} tasks: {out / 'index.json'}", soft_wrap=True)


def _build_log(out: Path) -> Path:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror}; choose another folder") from error
    return out / "build.log"


async def evaluate_tasks(
    *,
    workdir: Path,
    tasks: str,
    agent: str,
    model: Path | None,
    attempts: int,
    temperature: float,
    console: Console,
) -> None:
    """Evaluates agent on a task set. Raises UsageError or JobFailed; prints the result.

    model is the Hugging Face folder that `mini` samples from.
    """
    if agent not in ("mini", "oracle", "nop"):
        raise UsageError(f"no agent {agent!r}: want mini, oracle or nop")
    if model is not None and not (model / "config.json").exists():
        raise UsageError(
            f"{model} holds no exported model: finish a run first, or name one with --run"
        )
    _, recipe = load_recipe("cpu")
    name = f"eval-{agent}-{time.strftime('%Y%m%d-%H%M%S')}"
    run = RunDirectory((workdir / recipe.run.directory / name).absolute())
    run.create()
    run.lock()
    try:
        index = await _index(tasks, workdir, run)
        _refuse_missing(index)
        deployment = Deployment(recipe, run, with_trainer=False, serve_model=model)
        async with deployment.running() as (rollout, _):
            await _add(rollout, index)
            work = evaluate(
                rollout,
                run.metrics,
                stage=agent,
                temperature=temperature,
                attempts_per_task=attempts,
                pool=rollout_pb2.POOL_TEST,
                agent=agent,
                timeout_s=_TIMEOUT_S,
            )
            result = await deployment.supervisor.guard(work)
            name = evaluation_name(agent, temperature)
            summaries = await rollout.list_attempts(evaluation=name)
            rows = [collect.attempt_row(summary) for summary in summaries]
            write_json(run.metrics / "evaluated_attempts.json", rows)
            await collect.counters(rollout, deployment, run.metrics)
        _print(result, run, console)
    finally:
        run.unlock()


async def validate_tasks(
    workdir: Path, index: Path | None, out: Path | None, console: Console
) -> None:
    """Validates a task set through a broker of its own. Raises JobFailed when one is quarantined."""
    _, recipe = load_recipe("smoke")
    run = RunDirectory((workdir / "runs" / f"validate-{time.strftime('%Y%m%d-%H%M%S')}").absolute())
    run.create()
    path = index or _PYPI_TASKS / "index.json"
    entries = await _pypi_index(run) if index is None else _read_index(index)
    _refuse_missing(entries)
    deployment = Deployment(recipe, run, with_trainer=False, only_broker=True)
    result = out or run.metrics / "validation.json"
    async with deployment.running():
        arguments = ("--index", path, "--broker", deployment.broker_address, "--json", result)
        text = await programs.run_program(
            "rollout.tasks.validate",
            *arguments,
            log=run.logs / "validate.log",
            timeout_s=_TIMEOUT_S,
        )
    console.print(text.strip(), highlight=False, soft_wrap=True)
    console.print(f"results: {result}", highlight=False, soft_wrap=True)


async def _index(tasks: str, workdir: Path, run: RunDirectory) -> list[dict[str, Any]]:
    log = run.logs / "prepare.log"
    await programs.layers(run, "toy")
    if tasks == "pypi":
        return await _pypi_index(run)
    if tasks == "toy":
        counts = ("--train", 1, "--dev", 1, "--test", _NUM_TOY_TASKS)
        await programs.run_program(
            "rollout.tasks.toy", "--out", run.tasks, *counts, "--seed", 0, log=log
        )
        entries: list[dict[str, Any]] = json.loads((run.tasks / "index.json").read_text())
        return [entry for entry in entries if entry["pool"] == "test"]
    return _read_index(workdir / tasks)


def _read_index(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise UsageError(
            f"no task set {path.name!r}: want pypi, toy, or the path of an index.json "
            "(`swe_rl tasks build` makes one)"
        )
    try:
        loaded: list[dict[str, Any]] = json.loads(path.read_text())
    except ValueError as error:
        raise UsageError(f"{path} is not a JSON task index: {error}") from error
    return loaded


async def _pypi_index(run: RunDirectory) -> list[dict[str, Any]]:
    log = run.logs / "prepare.log"
    await programs.layers(run, "pypi")
    _PYPI_TASKS.mkdir(parents=True, exist_ok=True)
    await programs.run_program("rollout.tasks.pypi", "--out", _PYPI_TASKS, log=log)
    entries: list[dict[str, Any]] = json.loads((_PYPI_TASKS / "index.json").read_text())
    return entries


def _refuse_missing(index: list[dict[str, Any]]) -> None:
    missing = [entry["path"] for entry in index if not Path(entry["path"], "task.toml").exists()]
    if missing:
        raise UsageError(
            f"task directory {missing[0]} is missing or holds no task.toml "
            f"({len(missing)} of {len(index)} tasks): build the task set again"
        )


async def _add(rollout: RolloutClient, index: list[dict[str, Any]]) -> None:
    tasks = [rollout_pb2.Task(task_id=entry["task_id"], path=entry["path"]) for entry in index]
    await rollout.add_tasks(rollout_pb2.AddTasksRequest(pool=rollout_pb2.POOL_TEST, tasks=tasks))


def _print(result: dict[str, Any], run: RunDirectory, console: Console) -> None:
    rewards = {task["task_id"]: task["rewards"] for task in result["tasks"]}
    causes = Counter(cause for task in result["tasks"] for cause in task["causes"])
    table = Table(title=f"{result['agent']} on {len(rewards)} tasks", title_justify="left")
    table.add_column("task")
    table.add_column("rewards")
    table.add_column("causes")
    for task in result["tasks"]:
        table.add_row(
            task["task_id"], " ".join(f"{r:g}" for r in task["rewards"]), " ".join(task["causes"])
        )
    console.print(table)
    interval = pass_at_1(rewards)
    console.print(f"pass@1: {interval.percent() if interval else 'not scored'}", highlight=False)
    console.print(
        f"causes: {', '.join(f'{c} {n}' for c, n in causes.most_common())}", highlight=False
    )
    console.print(f"details: {run.metrics}", highlight=False, soft_wrap=True)
    unscored = sum(len(task["causes"]) - len(task["rewards"]) for task in result["tasks"])
    if unscored:
        raise JobFailed(
            f"{unscored} attempts ended without a score; see {run.metrics}/evaluated_attempts.json"
        )
