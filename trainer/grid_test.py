"""Every grid trains what one rank trains: loss, gradient norm, weights after three steps, export;
and thirty steps give the same curve on every run, and the committed one on every host.
"""

from __future__ import annotations

import functools
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from proto.free_ports import free_ports
from trainer import testbed
from trainer.checkpoint import CheckpointStore

# Made by `trainer.grid_run --num-steps=30` on the model below.
CURVE = Path(__file__).parent / "testdata" / "curve.json"
_TIMEOUT_S = 240.0
_TOLERANCE = 1e-5
_WEIGHT_TOLERANCE = 5e-5
GRIDS: dict[str, tuple[int, list[str]]] = {
    "tp2": (2, ["--tensor-parallel=2"]),
    "ep2": (2, ["--expert-parallel=2"]),
    "dp2": (2, []),
    "pp2": (2, ["--pipeline-parallel=2"]),
    "tp2ep2": (4, ["--tensor-parallel=2", "--expert-parallel=2"]),
}


@dataclass(frozen=True)
class Trained:
    """What rank 0 said, and the weights that it wrote."""

    is_export_exact: bool
    save_error: str
    losses: list[float]
    grad_norms: list[float]
    entropies: list[float]
    weights: dict[str, torch.Tensor]


def train(
    folder: Path,
    model: Path,
    num_ranks: int,
    arguments: list[str],
    before_rank: Callable[[int], None] = lambda _: None,
) -> Trained:
    """Args: before_rank is called in each rank's process before it begins."""
    out = folder / "weights.safetensors"
    command = [sys.executable, "-P", "-m", "trainer.grid_run", f"--model-dir={model}"]
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_ports(1)[0]),
        "WORLD_SIZE": str(num_ranks),
    }
    ranks = [
        subprocess.Popen(
            [*command, f"--out={out}", *arguments],
            env={**environment, "RANK": str(rank)},
            preexec_fn=functools.partial(before_rank, rank),  # noqa: PLW1509 - no threads here
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    try:
        output, _ = ranks[0].communicate(timeout=_TIMEOUT_S)
        assert [rank.wait(_TIMEOUT_S) for rank in ranks] == [0] * num_ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    (said,) = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return Trained(**said, weights=load_file(out))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return testbed.write_model(tmp_path_factory.mktemp("model"), scale=4.0)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Trained:
    return train(tmp_path_factory.mktemp("alone"), model, 1, [])


def assert_same_training(model: Path, alone: Trained, trained: Trained) -> None:
    assert alone.is_export_exact and trained.is_export_exact
    assert trained.losses == pytest.approx(alone.losses, abs=_TOLERANCE)
    assert trained.grad_norms == pytest.approx(alone.grad_norms, abs=_TOLERANCE)
    assert trained.entropies == pytest.approx(alone.entropies, abs=_TOLERANCE)
    assert trained.weights.keys() == alone.weights.keys()
    largest = max(
        float((trained.weights[name] - alone.weights[name]).abs().max()) for name in alone.weights
    )
    assert largest <= _WEIGHT_TOLERANCE
    # Training did something, and the tolerance is small beside it.
    before = load_file(model / "model.safetensors")
    moved = max(float((alone.weights[n] - before[n]).abs().max()) for n in before)
    assert moved > 20 * _WEIGHT_TOLERANCE


@pytest.mark.parametrize("grid", GRIDS)
def test_a_grid_trains_what_one_rank_trains(
    tmp_path: Path, model: Path, alone: Trained, grid: str
) -> None:
    assert_same_training(model, alone, train(tmp_path, model, *GRIDS[grid]))


def test_replayed_experts_train_the_same_on_a_grid(
    tmp_path: Path, model: Path, alone: Trained
) -> None:
    for name in ("alone", "grid"):
        (tmp_path / name).mkdir()
    replayed = train(tmp_path / "alone", model, 1, ["--replay"])
    grid = ["--tensor-parallel=2", "--pipeline-parallel=2", "--expert-parallel=2", "--replay"]
    assert_same_training(model, replayed, train(tmp_path / "grid", model, 4, grid))
    assert abs(replayed.losses[0] - alone.losses[0]) > 100 * _TOLERANCE


@pytest.mark.parametrize(
    ("family", "tied", "grid"), [("llama", True, "pp2"), ("qwen3", False, "tp2")]
)
def test_a_dense_model_trains_the_same_on_a_grid(
    tmp_path: Path, family: str, tied: bool, grid: str
) -> None:
    settings = testbed.FAMILIES[family] | {"tie_word_embeddings": tied}
    model = testbed.write_model(tmp_path / "model", scale=4.0, **settings)
    for name in ("alone", "grid"):
        (tmp_path / name).mkdir()
    alone = train(tmp_path / "alone", model, 1, [])
    assert_same_training(model, alone, train(tmp_path / "grid", model, *GRIDS[grid]))


def test_thirty_steps_give_the_same_curve_bit_for_bit_and_the_committed_one(
    tmp_path: Path, model: Path
) -> None:
    first, second = (train(tmp_path, model, 1, ["--num-steps=30"]) for _ in range(2))
    assert (first.losses, first.grad_norms) == (second.losses, second.grad_norms)
    assert first.entropies == second.entropies
    assert all(torch.equal(first.weights[n], second.weights[n]) for n in first.weights)
    # Instruction sets differ by 2.5e-7 at most.
    curve = json.loads(CURVE.read_text())
    for figure, values in curve.items():
        assert getattr(first, figure) == pytest.approx(values, abs=1e-6), figure
    assert len(curve["losses"]) == 30


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """What two tensor-parallel ranks saved after three steps, while they took two more."""
    folder = tmp_path_factory.mktemp("saved")
    arguments = ["--tensor-parallel=2", "--num-steps=5", f"--save={folder / 'checkpoints'}"]
    trained = train(folder, model, 2, arguments)
    assert trained.save_error == ""
    assert len(trained.losses) == 5
    return folder / "checkpoints"


@pytest.fixture(scope="module")
def five_alone(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Trained:
    return train(tmp_path_factory.mktemp("five"), model, 1, ["--num-steps=5"])


def goes_on(resumed: Trained, whole: Trained) -> None:
    # The next step shows the weights, the one after it the optimizer's state.
    assert resumed.losses == pytest.approx(whole.losses[3:], abs=_TOLERANCE)
    assert resumed.grad_norms == pytest.approx(whole.grad_norms[3:], abs=_TOLERANCE)
    largest = max(
        float((resumed.weights[name] - whole.weights[name]).abs().max()) for name in whole.weights
    )
    assert largest <= _WEIGHT_TOLERANCE


@pytest.mark.parametrize("grid", ["one", "tp2", "ep2", "pp2"])
def test_another_grid_goes_on_with_the_next_step(
    tmp_path: Path, model: Path, saved: Path, five_alone: Trained, grid: str
) -> None:
    num_ranks, arguments = (1, []) if grid == "one" else GRIDS[grid]
    arguments = [*arguments, "--num-steps=5", f"--resume={saved}"]
    goes_on(train(tmp_path, model, num_ranks, arguments), five_alone)


def test_ranks_that_share_optimizer_state_save_it_too(
    tmp_path: Path, model: Path, five_alone: Trained
) -> None:
    """Two expert-parallel ranks: each has its experts' state alone, and half of the rest."""
    folder = tmp_path / "checkpoints"
    arguments = [*GRIDS["ep2"][1], "--num-steps=5", f"--save={folder}"]
    assert train(tmp_path, model, 2, arguments).save_error == ""
    goes_on(train(tmp_path, model, 1, ["--num-steps=5", f"--resume={folder}"]), five_alone)


def test_a_rank_that_cannot_write_fails_the_save_of_all_and_they_train_on(
    tmp_path: Path, model: Path, saved: Path
) -> None:
    folder = tmp_path / "checkpoints"
    shutil.copytree(saved, folder)

    def limit(rank: int) -> None:
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    arguments = [*GRIDS["tp2"][1], "--num-steps=5", "--save-after=4", f"--save={folder}"]
    trained = train(tmp_path, model, 2, arguments, limit)
    assert "rank 1: OSError: [Errno 27] File too large" in trained.save_error
    assert len(trained.losses) == 5
    assert [path.name for path in folder.iterdir()] == ["000001-grid-3"]
    assert CheckpointStore(folder, kept=1).latest() is not None
