"""Toy tasks: pools share nothing, gold passes, the unfixed task fails, same seed same bytes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rollout.tasks.grading import GradingSpec, grade
from rollout.tasks.harbor_task import TaskError, read_index
from rollout.tasks.toy import (
    expected_output,
    generate,
    main,
    read_tasks,
    write_tasks,
)
from rollout.tasks.toy_names import ARGUMENTS, OPERATORS, POOLS, ToyNames

SIZES = {"train": 60, "dev": 12, "test": 12}


def _tree(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
    }


@pytest.mark.parametrize("seed", [0, 1, 7])
def test_pools_share_no_file_and_no_bug(seed: int) -> None:
    pools = generate(seed, {"train": 400, "dev": 64, "test": 64})
    for left in POOLS:
        for right in POOLS:
            if left < right:
                assert not {t.file for t in pools[left]} & {t.file for t in pools[right]}
                assert not {t.bug for t in pools[left]} & {t.bug for t in pools[right]}
    for tasks in pools.values():
        assert len(set(tasks)) == len(tasks)


def test_names_are_hundreds_and_all_holds_every_pool() -> None:
    names = ToyNames(3)
    assert len(names.stems["all"]) == len(names.files["all"]) == 400
    for pool in POOLS:
        assert set(names.stems[pool]) < set(names.stems["all"])
        assert set(names.files[pool]) < set(names.files["all"])


def test_operators_differ_on_the_arguments() -> None:
    values = {
        word: tuple(eval(f"a {symbol} b", {"a": a, "b": b}) for a, b in ARGUMENTS)
        for word, symbol in OPERATORS.items()
    }
    assert len(set(values.values())) == len(OPERATORS)


def test_taught_fix_has_no_sed_special() -> None:
    for tasks in generate(0, SIZES).values():
        for task in tasks:
            substitution = task.fix.split("s/a .* b/", 1)[1].split("/'", 1)[0]
            assert substitution == f"a {task.operator_of(task.bug)} b"
            assert "/" not in substitution and "&" not in substitution
            # The pattern names the bug alone, so that the command cannot touch another line.
            assert sum(f"{task.bug}(" in line for line in task.source().splitlines()) == 1


def test_a_share_of_the_tasks_needs_a_second_look(tmp_path: Path) -> None:
    pools = generate(2, {"train": 50, "dev": 10, "test": 20}, second_look_share=0.3)
    assert [sum(t.second_look for t in pools[p]) for p in POOLS] == [15, 3, 6]
    assert not any(t.second_look for ts in generate(2, SIZES, 0.0).values() for t in ts)
    for task in pools["train"]:
        told = task.words[task.functions.index(task.bug)]
        if task.second_look:
            assert not any(word in task.bug for word in OPERATORS)
            assert task.line(task.bug).endswith(f" a {task.wrong} b # {told}")
            # All of it is seen: the agent's observations are cut at 60 characters.
            assert len(task.line(task.bug)) <= 60
        else:
            assert task.bug.startswith(f"{told}_") and "#" not in task.source()
        (tmp_path / task.file).write_text(task.source())
        looked = subprocess.run(
            ["sh", "-c", task.look], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        assert looked.stdout == task.line(task.bug) + "\n"


def test_gold_passes_and_unfixed_fails(tmp_path: Path) -> None:
    index = write_tasks(tmp_path, 0, SIZES)
    _, tasks = read_tasks(index)
    for entry, task in zip(read_index(index), tasks, strict=True):
        spec = GradingSpec.load(entry.path / "tests" / "grading.json")
        assert spec.restores("t.py") and not spec.restores(task.file)
        environment = entry.path / "environment"
        check = [sys.executable, "-S", "-B", "-E", str(entry.path / "tests/check.py"), "."]
        before = subprocess.run(
            check, cwd=environment, capture_output=True, text=True, check=True
        ).stdout
        assert grade(spec, before).reward == 0.0
        solve = (entry.path / "solution/solve.sh").read_text().replace("cd /app", "")
        subprocess.run(["sh", "-c", solve], cwd=environment, check=True)
        assert (environment / task.file).read_text() == task.source(fixed=True)
        after = subprocess.run(
            check, cwd=environment, capture_output=True, text=True, check=True
        ).stdout
        assert after == expected_output(task)
        assert grade(spec, after).reward == 1.0


def test_agents_test_names_the_bug_until_it_is_fixed(tmp_path: Path) -> None:
    index = write_tasks(tmp_path, 5, {"train": 6, "dev": 1, "test": 1})
    _, tasks = read_tasks(index)
    for entry, task in zip(read_index(index), tasks, strict=True):
        environment = entry.path / "environment"
        run = [sys.executable, "-S", "-E", "-B", "t.py"]  # as the toy image's `python`
        out = subprocess.run(run, cwd=environment, capture_output=True, text=True, check=True)
        assert out.stdout == f"FAIL {task.bug}\n" and len(out.stdout) < 60
        subprocess.run(["sh", "-c", task.fix], cwd=environment, check=True)
        out = subprocess.run(run, cwd=environment, capture_output=True, text=True, check=True)
        assert out.stdout == ""


def test_same_seed_same_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", 4), ("b", 4), ("c", 5)):
        write_tasks(tmp_path / name, seed, {"train": 5, "dev": 2, "test": 2})
    assert _tree(tmp_path / "a") == _tree(tmp_path / "b")
    assert _tree(tmp_path / "a") != _tree(tmp_path / "c")


def test_answers_stay_out_of_what_a_sandbox_gets(tmp_path: Path) -> None:
    index = write_tasks(tmp_path, 0, {"train": 3, "dev": 0, "test": 0})
    _, tasks = read_tasks(index)
    for entry, task in zip(read_index(index), tasks, strict=True):
        check = (entry.path / "tests/check.py").read_text()
        assert f"a {task.operator_of(task.bug)} b" not in check
        assert "expect" in json.loads((entry.path / "tests/grading.json").read_text())


def test_read_index_explains_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="cannot be read"):
        read_index(tmp_path / "none.json")
    bad = tmp_path / "index.json"
    bad.write_text('[{"task_id": "x"}]')
    with pytest.raises(TaskError, match="malformed"):
        read_index(bad)
    bad.write_text('[{"task_id": "x", "path": "x", "pool": "train"}]')
    with pytest.raises(TaskError, match="no task.toml"):
        read_index(bad)


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--out", str(tmp_path), "--train", "2", "--dev", "1", "--test", "1"]
    assert main(args) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "index.json")
    (tmp_path / "file").write_text("")
    assert main(["--out", str(tmp_path / "file")]) == 2
    assert "error:" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*args, "--second-look", "1.5"])
    assert "wanted a share from 0 to 1" in capsys.readouterr().err
