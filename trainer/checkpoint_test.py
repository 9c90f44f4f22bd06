from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rollout.client import write_sequences
from trainer import checkpoint, testbed
from trainer.checkpoint import CheckpointStore, Progress
from trainer.checkpoint_saver import CheckpointSaver
from trainer.config import GridConfig, OptimConfig
from trainer.device import Device
from trainer.errors import BadRequestError, CorruptCheckpointError
from trainer.model import Policy
from trainer.step import Learner


def make_learner(folder: Path, device: Device) -> Learner:
    policy = Policy(folder, GridConfig(), device, seed=0)
    policy.load_hf()
    learner = Learner(policy, 1000)
    learner.begin_stage(OptimConfig(), 10, 0.0)
    return learner


def run(
    tmp_path: Path,
    name: str,
    model: Path,
    num_steps: int,
    stop_after: int,
    dtype: str = "float32",
    *,
    is_killed: bool = False,
) -> dict:
    """What the run says of itself; {} when it is killed after a save."""
    config = tmp_path / f"{name}.json"
    data = tmp_path / "data.sequences"
    if not data.exists():
        write_sequences(data, testbed.copy_rows(40))
    settings = {
        "model_dir": str(model),
        "run_dir": str(tmp_path / name),
        "dtype": dtype,
        "sft": {"batch_rows": 8, "router_aux_loss": 0.01, "optim": {"weight_decay": 0.01}},
    }
    config.write_text(json.dumps(settings))
    command = [sys.executable, "-P", "-W", "ignore", "-m", "trainer.testbed_run"]
    arguments = [str(config), str(data), str(num_steps), str(stop_after)]
    arguments += ["--kill"] if is_killed else []
    done = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == (-signal.SIGKILL if is_killed else 0), done.stderr[-2000:]
    if is_killed:
        return {}
    result: dict = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_three_steps_a_new_process_and_three_more_equal_six(
    tmp_path: Path, model_dir: Path, dtype: str
) -> None:
    whole = run(tmp_path, "whole", model_dir, 6, 0, dtype)
    first = run(tmp_path, "parts", model_dir, 6, 3, dtype)
    second = run(tmp_path, "parts", model_dir, 6, 0, dtype)
    assert (first["completed"], second["completed"]) == (0, 3)
    assert first["losses"] == {k: whole["losses"][k] for k in "123"}
    assert second["losses"] == whole["losses"]
    assert first["weights"] != whole["weights"]
    assert second["weights"] == whole["weights"]


def test_a_process_that_is_killed_after_a_save_goes_on_bit_for_bit(
    tmp_path: Path, model_dir: Path
) -> None:
    whole = run(tmp_path, "whole", model_dir, 6, 0)
    run(tmp_path, "killed", model_dir, 6, 3, is_killed=True)
    second = run(tmp_path, "killed", model_dir, 6, 0)
    assert second["completed"] == 3
    assert second["losses"] == whole["losses"]
    assert second["weights"] == whole["weights"]


def truncated(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def flipped(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))


def test_any_file_that_is_torn_flipped_or_missing_is_named_and_the_one_before_used(
    tmp_path: Path, model_dir: Path, device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    learner = make_learner(model_dir, device)
    store = CheckpointStore(tmp_path / "checkpoints", kept=3)
    saver = CheckpointSaver(store, device)
    good = saver.save(learner, Progress("sft", 1)).path
    progress = Progress("rl", 2, 2, 7, ("pretrain",), ("b1", "b2"))
    bad = saver.save(learner, progress).path
    latest = store.latest()
    assert latest is not None
    assert latest.progress == progress
    sound = tmp_path / "sound"
    shutil.copytree(bad, sound)
    names = sorted(p.name for p in sound.iterdir())
    assert names == [".metadata", "__0_0.distcp", "manifest.json", "metadata.json"]
    for name in names:
        for damage in (truncated, flipped, Path.unlink, lambda file: file.write_bytes(b"")):
            shutil.rmtree(bad, ignore_errors=True)
            shutil.copytree(sound, bad)
            damage(bad / name)
            with pytest.raises(CorruptCheckpointError, match=f"{name}(:| is not| cannot)"):
                checkpoint.verify(bad)
            caplog.clear()
            latest = store.latest()
            assert latest is not None
            assert latest.path == good
            assert "the one before is used" in caplog.text
            assert str(bad / name) in caplog.text
    # It stays to be looked at, and never comes back as a checkpoint.
    assert (tmp_path / "checkpoints" / f".refused-{bad.name}").is_dir()
    assert store.paths() == [good]
    assert saver.save(learner, progress).path.name == "000003-rl-2"


def test_each_byte_of_a_manifest_counts(tmp_path: Path, model_dir: Path, device: Device) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", kept=1)
    path = CheckpointSaver(store, device).save(make_learner(model_dir, device), Progress()).path
    manifest = path / "manifest.json"
    sound = manifest.read_bytes()
    for i in range(len(sound)):
        manifest.write_bytes(sound[:i] + bytes([sound[i] ^ 1]) + sound[i + 1 :])
        with pytest.raises(CorruptCheckpointError, match="manifest.json"):
            checkpoint.verify(path)
    manifest.write_bytes(sound)
    checkpoint.verify(path)


def test_unfinished_and_manifestless_folders_are_no_checkpoints(
    tmp_path: Path, model_dir: Path, device: Device
) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", kept=3)
    saver = CheckpointSaver(store, device)
    assert store.latest() is None
    (tmp_path / "checkpoints" / ".partial-000001-sft-1").mkdir()
    (tmp_path / "checkpoints" / "000002-sft-2").mkdir()
    assert store.latest() is None
    assert (
        saver.save(make_learner(model_dir, device), Progress("sft", 3)).path.name == "000003-sft-3"
    )


def test_only_the_newest_are_kept(tmp_path: Path, model_dir: Path, device: Device) -> None:
    learner = make_learner(model_dir, device)
    store = CheckpointStore(tmp_path / "checkpoints", kept=2)
    saver = CheckpointSaver(store, device)
    for step in range(1, 5):
        saver.save(learner, Progress("rl", step))
    assert [p.name for p in store.paths()] == ["000003-rl-3", "000004-rl-4"]
    assert [p.stage_step for p in store.progress_of_newest()] == [3, 4]


def test_the_end_of_each_stage_is_kept_beside_the_newest(
    tmp_path: Path, model_dir: Path, device: Device
) -> None:
    learner = make_learner(model_dir, device)
    store = CheckpointStore(tmp_path / "checkpoints", kept=1, keep_stage_ends=True)
    saver = CheckpointSaver(store, device)
    saver.save(learner, Progress("pretrain", 9))
    saver.save(learner, Progress("pretrain", 10, finished_stages=("pretrain",)))
    saver.save(learner, Progress("sft", 4, finished_stages=("pretrain",)))
    saver.save(learner, Progress("sft", 5, 0, 1, ("pretrain", "sft")))
    saver.save(learner, Progress("sft", 5, 0, 2, ("pretrain", "sft")))
    for step in (1, 2):
        saver.save(learner, Progress("rl", step, step, 3, ("pretrain", "sft")))
    kept = ["000002-pretrain-10", "000005-sft-5", "000007-rl-2"]
    assert [p.name for p in store.paths()] == kept
    assert [p.stage_step for p in store.progress_of_newest()] == [2]
    start = checkpoint.start_of_rl(tmp_path / "checkpoints")
    assert start.progress == Progress("sft", 5, 0, 2, ("pretrain", "sft"))
    # RL began after SFT: the end of pre-training is not what it began with.
    shutil.rmtree(start.path)
    with pytest.raises(BadRequestError, match="no checkpoint from before the RL stage"):
        checkpoint.start_of_rl(tmp_path / "checkpoints")
