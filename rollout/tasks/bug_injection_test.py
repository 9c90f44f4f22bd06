"""Injected bugs parse, differ, are small, and repeat by seed; diffs apply both ways."""

from __future__ import annotations

import ast
import difflib
from pathlib import Path

import pytest

from rollout.tasks.bug_injection import STRATEGIES, candidates, inject
from rollout.tasks.unified_diff import DiffError, apply_diff, diff_path, make_diff

SAMPLE = '''\
import math

LIMIT = 3 + 4


class Box:
    def area(self, wide, high=1, unit="é", exact=True):
        """Area: wide * high."""
        total = wide * high  # é, so that bytes and characters differ
        if not exact and total > 2:
            total += 1
        for x in range(3):
            if x == 1:
                continue
            self.log(x, "seen")
        return max(total, wide) if exact else math.floor(total)

    def log(self, *things): print(*things)
'''
REAL = Path(__file__).with_name("unified_diff.py").read_text("utf-8")


@pytest.mark.parametrize("text", [SAMPLE, REAL], ids=["sample", "real"])
def test_candidates_are_other_programs_of_the_same_form(text: str) -> None:
    found = candidates(text)
    assert found
    for bug in found:
        assert ast.dump(ast.parse(bug.source)) != ast.dump(ast.parse(text))
        old, new = text.splitlines(), bug.source.splitlines()
        changed = [line for line in difflib.unified_diff(old, new, n=0) if line[0] in "+-"]
        assert 4 <= len(changed) <= 14, changed  # two of them name the file
        assert ast.get_docstring(ast.parse(bug.source)) == ast.get_docstring(ast.parse(text))


def test_every_strategy_finds_a_site() -> None:
    assert {bug.strategy for bug in candidates(SAMPLE)} == set(STRATEGIES)


def test_bugs_name_their_function_and_leave_the_rest_alone() -> None:
    for bug in candidates(SAMPLE):
        assert bug.function in ("Box.area", "Box.log")
        assert "LIMIT = 3 + 4" in bug.source
        assert '"""Area: wide * high."""' in bug.source


@pytest.mark.parametrize(
    ("strategy", "text"),
    [
        ("operator_swap", "total = wide + high  # é"),
        ("wrong_default", 'unit=""'),
        ("wrong_default", "high=2"),
        ("condition_inversion", "if not exact else"),
        ("lost_return", "        return None\n"),
        ("swapped_arguments", 'self.log("seen", x)'),
        ("boolean_swap", "not exact or total > 2"),
        ("comparison_swap", "total >= 2"),
        ("off_by_one", "range(4)"),
        ("removed_line", "                pass\n"),
    ],
)
def test_what_a_strategy_writes(strategy: str, text: str) -> None:
    assert any(text in b.source for b in candidates(SAMPLE) if b.strategy == strategy)


def test_seed_decides() -> None:
    bugs = [inject(REAL, seed) for seed in range(20)]
    assert bugs == [inject(REAL, seed) for seed in range(20)]
    assert len(set(bugs)) > 10
    assert inject("x = 1 + 2\n", 0) is None


def test_diff_applies_and_reverses() -> None:
    for bug in candidates(REAL)[::7]:
        diff = make_diff("a/b.py", REAL, bug.source)
        assert diff_path(diff) == "a/b.py"
        assert apply_diff(REAL, diff) == bug.source
        assert apply_diff(bug.source, diff, reverse=True) == REAL


def test_diff_at_both_ends_of_a_file() -> None:
    for old, new in (("a\nb\n", "x\na\nb\ny\n"), ("x\na\n", "a\n"), ("a\n", "")):
        diff = make_diff("f", old, new)
        assert apply_diff(old, diff) == new
        assert apply_diff(new, diff, reverse=True) == old


def test_diff_that_does_not_fit() -> None:
    diff = make_diff("f", "a\nb\n", "a\nc\n")
    with pytest.raises(DiffError, match="line 2"):
        apply_diff("a\nx\n", diff)
    with pytest.raises(DiffError, match="starts with"):
        apply_diff("a\n", "nonsense")
