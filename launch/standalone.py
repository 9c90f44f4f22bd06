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
from launch.attempt_rows import attempt_row
from launch.deploy import Deployment
from launch.errors import JobFailed, UsageError
from launch.evaluation import evaluate, evaluation_name
from launch.intervals import pass_at_1
from launch.recipe import load_recipe
from launch.run_directory import RunDirectory, write_json
from launch.task_index import IndexedTask, add_tasks, read_index
from proto import rollout_pb2

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
    _, recipe = load_recipe("evaluate")
    name = f"eval-{agent}-{time.strftime('%Y%m%d-%H%M%S')}"
    run = RunDirectory((workdir / recipe.run.directory / name).absolute())
    run.create()
    run.lock()
    # A task set given by path may use either image; the pypi layer costs a download once.
    images = ("toy",) if tasks == "toy" else ("toy", "pypi")
    try:
        await programs.layers(run, *images)
        index = await _index(tasks, workdir, run)
        deployment = Deployment(recipe, run, with_trainer=False, serve_model=model, images=images)
        async with deployment.running() as (rollout, _):
            await add_tasks(rollout, index, pool="test")
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
            rows = [attempt_row(summary) for summary in summaries]
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
    if index is None:
        await _pypi_index(run)
    else:
        read_index(index)
    path = index or run.tasks / "index.json"
    images = ("toy", "pypi")
    await programs.layers(run, *images)
    deployment = Deployment(recipe, run, with_trainer=False, only_broker=True, images=images)
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


async def _index(tasks: str, workdir: Path, run: RunDirectory) -> list[IndexedTask]:
    log = run.logs / "prepare.log"
    if tasks == "pypi":
        return await _pypi_index(run)
    if tasks == "toy":
        counts = ("--train", 1, "--dev", 1, "--test", _NUM_TOY_TASKS)
        arguments = ("--out", run.tasks, *counts, "--seed", 0)
        await programs.run_program("rollout.tasks.toy", *arguments, log=log)
        return [task for task in read_index(run.tasks / "index.json") if task.pool == "test"]
    return read_index(workdir / tasks)


async def _pypi_index(run: RunDirectory) -> list[IndexedTask]:
    """Task folders below the run: they cost half a second once the sources are cached."""
    await programs.run_program(
        "rollout.tasks.pypi", "--out", run.tasks, log=run.logs / "prepare.log"
    )
    return read_index(run.tasks / "index.json")


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
