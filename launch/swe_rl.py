"""`swe_rl`: trains software-engineering agents with asynchronous reinforcement learning.

Owner: `launch`. Parses the command line, prepares the run directory and hands over to the job.
Imports of the services' libraries wait until a command needs them, so that `--help` is quick.

    swe_rl                                     the CPU recipe, from nothing to the table
    swe_rl @ smoke --rl.num_steps=5            another recipe, one setting changed
    swe_rl run @ my.toml --dry-run             print the resolved recipe and stop
    swe_rl replay NAME                         the RL stage of a run again, from its record
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import sys
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from launch.errors import LaunchError, UsageError

_COMMANDS = ("run", "resume", "replay", "eval", "report", "tasks")
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT)
_EXTRA = {"allow_extra_args": True, "ignore_unknown_options": True}

app = typer.Typer(
    help="Trains software-engineering agents with asynchronous reinforcement learning.",
    add_completion=False,
    no_args_is_help=False,
    pretty_exceptions_enable=False,
)
tasks_app = typer.Typer(help="Builds and validates task sets.", no_args_is_help=True)
app.add_typer(tasks_app, name="tasks")
console = Console(stderr=False)


def _workdir() -> Path:
    """Where the command was given; Bazel starts us elsewhere."""
    return Path(os.environ.get("BUILD_WORKING_DIRECTORY", "."))


def _execute(work: Coroutine[Any, Any, None]) -> None:
    """Runs work; SIGINT, SIGTERM and SIGHUP cancel it, so that everything is taken down."""
    interrupted: list[int] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None

        def interrupt(number: int) -> None:
            # A second signal must not break into the take-down that the first one began.
            if not interrupted:
                task.cancel()
                with contextlib.suppress(OSError):  # after SIGHUP there may be no terminal
                    console.print("stopping: taking the processes down", style="yellow")
            interrupted.append(number)

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
                loop.add_signal_handler(number, interrupt, number)
        await work

    try:
        asyncio.run(main())
    except asyncio.CancelledError:
        raise typer.Exit(128 + (interrupted[0] if interrupted else signal.SIGINT)) from None


def _split_recipe(arguments: list[str]) -> tuple[str, list[str]]:
    """[`@ NAME`] and overrides -> (recipe, overrides)."""
    recipe, overrides, rest = "cpu", [], list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument == "@":
            if not rest:
                raise UsageError("`@` wants a recipe: a name or PATH.toml")
            recipe = rest.pop(0)
        elif argument.startswith("@"):
            recipe = argument[1:]
        elif argument.startswith("--") and "=" in argument:
            overrides.append(argument)
        else:
            raise UsageError(
                f"cannot read {argument!r}: want `@ RECIPE`, --section.field=value, or one of the "
                f"commands {', '.join(_COMMANDS)}"
            )
    if recipe.endswith(".toml"):
        recipe = str(_workdir() / recipe)
    return recipe, overrides


def _split_run(arguments: list[str]) -> tuple[str, list[str]]:
    """[NAME] and overrides -> (name of a run, or empty, overrides)."""
    overrides = [argument for argument in arguments if argument.startswith("--")]
    names = [argument for argument in arguments if not argument.startswith("--")]
    unread = [argument for argument in overrides if "=" not in argument] + names[1:]
    if unread:
        raise UsageError(f"cannot read {unread[0]!r}: want one run and --section.field=value")
    return (names[0] if names else ""), overrides


@app.command(context_settings=_EXTRA)
def run(
    context: typer.Context,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved recipe and stop.")
    ] = False,
) -> None:
    """Runs the job of a recipe: `@ NAME` or `@ PATH.toml`, then `--section.field=value`s; default: cpu."""
    from launch.deploy import Deployment
    from launch.recipe import load_recipe, to_toml
    from launch.run_directory import RunDirectory, write_text

    source, overrides = _split_recipe(context.args)
    name, recipe = load_recipe(source, overrides)
    folder = recipe.run.name or f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    run_directory = RunDirectory((_workdir() / recipe.run.directory / folder).absolute())
    if run_directory.config.exists():
        found_by = folder if recipe.run.directory == Path("runs") else run_directory.root
        raise UsageError(
            f"the run {run_directory.root} exists: `swe_rl resume {found_by}` continues it"
        )
    deployment = Deployment(recipe, run_directory)  # a bad setting leaves no folder behind
    if dry_run:
        resolved = recipe.model_copy(update=deployment.resolved())
        console.print(to_toml(resolved), highlight=False, markup=False, soft_wrap=True)
        return
    run_directory.create()
    write_text(run_directory.config, to_toml(recipe))
    _job(recipe, run_directory, deployment)


@app.command(context_settings=_EXTRA)
def resume(context: typer.Context) -> None:
    """Continues an interrupted run from its newest checkpoint, or one that paused where it is.

    `[RUN] [--section.field=value ...]`: the name below runs/, or a path; default: the newest.
    Settings given here are the run's from then on.
    """
    from launch import changed_settings
    from launch.deploy import Deployment
    from launch.pause import let_go_on

    name, overrides = _split_run(context.args)
    changed_settings.check(overrides)
    run_directory = _find_run(name)
    if run_directory.is_locked():
        if overrides:
            raise UsageError(
                f"the run {run_directory.root} is in use by another process: end that one (Ctrl-C) "
                "before settings are changed"
            )
        _execute(let_go_on(run_directory))
        console.print(f"the run {run_directory.root} goes on", highlight=False, soft_wrap=True)
        return
    recipe = _recipe_of(run_directory, overrides)
    run_directory.check_records()
    deployment = Deployment(recipe, run_directory)
    run_directory.create()
    _job(recipe, run_directory, deployment, overrides)


@app.command(context_settings=_EXTRA)
def replay(
    context: typer.Context,
    name: Annotated[
        str, typer.Option(help="Folder below the run's replays/; default: the time.")
    ] = "",
    steps: Annotated[
        int, typer.Option(min=0, help="Replays the first STEPS only; 0: all that were recorded.")
    ] = 0,
) -> None:
    """Trains a run's RL stage again from its recorded batches and compares: `[RUN] [--trainer.field=value ...]`.

    No engines, no sandboxes. With the run's settings every step must be equal bit for bit; with
    others the differences are shown. The default run is the newest.
    """
    from launch.replay import check_overrides
    from launch.replay import replay as replay_run

    run_name, overrides = _split_run(context.args)
    check_overrides(overrides)
    run_directory = _find_run(run_name, "metrics/rl.jsonl")
    recipe = _recipe_of(run_directory, overrides)
    name = name or time.strftime("%Y%m%d-%H%M%S")
    _execute(
        replay_run(
            run_directory, recipe, name=name, num_steps=steps, overrides=overrides, console=console
        )
    )


@app.command(name="eval")
def evaluate(
    tasks: Annotated[
        str, typer.Option(help="`pypi`, `toy`, or the path of an index.json.")
    ] = "pypi",
    agent: Annotated[
        str, typer.Option(help="`oracle` (applies the gold patch), `nop`, or `mini` (the policy).")
    ] = "mini",
    run_name: Annotated[
        str,
        typer.Option("--run", help="Run whose exported model `mini` uses; default: the newest."),
    ] = "",
    attempts: Annotated[int, typer.Option(min=1, help="Attempts a task.")] = 1,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 1.0,
) -> None:
    """Evaluates an agent on a task set and prints pass@1 and the causes."""
    from launch.standalone import evaluate_tasks

    exported = "export/config.json"
    model = _find_run(run_name, exported).export if agent == "mini" else None
    _execute(
        evaluate_tasks(
            workdir=_workdir(), tasks=tasks, agent=agent, model=model, attempts=attempts,
            temperature=temperature, console=console,
        )
    )  # fmt: skip


@app.command()
def report(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Names below runs/, or paths; default: the newest run."),
    ] = None,
) -> None:
    """Writes report.html of a run again; of several runs, one page with them side by side."""
    from launch.report.compare import write_comparison
    from launch.report.page import write_report

    runs = [_find_run(name) for name in names or [""]]
    for run_directory in runs:
        _refresh_attempts(run_directory)
    roots = [run_directory.root for run_directory in runs]
    path = write_report(roots[0]) if len(roots) == 1 else write_comparison(roots)
    console.print(f"report: {path}", highlight=False, soft_wrap=True)


@tasks_app.command(name="build")
def tasks_build(
    out: Annotated[Path, typer.Argument(help="Folder for the task folders and index.json.")],
) -> None:
    """Builds the PyPI bug tasks (real packages, injected bugs) as Harbor task folders."""
    from launch.standalone import build_pypi

    _execute(build_pypi((_workdir() / out).absolute(), console))


@tasks_app.command(name="validate")
def tasks_validate(
    index: Annotated[
        Path | None, typer.Option(help="index.json of a task set; default: the PyPI tasks.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--json", help="Write the result of each task here.")
    ] = None,
) -> None:
    """Runs the gold patch and no patch three times each; quarantines what is not 1.0 and 0.0."""
    from launch.standalone import validate_tasks

    given = (_workdir() / index).absolute() if index else None
    _execute(
        validate_tasks(_workdir(), given, (_workdir() / out).absolute() if out else None, console)
    )


def _job(recipe: Any, run_directory: Any, deployment: Any, overrides: Sequence[str] = ()) -> None:
    from launch import changed_settings
    from launch.job import Job

    run_directory.lock()
    try:
        if overrides:
            changed_settings.apply(run_directory, recipe, overrides)
        console.print(f"run: {run_directory.root}", highlight=False, soft_wrap=True)
        try:
            _execute(Job(recipe, run_directory, deployment, console).run())
        except typer.Exit:
            name = run_directory.root.name
            console.print(f"interrupted: `swe_rl resume {name}` goes on with it", highlight=False)
            raise
        finally:
            _show(run_directory)
    finally:
        run_directory.unlock()


def _recipe_of(run_directory: Any, overrides: Sequence[str]) -> Any:
    """The recipe that a run was started with. Raises UsageError, also when it is not whole."""
    from launch.recipe import load_recipe

    _, recipe = load_recipe(str(run_directory.config), overrides)
    if not recipe.model_fields_set >= {"run", "rl", "trainer"}:
        raise UsageError(
            f"{run_directory.config} is not whole: put back a copy, or start another run"
        )
    return recipe


def _show(run_directory: Any) -> None:
    """Report and table; a report that cannot be written must not hide why the job ended."""
    from launch.report.page import write_report
    from launch.summary import print_summary

    _refresh_attempts(run_directory)
    try:
        path = str(write_report(run_directory.root))
    except OSError as error:
        path = f"not written: {error.strerror}"
    print_summary(run_directory, console)
    console.print(f"report: {path}", highlight=False, soft_wrap=True)


def _refresh_attempts(run_directory: Any) -> None:
    """Brings the attempts of an unfinished run into metrics/; without them there is still a report."""
    from launch.attempt_rows import refresh_from_ledger

    try:
        asyncio.run(refresh_from_ledger(run_directory))
    except (LaunchError, OSError) as error:
        console.print(f"attempts not read: {error}", style="yellow", soft_wrap=True)


def _find_run(name: str, holding: str = "config.toml") -> Any:
    """The named run, or the newest one that has the file `holding`. Raises UsageError."""
    from launch.run_directory import RunDirectory

    if name:
        candidates = [_workdir() / name, _workdir() / "runs" / name]
        found = [path for path in candidates if (path / "config.toml").exists()]
        if not found:
            raise UsageError(
                f"no run {name!r}: looked for config.toml in {' and '.join(map(str, candidates))}"
            )
        return RunDirectory(found[0].absolute())
    runs = [path.parent for path in (_workdir() / "runs").glob("*/config.toml")]
    runs = sorted(
        (root for root in runs if (root / holding).exists()),
        key=lambda root: (root / "config.toml").stat().st_mtime,
    )
    if not runs:
        raise UsageError(
            f"no run below {_workdir() / 'runs'} with {holding}: `swe_rl run` makes one"
        )
    return RunDirectory(runs[-1].absolute())


def main() -> int:
    """Entry point; returns the exit code."""
    arguments = sys.argv[1:]
    if not arguments or (arguments[0] not in _COMMANDS and arguments[0] not in ("--help", "-h")):
        arguments = ["run", *arguments]
    try:
        # Without standalone mode, typer hands the code of an Exit back instead of exiting.
        result = app(arguments, standalone_mode=False)
    except LaunchError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
    except (typer.Abort, KeyboardInterrupt):
        return 130
    except OSError as error:
        if error.errno in _DISK_ERRORS:
            advice = (
                "make room, then go on with `swe_rl resume`, or start again if it had not begun"
            )
        elif error.filename is not None:
            advice = "see what it is and who may use it"
        else:
            raise
        print(f"error: {error}: {advice}", file=sys.stderr)
        return 1
    except Exception as error:
        # typer's own usage errors (click's) carry a message and a code, and deserve no traceback.
        if not hasattr(error, "format_message"):
            raise
        if message := error.format_message():  # a bare group has printed its help instead
            print(f"error: {message}", file=sys.stderr)
        return 2
    return result if isinstance(result, int) else 0


if __name__ == "__main__":
    sys.exit(main())
