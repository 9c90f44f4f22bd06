"""A run directory without room: one line says so, and what is done is kept."""

from __future__ import annotations

import subprocess

import pytest

from tests.command import swe_rl


@pytest.fixture(name="small")
def small_fixture(tmp_path):
    """A folder that holds one megabyte: less than the prepared files need."""
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], check=True, timeout=10
    )
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, timeout=10)


def test_a_full_disk_is_told_in_one_line(small, tmp_path):
    outcome = swe_rl(tmp_path, "@", "smoke", "--run.name=d", "--run.directory=small", timeout_s=60)
    assert outcome.code != 0
    text = outcome.out + outcome.err
    assert "Traceback" not in text, text
    assert "No space left" in outcome.err
    assert len([line for line in outcome.err.splitlines() if line.startswith("error: ")]) == 1
    assert outcome.left == {}
