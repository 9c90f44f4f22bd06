"""Updates between versions, over resumes and lost publications."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from trainer.version_steps import VersionSteps


def aged(steps: VersionSteps, versions: list[int], now: int) -> list[int]:
    return steps.aged(np.asarray(versions, np.int64), now).tolist()


def test_versions_of_one_process_are_one_update_apart(tmp_path: Path) -> None:
    steps = VersionSteps(tmp_path / "versions.jsonl")
    for version in (1, 2, 3):
        steps.add(version, version - 1)
    assert aged(steps, [1, 3, 2, 1], 3) == [1, 3, 2, 1]
    assert aged(steps, [0, 3], 3) == [0, 3], "0 stands for tokens that were not sampled"


def test_a_publication_without_an_update_ages_nothing(tmp_path: Path) -> None:
    steps = VersionSteps(tmp_path / "versions.jsonl")
    for version, num_updates in ((1, 0), (2, 1), (3, 1), (4, 1), (5, 2)):
        steps.add(version, num_updates)
    assert aged(steps, [1, 2, 3, 4, 5], 5) == [3, 4, 4, 4, 5]


def test_a_resume_ages_by_what_was_lost_and_done_again(tmp_path: Path) -> None:
    """Updates 1 to 3 were published as 2 to 4; the checkpoint holds 2 of them, as version 3."""
    path = tmp_path / "versions.jsonl"
    first = VersionSteps(path)
    for version in (1, 2, 3, 4):
        first.add(version, version - 1)
    again = VersionSteps(path, from_version=3)
    again.add(5, 0)
    assert aged(again, [1, 2, 3, 4], 5) == [3, 4, 5, 4], "version 4 is one update ahead"
    again.add(6, 1)
    # Version 4 and 6 are both one update after version 3, and two from each other.
    assert aged(again, [3, 4, 5], 6) == [5, 4, 5]
    third = VersionSteps(path, from_version=6)
    third.add(9, 0)
    assert aged(third, [3, 4, 5, 6], 9) == [8, 7, 8, 9]
    assert third.distance(4, 2) == 2


def test_the_end_of_the_file_may_be_torn(tmp_path: Path) -> None:
    path = tmp_path / "versions.jsonl"
    VersionSteps(path).add(1, 0)
    with path.open("a") as file:
        file.write('{"weight_version": 2, "upd')
    steps = VersionSteps(path, from_version=1)
    with pytest.raises(KeyError):
        steps.distance(1, 2)
    assert aged(steps, [1], 2) == [1], "a run without a record counts versions"


def test_branches_without_a_checkpoint_part_at_the_beginning(tmp_path: Path) -> None:
    path = tmp_path / "versions.jsonl"
    VersionSteps(path).add(1, 2)
    again = VersionSteps(path)
    again.add(2, 3)
    assert again.distance(1, 2) == 5


def test_a_line_that_a_crash_cut_does_not_hide_the_version_after_it(tmp_path: Path) -> None:
    path = tmp_path / "versions.jsonl"
    VersionSteps(path).add(1, 0)
    with path.open("a") as file:
        file.write('{"weight_version": 2, "upd')
    VersionSteps(path, 1).add(3, 0)
    again = VersionSteps(path, 3)
    again.add(4, 1)
    assert again.distance(1, 3) == 0
    assert again.distance(3, 4) == 1
