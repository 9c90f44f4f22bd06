"""Training rows: the proven design's lengths, masks and mixture; nothing held out is taught."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from proto.trajectory_pb2 import TokenSequence
from rollout.client import read_sequences
from rollout.gateway.chat_template import ChatTemplate
from rollout.tasks.toy import read_tasks, write_tasks
from rollout.tasks.toy_model import write_model_dir
from rollout.tasks.toy_names import ToyNames
from rollout.traces.build import main
from rollout.traces.records import RowTooLong, training_record
from rollout.traces.toy_rows import noisy_trace, pretraining_row, taught_trace


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("inputs")
    write_model_dir(folder / "model", seed=0)
    index = write_tasks(folder / "tasks", 0, {"train": 20, "dev": 4, "test": 4})
    return folder / "model", index


def _build(inputs: tuple[Path, Path], out: Path, kind: str, rows: int = 200) -> list[TokenSequence]:
    model, index = inputs
    args = ["--model", str(model), "--kind", kind, "--rows", str(rows), "--seed", "3"]
    assert main([*args, "--tasks", str(index), "--out", str(out)]) == 0
    return list(read_sequences(out))


def test_sft_rows_are_taught_traces_of_train_tasks(
    inputs: tuple[Path, Path], tmp_path: Path
) -> None:
    template = ChatTemplate.load(inputs[0])
    _, tasks = read_tasks(inputs[1])
    taught = {str(template.render_training(taught_trace(t))[0]) for t in tasks if t.pool == "train"}
    rows = _build(inputs, tmp_path / "sft", "sft", rows=25)
    assert len(rows) == 25
    lengths = set()
    for row in rows:
        ids = np.frombuffer(row.token_ids, "<i4")
        mask = np.frombuffer(row.loss_mask, np.uint8)
        assert len(ids) == len(mask)
        lengths.add((len(ids), int(mask.sum())))
        assert str(ids.tolist()) in taught
        assert mask[-1] == 1 and ids[-1] == 2 and mask[0] == 0
        assert not row.rollout_logprobs and not row.HasField("reward")
    # Trained: 4 + 22 + 1 ids of the commands and their 3 ends; a second look adds 10 + 1, and the
    # line that it shows to what is not trained.
    assert lengths == {(61, 30), (92, 41)}


def test_every_train_task_is_taught_before_one_repeats(
    inputs: tuple[Path, Path], tmp_path: Path
) -> None:
    rows = _build(inputs, tmp_path / "sft", "sft", rows=20)
    assert len({row.token_ids for row in rows}) == 20


def test_pretraining_rows(inputs: tuple[Path, Path], tmp_path: Path) -> None:
    rows = _build(inputs, tmp_path / "a", "pretrain")
    assert len(rows) == 200
    assert max(len(row.loss_mask) for row in rows) <= 100
    _build(inputs, tmp_path / "b", "pretrain")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_pretraining_mixture_is_the_proven_one() -> None:
    names = ToyNames(0)
    rng = random.Random(0)
    rows = [pretraining_row(rng, names) for _ in range(4000)]
    copies = sum(row[-1]["content"] != "submit" for row in rows)
    assert 0.27 < copies / len(rows) < 0.33
    right = named = 0
    for _ in range(4000):
        task = names.sample(rng, "all")
        fix = noisy_trace(task, rng, names)[-3]["content"]
        right += fix.split("s/a .* b/")[1] == task.fix.split("s/a .* b/")[1]
        named += f"/{task.bug}(/" in fix and fix.endswith(" " + task.file)
    looks = {True: 0, False: 0}
    for number in range(2000):
        task = names.sample(rng, "all", number % 2 == 0)
        looks[task.second_look] += len(noisy_trace(task, rng, names)) == 8
    assert 0.45 < looks[True] / 1000 < 0.55 and 0.07 < looks[False] / 1000 < 0.13
    # A random operator is right one time in six, and the file is right too 97 % of the time.
    assert 0.38 < right / 4000 < 0.45
    assert 0.91 < named / 4000 < 0.97


def test_records_refuse_what_cannot_be_trained(inputs: tuple[Path, Path]) -> None:
    template = ChatTemplate.load(inputs[0])
    user = [{"role": "user", "content": "ok"}]
    with pytest.raises(ValueError, match="no assistant"):
        training_record(template, user, row_id="r", task_id="")
    with pytest.raises(RowTooLong, match="at most 3"):
        messages = [*user, {"role": "assistant", "content": "submit"}]
        training_record(template, messages, row_id="r", task_id="", max_tokens=3)


def test_missing_inputs_are_one_line(
    inputs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["--kind", "sft", "--rows", "1", "--out", str(tmp_path / "x")]
    bad_model = ["--model", str(tmp_path), "--tasks", str(inputs[1])]
    bad_tasks = ["--model", str(inputs[0]), "--tasks", str(tmp_path / "none")]
    for more in (bad_model, bad_tasks):
        assert main([*args, *more]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1
