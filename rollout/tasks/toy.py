"""Toy tasks: generated one-bug repositories, small enough to be learned on two CPU cores.

Owner: rollout/tasks.   python -m rollout.tasks.toy --out DIR --train N --dev N --test N --seed S

The workdir holds a file of three one-line functions, one with a wrong operator, and `t.py`,
which prints `FAIL <function>`. The taught way takes three turns: `python t.py`, one sed
command, `submit`. A share of the tasks needs a second look first: their functions' names do not
tell the operator, only a comment in the file does.

Grading: tests/check.py prints what each function returns for every pair of arguments. Only
the worker knows the right values (grading.json), so nothing inside the sandbox can pass by
printing a verdict. Functions are called in one interpreter without site-packages: an import
of pytest alone would cost more than the whole trial.

Invariants: same arguments, same bytes; pools share no file name and no (function, bug) pair;
no two tasks of a pool are equal.
"""

from __future__ import annotations

import argparse
import operator
import random
import sys
import tomllib
from pathlib import Path

from rollout.tasks.harbor_task import (
    INDEX_NAME,
    IndexEntry,
    TaskError,
    TaskFolder,
    read_index,
    write_folder,
    write_index,
)
from rollout.tasks.toy_names import ARGUMENTS, POOLS, SECOND_LOOK_SHARE, ToyNames, ToyTask

_TEST_SH = "#!/bin/sh\nexec python3 -S -B -E /tests/check.py\n"
_SEED_STRIDE = 1_000_003


def test_source(task: ToyTask) -> str:
    """Text of t.py, the test that the agent may run: prints `FAIL <function>` or nothing."""
    module = task.file.removesuffix(".py")
    lines = [f"import {module}", f"P = {list(ARGUMENTS)!r}"]
    for name in task.functions:
        lines.append(
            f"if [{module}.{name}(a, b) for a, b in P] != [a {task.operator_of(name)} b for a, b in P]:"
            f' print("FAIL {name}")'
        )
    return "\n".join(lines) + "\n"


def check_source(task: ToyTask) -> str:
    """Text of tests/check.py: prints each function's values, and holds no answer."""
    module = task.file.removesuffix(".py")
    return (
        "import sys\n"
        'sys.path.insert(0, sys.argv[1] if len(sys.argv) > 1 else "/app")\n'
        f"import {module} as module\n"
        f"P = {list(ARGUMENTS)!r}\n"
        f"for name in {list(task.functions)!r}:\n"
        "    print(name, *[getattr(module, name)(a, b) for a, b in P])\n"
    )


def expected_output(task: ToyTask) -> str:
    """What check.py prints when every function is right."""
    lines = []
    for name, word in zip(task.functions, task.words, strict=True):
        function = getattr(operator, word)  # operators' words are the module's names
        lines.append(" ".join([name, *(str(function(a, b)) for a, b in ARGUMENTS)]))
    return "\n".join(lines) + "\n"


def task_folder(task_id: str, task: ToyTask, names_seed: int) -> TaskFolder:
    """The Harbor folder of `task`."""
    return TaskFolder(
        task_id=task_id,
        instruction=task.instruction,
        image="toy",
        profile="toy",
        environment={task.file: task.source().encode(), "t.py": test_source(task).encode()},
        grading={"kind": "stdout", "expect": expected_output(task), "restore": ["t.py"]},
        test_sh=_TEST_SH,
        solve_sh=f"#!/bin/sh\ncd /app\n{task.fix}\n",
        tests={"check.py": check_source(task).encode()},
        solution={},
        metadata={
            "family": "toy",
            "pool": task.pool,
            "names_seed": names_seed,
            "file": task.file,
            "functions": list(task.functions),
            "words": list(task.words),
            "bug": task.bug,
            "wrong": task.wrong,
        },
        agent_timeout_s=60.0,
        verifier_timeout_s=20.0,
        memory_mb=256,
    )


def generate(
    seed: int, sizes: dict[str, int], second_look_share: float = SECOND_LOOK_SHARE
) -> dict[str, list[ToyTask]]:
    """Draws `sizes[pool]` different tasks for each pool.

    Of each pool, `second_look_share` (rounded) need a second look. Raises TaskError if there are
    too few different tasks.
    """
    names = ToyNames(seed)
    pools: dict[str, list[ToyTask]] = {}
    for number, pool in enumerate(POOLS):
        rng = random.Random(seed * _SEED_STRIDE + number)
        second_look = [i < round(second_look_share * sizes[pool]) for i in range(sizes[pool])]
        rng.shuffle(second_look)
        drawn: dict[ToyTask, None] = {}
        for _ in range(20 * sizes[pool] + 20):
            if len(drawn) == sizes[pool]:
                break
            drawn.setdefault(names.sample(rng, pool, second_look[len(drawn)]))
        if len(drawn) < sizes[pool]:
            raise TaskError(f"pool {pool} holds fewer than {sizes[pool]} different tasks; ask less")
        pools[pool] = list(drawn)
    return pools


def write_tasks(
    out: Path, seed: int, sizes: dict[str, int], second_look_share: float = SECOND_LOOK_SHARE
) -> Path:
    """Writes folders and index.json below `out`; returns the index's path."""
    entries = []
    for pool, tasks in generate(seed, sizes, second_look_share).items():
        for number, task in enumerate(tasks):
            task_id = f"toy-{seed}-{pool}-{number:04d}"
            folder = write_folder(out / pool, task_folder(task_id, task, seed))
            entries.append(IndexEntry(task_id, folder, pool))
    write_index(out / INDEX_NAME, entries)
    return out / INDEX_NAME


def read_tasks(index: Path) -> tuple[int, list[ToyTask]]:
    """(names seed, tasks) of an index of toy tasks, in index order.

    Raises TaskError when a folder is not a toy task, or seeds differ.
    """
    tasks, seeds = [], set()
    for entry in read_index(index):
        with (entry.path / "task.toml").open("rb") as file:
            data = tomllib.load(file).get("metadata", {})
        if data.get("family") != "toy":
            raise TaskError(f"task {entry.task_id} of {index} is not a toy task")
        seeds.add(int(data["names_seed"]))
        functions, words = tuple(data["functions"]), tuple(data["words"])
        task = ToyTask(data["pool"], data["file"], functions, words, data["bug"], data["wrong"])
        tasks.append(task)
    if len(seeds) != 1:
        raise TaskError(f"{index} mixes toy tasks of seeds {sorted(seeds)}; wanted one seed")
    return seeds.pop(), tasks


def main(argv: list[str] | None = None) -> int:
    """Command line; prints the index's path."""
    parser = argparse.ArgumentParser(prog="python -m rollout.tasks.toy", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--train", type=int, default=400, help="tasks to train on")
    parser.add_argument("--dev", type=int, default=64, help="tasks that choose a checkpoint")
    parser.add_argument("--test", type=int, default=64, help="held-out tasks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--second-look",
        type=float,
        default=SECOND_LOOK_SHARE,
        help="share that needs a second look",
    )
    args = parser.parse_args(argv)
    if not 0 <= args.second_look <= 1:
        parser.error(f"--second-look is {args.second_look}; wanted a share from 0 to 1")
    sizes = {"train": args.train, "dev": args.dev, "test": args.test}
    try:
        index = write_tasks(args.out, args.seed, sizes, args.second_look)
    except (TaskError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(index)
    return 0


if __name__ == "__main__":
    sys.exit(main())
