from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainer.line_log import LineLog


@pytest.fixture
def limit() -> Iterator[int]:
    """Files of this process, pytest's own too, hold no more than this many bytes."""
    num_bytes = 4_000_000
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    yield num_bytes
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_lines_that_do_not_fit_are_whole_once_they_do(
    tmp_path: Path, limit: int, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "log"
    log = LineLog(path)
    long = limit * 2 // 3
    log.append("a" * long)
    log.append("b" * long)
    log.append("c")
    assert path.read_text() == "a" * long + "\n"
    assert caplog.text.count("kept in memory until there is room: [Errno 27]") == 1
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (2 * limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    )
    log.append("d")
    assert path.read_text().splitlines() == ["a" * long, "b" * long, "c", "d"]
    log.close()
    assert "lost" not in caplog.text


def test_lines_that_never_fit_are_counted(
    tmp_path: Path, limit: int, caplog: pytest.LogCaptureFixture
) -> None:
    log = LineLog(tmp_path / "log")
    log.append("b" * limit)
    log.close()
    assert "1 lines are lost" in caplog.text


def test_a_line_that_a_crash_cut_does_not_take_the_next_with_it(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text('whole\n{"cu')
    log = LineLog(path)
    log.append("next")
    log.append("and one")
    assert path.read_text().splitlines() == ["whole", '{"cu', "next", "and one"]
