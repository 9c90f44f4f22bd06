"""Names of the toy tasks: two-word stems, split into pools that share nothing.

Owner: rollout/tasks. A file is called `STEM.py`; a function `OP_STEM`, where OP names the
operator it ought to use. In a task that needs a second look functions are called `fn_STEM`, and
only a comment on their line names the operator: the failing test does not tell what is right,
the file does. Each word becomes one token of the toy tokenizer, so copying a name costs the
policy four choices and picking the operator one.

Invariants: for one `seed`, file stems and function stems are fixed; the pools train, dev and
test are disjoint in both, hence no file name and no (function, bug) pair is shared. "all" is
their union and serves text for pre-training only.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

# Operators by the word that begins a function's name. None is special to sed: `/` or `&` in
# a substitution would make the taught fix wrong.
OPERATORS: dict[str, str] = {"add": "+", "sub": "-", "mul": "*", "mod": "%", "lt": "<", "gt": ">"}
# Arguments that tests call every function with; each pair of operators differs on some.
ARGUMENTS: tuple[tuple[int, int], ...] = tuple((a, b) for a in range(-3, 6) for b in range(1, 6))
POOLS = ("train", "dev", "test")

_FIRST_WORDS = (
    "red old big hot dry raw low shy odd new wet fat sad mad far bad icy dim tan fit wry sly coy apt"
).split()
_SECOND_WORDS = (
    "box car cat dog sun map key pen jar cup hat bus log net oak pig rug sea tea van web zoo arm bed"
).split()
# Of the 576 stems, those in use: half train, an eighth dev, an eighth test. The last quarter
# occurs in pre-training text alone.
_NUM_STEMS = 400


# Share of tasks that need a second look, where nothing else is asked for.
SECOND_LOOK_SHARE = 0.4
# Begins the names of functions whose operator stands in the comment alone.
UNTOLD = "fn"


@dataclass(frozen=True)
class ToyTask:
    """One repository of three one-line functions, one of which has a wrong operator."""

    pool: str
    """train, dev or test; "all" for text that is no task."""
    file: str
    """File name, `red_box.py`."""
    functions: tuple[str, ...]
    """Three names, in file order."""
    words: tuple[str, ...]
    """The three different operators, by their words, that the functions ought to use."""
    bug: str
    """The function that is wrong; one of `functions`."""
    wrong: str
    """The operator that stands there."""

    @property
    def second_look(self) -> bool:
        """True when the bug's operator is told by the file alone, not by the function's name."""
        return self.bug.startswith(f"{UNTOLD}_")

    def operator_of(self, function: str) -> str:
        """The operator that `function` ought to use."""
        return OPERATORS[self.words[self.functions.index(function)]]

    def line(self, function: str, fixed: bool = False) -> str:
        """The line of the file that defines `function`."""
        operator = self.wrong if function == self.bug and not fixed else self.operator_of(function)
        word = self.words[self.functions.index(function)]
        comment = f" # {word}" if function.startswith(f"{UNTOLD}_") else ""
        return f"def {function}(a, b): return a {operator} b{comment}"

    def source(self, fixed: bool = False) -> str:
        """Text of the file; with `fixed` every operator is right."""
        return "".join(f"{self.line(name, fixed)}\n" for name in self.functions)

    @property
    def instruction(self) -> str:
        """What the agent is told."""
        return f"Tests of {self.file} fail. Fix it."

    @property
    def fix(self) -> str:
        """The taught command that repairs the file."""
        return fix_command(self.bug, self.operator_of(self.bug), self.file)

    @property
    def look(self) -> str:
        """The taught command that shows the bug's line."""
        return look_command(self.bug, self.file)


def fix_command(function: str, operator: str, file: str) -> str:
    """The sed command that puts `operator` into `function` of `file`."""
    return f"sed -i '/{function}(/s/a .* b/a {operator} b/' {file}"


def look_command(function: str, file: str) -> str:
    """The command that shows the line of `file` that defines `function`."""
    return f"grep '{function}(' {file}"


class ToyNames:
    """Pools of file stems and function stems for one seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.files = _split(100 + seed)
        self.stems = _split(200 + seed)

    def sample(self, rng: random.Random, pool: str, second_look: bool = False) -> ToyTask:
        """Draws a task with names of `pool` (a pool, or "all")."""
        words = rng.sample(list(OPERATORS), 3)
        stems = rng.sample(self.stems[pool], 3)
        heads = [UNTOLD] * 3 if second_look else words
        functions = tuple(f"{head}_{stem}" for head, stem in zip(heads, stems, strict=True))
        at = rng.randrange(3)
        wrong = rng.choice([o for o in OPERATORS.values() if o != OPERATORS[words[at]]])
        file = self.file(rng, pool)
        return ToyTask(pool, file, functions, tuple(words), functions[at], wrong)

    def file(self, rng: random.Random, pool: str) -> str:
        """Draws a file name."""
        return rng.choice(self.files[pool]) + ".py"

    def function(self, rng: random.Random, pool: str) -> str:
        """Draws a function name."""
        head = rng.choice([*OPERATORS, UNTOLD])
        return f"{head}_{rng.choice(self.stems[pool])}"


def _split(seed: int) -> dict[str, list[str]]:
    stems = [f"{first}_{second}" for first in _FIRST_WORDS for second in _SECOND_WORDS]
    random.Random(seed).shuffle(stems)
    half, eighth = _NUM_STEMS // 2, _NUM_STEMS // 8
    return {
        "train": stems[:half],
        "dev": stems[half : half + eighth],
        "test": stems[half + eighth : half + 2 * eighth],
        "all": stems[:_NUM_STEMS],
    }
