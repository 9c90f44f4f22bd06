"""Image layers: what their scripts do, and that a mounted layer is left alone."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from rollout.tasks.layers import LOCK, main, put_layers, pypi_layer


def test_toy_layer(tmp_path: Path) -> None:
    binaries = put_layers(tmp_path / "out", ["toy"])["toy"] / "usr/local/bin"
    run = subprocess.run([binaries / "submit"], capture_output=True, text=True, check=True)
    assert run.stdout == "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n"
    code = "import sys; print(sys.flags.no_site, sys.argv[1])"
    run = subprocess.run(
        [binaries / "python", "-c", code, "a b"], capture_output=True, text=True, check=True
    )
    assert run.stdout == "1 a b\n"


def test_existing_toy_layer_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--out", str(tmp_path), "--only", "toy"]) == 0
    assert capsys.readouterr().out == f"toy {tmp_path / 'toy'}\n"
    submit = tmp_path / "toy/usr/local/bin/submit"
    before = submit.stat()
    (submit.parent / "python").write_text("other")
    assert main(["--out", str(tmp_path), "--only", "toy"]) == 0
    assert submit.stat().st_mtime_ns == before.st_mtime_ns
    assert (submit.parent / "python").read_text() != "other"


def test_pypi_layer_is_made_once_a_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWE_RL_CACHE", str(tmp_path / "cache"))
    lock = tmp_path / "empty.lock"
    lock.write_text("")
    folder = pypi_layer(lock)
    assert folder.parent == tmp_path / "cache/layers"
    (folder / "mark").touch()
    assert pypi_layer(lock) == folder
    assert (folder / "mark").exists()
    lock.write_text("# other\n")
    assert pypi_layer(lock) != folder
    python3 = (folder / "usr/local/bin/python3").read_text()
    assert python3.endswith('exec /usr/bin/python3 "$@"\n')


def test_lock_holds_pure_python_wheels_with_hashes() -> None:
    lines = [line for line in LOCK.read_text().splitlines() if not line.startswith("#")]
    assert {line.split("==")[0] for line in lines} >= {"pytest", "pluggy", "iniconfig", "packaging"}
    assert all("--hash=sha256:" in line for line in lines)
