"""The trainer's process on several ranks: the same stages, figures and weights as on one; it goes on
on another grid; no rank outlives the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from proto import rollout_pb2 as rpb
from proto import rollout_pb2_grpc
from proto import trainer_pb2 as pb
from proto.serving import dial
from rollout.client import write_sequences
from trainer import testbed
from trainer.client import TrainerClient
from trainer.testbed import VOCAB, ScriptedManager, record

GRIDS: dict[str, dict[str, int]] = {
    "one": {},
    "tp2": {"tensor_parallel": 2},
    "pp2": {"pipeline_parallel": 2},
    "dp2ep2": {"data_parallel": 2, "expert_parallel": 2},
}
COMMAND = [sys.executable, "-P", "-W", "ignore", "-m", "trainer.server"]
DEADLINE_S = 180.0
NUM_RL_STEPS = 3
TOLERANCE, WEIGHT_TOLERANCE = 1e-5, 5e-5
# Of a step, whatever the grid. The rest are times, and how the batch was packed.
FIGURES = (
    "loss",
    "grad_norm",
    "entropy_mean_nats",
    "num_tokens",
    "num_trained_tokens",
    "num_trajectories",
    "num_groups_dropped",
    "reward_mean",
    "gap_total_mean_nats",
    "gap_total_p99_nats",
    "ess_token_raw_rollout_to_trainer",
    "ess_sequence_raw_rollout_to_trainer",
    "correction_rejected_fraction",
    "kl_reference_k3_nats",
    "loss_kl",
)


class Manager(ScriptedManager):
    """Has no engines: an update window is opened, nobody is in it, and it is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.published: list[int] = []
        self.num_fetches: list[int] = []

    async def OpenUpdateWindow(self, request: Any, context: Any) -> rpb.OpenUpdateWindowReply:
        self.published.append(request.weight_version)
        return rpb.OpenUpdateWindowReply(epoch=len(self.published))

    async def CloseUpdateWindow(self, request: Any, context: Any) -> rpb.CloseUpdateWindowReply:
        return rpb.CloseUpdateWindowReply(engines_serving=["nobody"])

    async def FetchSequences(self, request: Any, context: Any) -> Any:
        self.num_fetches.append(len(request.attempt_ids))
        async for reply in super().FetchSequences(request, context):
            yield reply


@contextlib.contextmanager
def serving() -> Iterator[tuple[Manager, str]]:
    """A manager, and where it listens, in a loop of its own."""
    servicer, loop = Manager(), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> tuple[grpc.aio.Server, str]:
        server = grpc.aio.server()
        rollout_pb2_grpc.add_RolloutManagerServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return server, f"127.0.0.1:{port}"

    server, address = asyncio.run_coroutine_threadsafe(start(), loop).result()
    try:
        yield servicer, address
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(0), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


def add_batch(manager: Manager, step: int) -> None:
    """Two groups of four, of lengths that do not divide, and one that says nothing."""
    rng = np.random.default_rng([11, step])
    groups: dict[str, list[Any]] = {}
    for name, rewards in {"a": (1, 0, 1, 0), "b": (0, 0, 1, 0), "same": (1, 1)}.items():
        members = []
        for i, reward in enumerate(rewards):
            length = int(rng.integers(7, 30))
            logprobs = -np.log(VOCAB) + 0.3 * rng.standard_normal(length)
            members.append(
                record(
                    rng.integers(6, VOCAB, length),
                    [0] * 4 + [1] * (length - 4),
                    attempt_id=f"{name}{step}.{i}",
                    group_id=name,
                    logprobs=logprobs,
                    banned=(0, 1, 3),
                    version=1,
                    reward=float(reward),
                )
            )
        groups[f"{name}{step}"] = members
    manager.add_batch(groups)


@dataclass
class Trainer:
    """A trainer process and the ranks that it started."""

    process: subprocess.Popen[str]
    address_file: Path

    @classmethod
    def start(cls, folder: Path, manager: str, grid: dict[str, int]) -> Trainer:
        address_file = folder / "address"
        address_file.unlink(missing_ok=True)
        config = folder / "trainer.json"
        settings: dict[str, Any] = {
            "model_dir": str(folder / "model"),
            "run_dir": str(folder / "run"),
            "manager_address": manager,
            "grid": grid,
            "token_budget": 60,
            "collective_timeout_s": 60.0,
            "weight_sync": {"transport": "disk"},
            "rl": {
                "groups_per_step": 1,
                "optim": {"lr": 1e-3, "warmup_steps": 0},
                "guards": {"action": "warn"},
                "loss": {"kl": "k3", "kl_coef": 0.1},
            },
        }
        config.write_text(json.dumps(settings))
        arguments = ["--config", str(config), "--address-file", str(address_file)]
        process = subprocess.Popen(
            [*COMMAND, *arguments],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        return cls(process, address_file)

    async def address(self) -> str:
        async with asyncio.timeout(DEADLINE_S):
            while not self.address_file.exists():
                assert self.process.poll() is None, self.end()[1][-3000:]
                await asyncio.sleep(0.05)
        return self.address_file.read_text().strip()

    def followers(self) -> list[int]:
        tasks = Path(f"/proc/{self.process.pid}/task").iterdir()
        return [int(pid) for task in tasks for pid in (task / "children").read_text().split()]

    def end(self) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, errors

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


async def until(client: TrainerClient, done: Callable[[pb.GetStatusReply], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not done(status := await client.get_status()):
            assert status.state != pb.STAGE_STATE_FAILED, status.error
            await asyncio.sleep(0.05)


async def run(
    folder: Path, manager: Manager, address: str, grid: dict[str, int], resumed: bool
) -> float:
    """SFT and two RL steps, or the third; returns a measured gap."""
    trainer = Trainer.start(folder, address, grid)
    try:
        async with dial(await trainer.address()) as channel:
            client = TrainerClient(channel)
            if not resumed:
                data = str(folder / "data.sequences")
                await client.run_stage(pb.STAGE_KIND_SFT, "sft", 2, data)
                await until(client, lambda s: s.state == pb.STAGE_STATE_FINISHED)
            steps = [NUM_RL_STEPS] if resumed else range(1, NUM_RL_STEPS)
            for step in steps:
                add_batch(manager, step)
            done = await client.run_stage(pb.STAGE_KIND_RL, "rl", NUM_RL_STEPS)
            assert done == (NUM_RL_STEPS - 1 if resumed else 0)
            await until(client, lambda s: s.stage_name == "rl" and s.step == steps[-1])
            if resumed:
                await until(client, lambda s: s.state == pb.STAGE_STATE_FINISHED)
            gap = await client.measure_gap(["a1.0", "b1.1", "b1.2"])
            await client.export(str(folder / f"export{int(resumed)}"))
            await client.stop(save_checkpoint=True)
        code, errors = trainer.end()
        assert code == 0, errors[-3000:]
    finally:
        trainer.kill()
    return gap.mean_abs_nats


def figures(folder: Path) -> list[dict[str, float]]:
    lines = []
    for stage in ("sft", "rl"):
        text = (folder / "run" / "metrics" / f"{stage}.jsonl").read_text()
        lines += [json.loads(line) for line in text.splitlines()]
    return [{name: line[name] for name in FIGURES if name in line} for line in lines]


def prepare(folder: Path) -> Path:
    folder.mkdir()
    testbed.write_model(folder / "model", scale=3.0)
    write_sequences(folder / "data.sequences", testbed.copy_rows(64))
    return folder


async def train(folder: Path, grid: str, other: str) -> tuple[float, float]:
    """All stages, the last step on another grid; returns the gaps before and after it."""
    with serving() as (servicer, address):
        first = await run(prepare(folder), servicer, address, GRIDS[grid], resumed=False)
        if grid == "dp2ep2":
            assert max(servicer.num_fetches) < 10, "each rank reads its own share of ten"
        servicer.published.clear()
        last = await run(folder, servicer, address, GRIDS[other], resumed=True)
        assert len(servicer.published) == 2  # when the stage goes on, and after the step
    return first, last


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[float, float]]:
    """What one rank does."""
    folder = tmp_path_factory.mktemp("one") / "run"
    return folder, asyncio.run(train(folder, "one", "one"))


@pytest.mark.parametrize(("grid", "other"), [("dp2ep2", "tp2"), ("pp2", "one")])
async def test_a_grid_does_what_one_rank_does_and_another_goes_on(
    tmp_path: Path, baseline: tuple[Path, tuple[float, float]], grid: str, other: str
) -> None:
    one, gaps = baseline
    assert await train(tmp_path / grid, grid, other) == pytest.approx(gaps, abs=TOLERANCE)
    ours, theirs = figures(one), figures(tmp_path / grid)
    assert len(ours) == len(theirs) == 2 + NUM_RL_STEPS
    for step, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert a == pytest.approx(b, abs=TOLERANCE, rel=TOLERANCE), step
    assert len(ours[-1]) == len(FIGURES)
    for export in ("export0", "export1"):
        wanted = load_file(one / export / "model.safetensors")
        found = load_file(tmp_path / grid / export / "model.safetensors")
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert torch.allclose(found[name], tensor, rtol=0, atol=WEIGHT_TOLERANCE), name


@pytest.mark.parametrize("victim", ["first", "other"])
async def test_no_rank_outlives_the_others(tmp_path: Path, victim: str) -> None:
    trainer = Trainer.start(prepare(tmp_path / "dp2"), "127.0.0.1:1", {"data_parallel": 2})
    try:
        await trainer.address()
        (follower,) = trainer.followers()
        os.kill(trainer.process.pid if victim == "first" else follower, signal.SIGKILL)
        code, errors = trainer.end()
        if victim == "other":
            assert code == 1
            assert "rank 1 ended with exit code -9, and so does the trainer" in errors
        async with asyncio.timeout(DEADLINE_S):
            while Path(f"/proc/{follower}").exists():
                await asyncio.sleep(0.05)
    finally:
        trainer.kill()


def test_settings_that_no_rank_can_use_are_one_line(tmp_path: Path) -> None:
    folder = prepare(tmp_path / "run")
    (folder / "model" / "config.json").unlink()
    trainer = Trainer.start(folder, "", {"data_parallel": 2})
    code, errors = trainer.end()
    assert code == 2
    assert f"error: cannot read {folder}/model/config.json" in errors


def test_a_number_of_ranks_that_is_not_the_grids_is_refused(tmp_path: Path) -> None:
    folder = prepare(tmp_path / "run")
    config = folder / "trainer.json"
    config.write_text(json.dumps({"model_dir": str(folder / "model"), "run_dir": str(folder)}))
    done = subprocess.run(
        [*COMMAND, "--config", str(config)],
        env={**os.environ, "WORLD_SIZE": "2", "RANK": "0"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 2
    assert "WORLD_SIZE is 2, and the grid has 1 ranks" in done.stderr
