"""The trainer process from outside: start, stages, metrics, requests, stop, restart, errors."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from safetensors.torch import load_file

from proto import trainer_pb2 as pb
from proto.serving import dial, is_serving
from rollout.client import write_sequences
from trainer import testbed
from trainer.client import TrainerClient
from trainer.config import TrainerConfig

COMMAND = [sys.executable, "-P", "-W", "ignore", "-m", "trainer.server"]


class Process:
    """A trainer process of a run folder."""

    def __init__(self, folder: Path, **settings: object) -> None:
        self.config = folder / "trainer.json"
        self.address_file = folder / "address"
        self.address_file.unlink(missing_ok=True)
        run = {"model_dir": str(folder / "model"), "run_dir": str(folder / "run")}
        self.config.write_text(json.dumps(run | settings))
        arguments = ["--config", str(self.config), "--address-file", str(self.address_file)]
        self.process = subprocess.Popen([*COMMAND, *arguments], stderr=subprocess.PIPE, text=True)

    async def address(self) -> str:
        while not self.address_file.exists():
            assert self.process.poll() is None, self.end()[1][-2000:]
            await asyncio.sleep(0.02)
        return self.address_file.read_text().strip()

    def end(self) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=60)
        return self.process.returncode, errors


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    testbed.write_model(tmp_path / "model")
    write_sequences(tmp_path / "data.sequences", testbed.copy_rows(64))
    return tmp_path


async def finished(client: TrainerClient) -> pb.GetStatusReply:
    while True:
        status = await client.get_status()
        if status.state not in {pb.STAGE_STATE_RUNNING, pb.STAGE_STATE_PAUSED}:
            return status
        await asyncio.sleep(0.02)


async def test_stages_run_in_order_and_survive_a_restart(folder: Path) -> None:
    data = str(folder / "data.sequences")
    process = Process(folder)
    try:
        address = await process.address()
        assert await is_serving(address, "swe_rl.trainer.v1.Trainer")
        async with dial(address) as channel:
            client = TrainerClient(channel)
            assert (await client.get_status()).state == pb.STAGE_STATE_IDLE
            await client.run_stage(pb.STAGE_KIND_PRETRAIN, "pretrain", 4, data)
            steps = []
            async for metrics in client.stream_metrics("pretrain", timeout_s=60):
                steps.append(metrics.step)
                assert metrics.scalars["loss"] > 0
                if metrics.step == 4:
                    break
            assert steps == [1, 2, 3, 4]
            status = await finished(client)
            assert status.state == pb.STAGE_STATE_FINISHED
            assert list(status.finished_stages) == ["pretrain"]
            assert status.num_parameters > 0
            exported = await client.export(str(folder / "exported"))
            assert exported.num_tensors == len(load_file(folder / "exported" / "model.safetensors"))
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await client.export("relative")
            assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await client.publish()
            assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await client.run_stage(pb.STAGE_KIND_UNSPECIFIED, "x", 1)
            assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            # A stage that goes on until it is stopped, paused on the way.
            await client.run_stage(pb.STAGE_KIND_SFT, "sft", 100_000, data)
            async for metrics in client.stream_metrics("sft", timeout_s=60):
                if metrics.step == 2:
                    break
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await client.run_stage(pb.STAGE_KIND_SFT, "other", 5, data)
            assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION
            await client.pause()
            saved = await client.save_checkpoint()
            paused = await client.get_status()
            assert paused.state == pb.STAGE_STATE_PAUSED
            assert paused.latest_checkpoint == saved.path
            await asyncio.sleep(0.1)
            assert (await client.get_status()).step == paused.step
            await client.resume()
        process.process.send_signal(signal.SIGTERM)
        code, errors = process.end()
        assert code == 0, errors[-2000:]
    finally:
        process.process.kill()
        process.process.wait()
    again = Process(folder)
    try:
        async with dial(await again.address()) as channel:
            client = TrainerClient(channel)
            status = await client.get_status()
            assert list(status.finished_stages) == ["pretrain"]
            assert await client.run_stage(pb.STAGE_KIND_PRETRAIN, "pretrain", 4, data) == 4
            # SIGTERM saved where it was.
            resumed = await client.run_stage(pb.STAGE_KIND_SFT, "sft", paused.step + 200, data)
            assert resumed >= paused.step
            await client.stop()
        code, errors = again.end()
        assert code == 0, errors[-2000:]
    finally:
        again.process.kill()
        again.process.wait()


async def test_two_trainers_never_share_a_run_directory(folder: Path) -> None:
    first = Process(folder)
    try:
        await first.address()
        code, errors = Process(folder, lock_wait_s=0.2).end()
        assert code == 2
        assert "error: another trainer works on" in errors.splitlines()[-1]
        waiting = Process(folder)
        first.process.kill()
        await waiting.address()
        waiting.process.kill()
        waiting.process.communicate()
    finally:
        first.process.kill()
        first.process.communicate()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"grid": {"expert_parallel": 2}}, "grid.expert_parallel is 2"),
        ({"learning_rate": 1}, "Extra inputs are not permitted"),
        ({"manager_address": "127.0.0.1:1", "weight_sync": {"transport": "x"}}, "transport"),
        ({"model_dir": "/nonexistent"}, "cannot read /nonexistent/config.json"),
    ],
    ids=["grid", "unknown_setting", "weight_sync", "no_model"],
)
def test_a_bad_start_is_one_line_and_exit_2(
    folder: Path, settings: dict[str, object], message: str
) -> None:
    code, errors = Process(folder, **settings).end()
    assert code == 2
    line = errors.strip().splitlines()[-1]
    assert line.startswith("error: ")
    assert message in line
    assert "Traceback" not in errors


def test_updates_on_disk_go_by_default_into_the_run_directory(tmp_path: Path) -> None:
    def directory(**disk: object) -> Path | None:
        settings = {"transport": "disk", "disk": disk} if disk else {"transport": "disk"}
        config = TrainerConfig(model_dir=tmp_path, run_dir=tmp_path, weight_sync=settings)
        return config.weight_sync.disk.directory

    assert directory() == tmp_path / "weightsync"
    assert directory(load_timeout_s=5.0) == tmp_path / "weightsync"
    assert directory(directory="/elsewhere") == Path("/elsewhere")


def test_help_does_not_import_torch() -> None:
    script = (
        "import sys; sys.argv = ['x', '--help']\n"
        "import trainer.server, trainer.init_model, trainer.client, trainer.config\n"
        "for main in (trainer.server.main, trainer.init_model.main):\n"
        "    try: main()\n"
        "    except SystemExit as e: assert e.code == 0\n"
        "assert not {'torch', 'megatron', 'numpy'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
