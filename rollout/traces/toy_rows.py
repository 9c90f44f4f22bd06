"""Toy conversations to pre-train and SFT-train on, as message lists.

Owner: rollout/traces. Three kinds:
  taught  the turns that solve a task: run the test, in tasks that need it a second look at the
          file, the right sed, submit;
  noisy   the same form with a random operator most of the time, a second look or none as it
          falls, and rarely a wrong name: the form of the work without its knowledge, for
          pre-training;
  copy    names that recur from message to message, as in listings and logs. Copying appears
          late and at a moment that differs by seed; a third of such rows brings it early.
"""

from __future__ import annotations

import random

from rollout.tasks.toy_names import OPERATORS, SECOND_LOOK_SHARE, ToyNames, ToyTask, fix_command

Message = dict[str, str]

# Share of rows of pre-training text that are copy rows, and the noise of the others: how
# often the operator is the function's own (else any of the six), a name the task's, and how
# often the file is looked at in a task that needs it and in one that does not.
COPY_SHARE = 0.3
RIGHT_OPERATOR = 0.3
RIGHT_NAME = 0.97
LOOKS = 0.5
LOOKS_NEEDLESSLY = 0.1


def taught_trace(task: ToyTask) -> list[Message]:
    """The conversation that solves `task`."""
    return _trace(task, task.fix, look=task.second_look)


def noisy_trace(
    task: ToyTask,
    rng: random.Random,
    names: ToyNames,
    right_operator: float = RIGHT_OPERATOR,
    right_name: float = RIGHT_NAME,
) -> list[Message]:
    """`taught_trace` with the look, the fix's function, operator and file each kept by chance."""
    look = rng.random() < (LOOKS if task.second_look else LOOKS_NEEDLESSLY)
    function = task.bug if rng.random() < right_name else names.function(rng, task.pool)
    operator = task.operator_of(task.bug)
    if rng.random() >= right_operator:
        operator = rng.choice(list(OPERATORS.values()))
    file = task.file if rng.random() < right_name else names.file(rng, task.pool)
    return _trace(task, fix_command(function, operator, file), look)


def copy_trace(rng: random.Random, names: ToyNames, pool: str) -> list[Message]:
    """A conversation in which one name recurs."""
    if rng.random() < 0.5:
        file = names.file(rng, pool)
        return _alternate(
            f"Tests of {file} fail. Fix it.",
            f"sed -i '{file}' {file}",
            f"sed: can't read {file}",
            f"cat {file}",
            "ok",
            f"python {file}",
        )
    name = names.function(rng, pool)
    return _alternate(
        f"FAIL {name}",
        f"sed -i '/{name}(/s/{name}/",
        f"FAIL {name}",
        f"grep '{name}(' {name}",
        f"def {name}(a, b)",
        f"sed -i '/{name}(/s/a",
    )


def pretraining_row(rng: random.Random, names: ToyNames, pool: str = "all") -> list[Message]:
    """One row of pre-training text."""
    if rng.random() < COPY_SHARE:
        return copy_trace(rng, names, pool)
    second_look = rng.random() < SECOND_LOOK_SHARE
    return noisy_trace(names.sample(rng, pool, second_look), rng, names)


def _trace(task: ToyTask, fix: str, look: bool) -> list[Message]:
    looking = (task.look, task.line(task.bug)) if look else ()
    said = f"FAIL {task.bug}"
    return _alternate(task.instruction, "python t.py", said, *looking, fix, "ok", "submit")


def _alternate(*contents: str) -> list[Message]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]
