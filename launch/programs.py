"""Runs the one-shot programs that prepare a run: tasks, tokenizer, sequences, weights, layers.

Owner: `launch`. Each is a module of the package that owns its subject, started in the main
environment; its output is taken over only when it ended well.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from launch.descendants import dying_with_parent
from launch.errors import JobFailed
from launch.recipe import Recipe
from launch.run_directory import RunDirectory

_TIMEOUT_S = 900.0


async def run_program(
    module: str, *arguments: object, log: Path, timeout_s: float = _TIMEOUT_S
) -> str:
    """Runs `python -m module arguments` and returns its stdout.

    Raises JobFailed with its last line of stderr, or at the deadline.
    """
    process = await asyncio.create_subprocess_exec(
        *dying_with_parent([sys.executable, "-P", "-m", module, *map(str, arguments)]),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), timeout_s)
    except TimeoutError as error:
        raise JobFailed(f"{module} did not end within {timeout_s:.0f} s") from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    with log.open("ab") as file:
        file.write(f"$ {module} {' '.join(map(str, arguments))}\n".encode() + out + err)
    if process.returncode != 0:
        lines = [line for line in err.decode(errors="replace").splitlines() if line.strip()]
        reason = lines[-1].removeprefix("error: ") if lines else "it said nothing"
        raise JobFailed(f"{module} failed: {reason} (exit code {process.returncode}; log: {log})")
    return out.decode()


async def prepare(recipe: Recipe, run: RunDirectory) -> None:
    """Makes what the job needs and is not there yet; safe to call again after an interruption."""
    log, seed = run.logs / "prepare.log", recipe.run.seed
    done = run.root / "prepared"
    if done.exists():
        return
    tasks = recipe.tasks
    counts = ("--train", tasks.num_train, "--dev", tasks.num_dev, "--test", tasks.num_test)
    asked = (*counts, "--second-look", tasks.second_look_share, "--seed", seed)
    await asyncio.gather(
        layers(run, "toy"),
        run_program("rollout.tasks.toy", "--out", run.tasks, *asked, log=log),
        _model(recipe, run),
    )
    index = run.tasks / "index.json"
    for kind, stage in (("pretrain", recipe.pretrain), ("sft", recipe.sft)):
        rows = ("--kind", kind, "--rows", stage.num_rows, "--seed", seed, "--tasks", index)
        out = run.data / f"{kind}.sequences"
        await run_program(
            "rollout.traces.build", "--model", run.model, *rows, "--out", out, log=log
        )
    done.write_text("")


async def layers(run: RunDirectory, *names: str) -> None:
    """Makes the image layers `names` as links in run.layers to the cache that all runs share."""
    only = [part for name in names for part in ("--only", name)]
    await run_program(
        "rollout.tasks.layers", "--out", run.layers, *only, log=run.logs / "prepare.log"
    )


async def _model(recipe: Recipe, run: RunDirectory) -> None:
    log, seed = run.logs / "prepare.log", recipe.run.seed
    await run_program("rollout.tasks.toy_model", "--out", run.model, "--seed", seed, log=log)
    await run_program("trainer.init_model", "--model-dir", run.model, "--seed", seed, log=log)
