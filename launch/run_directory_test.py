"""A run's folder: what is written is whole, and what is gone is told before it is made anew."""

from __future__ import annotations

import errno
import os

import pytest

from launch import ports
from launch.errors import UsageError
from launch.run_directory import RunDirectory, write_json, write_text

STAGES = [{"name": "prepare"}, {"name": "pretrain"}]


def test_a_text_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "config.toml"
    write_text(path, "old")

    def full(_descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("content", [None, b""], ids=["missing", "empty"])
def test_a_ledger_that_is_gone_is_told_once_a_run_has_begun(tmp_path, content):
    run = RunDirectory(tmp_path)
    if content is not None:
        run.ledger.write_bytes(content)
    run.check_records()
    run.save_state({"stages": STAGES[:1]})
    run.check_records()
    run.save_state({"stages": STAGES})
    with pytest.raises(UsageError, match=r"ledger\.db is missing or empty, but .* pretrain"):
        run.check_records()
    run.ledger.with_name("ledger.db-wal").write_bytes(b"x")
    run.check_records()


@pytest.mark.parametrize("state", ["{", "3", '{"stages": 3}', '{"changed_settings": 5}'])
def test_a_state_that_is_none_is_one_clear_error(tmp_path, state):
    run = RunDirectory(tmp_path)
    run.state_file.write_text(state)
    with pytest.raises(UsageError, match=r"state\.json.* put back a copy, or start another run"):
        run.load_state()


def test_state_comes_back_as_it_was(tmp_path):
    run = RunDirectory(tmp_path)
    assert run.load_state() == {}
    run.save_state({"stages": STAGES})
    assert run.load_state() == {"stages": STAGES}
    write_json(run.state_file, {"finished": True})
    assert run.load_state() == {"finished": True}


def test_ports_that_do_not_exist_are_refused():
    with pytest.raises(UsageError, match="set --run.base_port to a lower base"):
        ports.choose_ports(["a", "b"], 65535)
