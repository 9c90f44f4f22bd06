"""Builds pre-training and SFT data from toy tasks.

Owner: rollout/traces.
  python -m rollout.traces.build --model MODEL_DIR --kind pretrain|sft --rows N --seed S \\
      --tasks INDEX --out FILE.sequences

`pretrain` draws noisy and copy rows over all names of the index's name seed; `sft` writes the
taught trace of the index's train tasks, in a random order and again from the start when N
exceeds them. Held-out tasks are never taught.

Invariants: same arguments, same bytes; the file appears whole.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator
from pathlib import Path

from proto import trajectory_pb2
from rollout.client import write_sequences
from rollout.gateway.chat_template import ChatTemplate, ChatTemplateError
from rollout.tasks.harbor_task import TaskError
from rollout.tasks.toy import read_tasks
from rollout.tasks.toy_names import ToyNames
from rollout.traces.records import training_record
from rollout.traces.toy_rows import pretraining_row, taught_trace


def pretraining_records(
    template: ChatTemplate, names: ToyNames, rows: int, seed: int
) -> Iterator[trajectory_pb2.TokenSequence]:
    """`rows` records of pre-training text."""
    rng = random.Random(seed + 5)
    for number in range(rows):
        messages = pretraining_row(rng, names)
        yield training_record(template, messages, row_id=f"pretrain-{number}", task_id="")


def sft_records(
    template: ChatTemplate, index: Path, rows: int, seed: int
) -> Iterator[trajectory_pb2.TokenSequence]:
    """`rows` taught traces of the train tasks of `index`. Raises TaskError if it has none."""
    _, tasks = read_tasks(index)
    train = [task for task in tasks if task.pool == "train"]
    if not train:
        raise TaskError(f"{index} has no task in pool train; SFT teaches no other")
    random.Random(seed + 6).shuffle(train)
    for number in range(rows):
        task = train[number % len(train)]
        yield training_record(
            template, taught_trace(task), row_id=f"sft-{number}", task_id=f"toy:{task.bug}"
        )


def build(model: Path, kind: str, rows: int, seed: int, index: Path, out: Path) -> None:
    """Writes one file; see the module's text. Raises TaskError, ChatTemplateError, OSError."""
    template = ChatTemplate.load(model)
    if kind == "sft":
        records = sft_records(template, index, rows, seed)
    else:
        names_seed, _ = read_tasks(index)
        records = pretraining_records(template, ToyNames(names_seed), rows, seed)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_sequences(out, records)


def main(argv: list[str] | None = None) -> int:
    """Command line; prints the file's path."""
    parser = argparse.ArgumentParser(prog="python -m rollout.traces.build", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", type=Path, required=True, help="folder with the tokenizer")
    parser.add_argument("--kind", choices=("pretrain", "sft"), required=True)
    parser.add_argument("--rows", type=int, required=True, help="conversations to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tasks", type=Path, required=True, help="index.json of toy tasks")
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    args = parser.parse_args(argv)
    if args.rows <= 0:
        parser.error(f"--rows is {args.rows}; wanted a positive number")
    try:
        build(args.model, args.kind, args.rows, args.seed, args.tasks, args.out)
    except (TaskError, ChatTemplateError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
