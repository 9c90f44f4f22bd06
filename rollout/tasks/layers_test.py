"""Image layers: what their scripts do, and that the cache is keyed by content."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from rollout.tasks.layers import LOCK, layer, link_layers, main


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SWE_RL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_toy_layer(tmp_path: Path) -> None:
    binaries = link_layers(tmp_path / "out", ["toy"])["toy"] / "usr/local/bin"
    run = subprocess.run([binaries / "submit"], capture_output=True, text=True, check=True)
    assert run.stdout == "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n"
    code = "import sys; print(sys.flags.no_site, sys.argv[1])"
    run = subprocess.run(
        [binaries / "python", "-c", code, "a b"], capture_output=True, text=True, check=True
    )
    assert run.stdout == "1 a b\n"


def test_layer_is_made_once(cache: Path) -> None:
    first = layer("toy")
    (first / "mark").touch()
    assert layer("toy") == first
    assert (first / "mark").exists()
    assert first.parent == cache / "layers"


def test_links_replace_older_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert main(["--out", str(tmp_path / "out"), "--only", "toy"]) == 0
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["toy"]
    assert capsys.readouterr().out.startswith("toy ")


def test_lock_holds_pure_python_wheels_with_hashes() -> None:
    lines = [line for line in LOCK.read_text().splitlines() if not line.startswith("#")]
    assert {line.split("==")[0] for line in lines} >= {"pytest", "pluggy", "iniconfig", "packaging"}
    assert all("--hash=sha256:" in line for line in lines)
