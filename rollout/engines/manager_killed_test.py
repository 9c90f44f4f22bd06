"""kill -9 of the real manager process in each phase of a window, with the real publisher and loader.

Engines are fakes that hold weights and note each time what they go on generating with: a row whose
weights are not exactly those of its version would be a mixed version served.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from proto import rollout_pb2 as pb
from proto.free_ports import free_ports
from proto.serving import dial
from rollout.client import ConflictError, FencedError, RolloutClient, UnavailableError
from rollout.config import RolloutConfig
from rollout.engines.fake_weights_engine import NUM_ELEMENTS, NUM_TENSORS, UPDATE, digest
from weightsync.config import WeightSyncConfig
from weightsync.fake_engine import make_weights
from weightsync.publisher import WeightPublisher

DEADLINE_S = 120.0
"""Of each step, process starts on a busy machine included."""
PHASES = {
    # where engine1 hangs: the phase that the ledger then shows
    "/pause_generation": "pause",
    "/begin_weight_update": "begin",
    UPDATE: "buckets",
    "/end_weight_update": "commit",
    "/flush_cache": "commit",
    "/update_weight_version": "commit",
    "/continue_generation": "commit",
}


class World:
    """A manager's process and what watches it from outside."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.served = folder / "served.jsonl"
        manager_port, *self.ports = free_ports(3)
        self.address = f"127.0.0.1:{manager_port}"
        config = RolloutConfig.model_validate(
            {
                "run_dir": folder / "run",
                "agent": "oracle",
                "group_size": 2,
                "batch_groups": 2,
                "engines": {
                    "python": sys.executable,
                    "launcher": "rollout.engines.fake_weights_engine",
                    "model_path": folder,
                    "num_engines": 2,
                    "ports": self.ports,
                    "poll_interval_s": 0.2,
                    # It hangs until the manager is killed.
                    "control_timeout_s": DEADLINE_S,
                    "start_timeout_s": DEADLINE_S,
                    "stop_timeout_s": 0.0,
                    "extra_flags": [f"--served={self.served}"],
                },
            }
        )
        self.config = folder / "manager.json"
        self.config.write_text(config.model_dump_json())
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts the manager at its address."""
        command = [sys.executable, "-P", "-m", "rollout.server", "--config", str(self.config)]
        log = (self.folder / "manager.log").open("ab")
        with log:
            self.process = subprocess.Popen([*command, "--listen", self.address], stderr=log)

    def kill(self) -> None:
        """SIGKILL."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    async def call(self, engine: int, path: str, body: object = None) -> dict[str, Any]:
        """GET, or POST of a body, to an engine."""
        url = f"http://127.0.0.1:{self.ports[engine]}{path}"
        method = "GET" if body is None else "POST"
        async with aiohttp.ClientSession() as session:
            async with session.request(method, url, json=body) as answer:
                text = await answer.text()
        return dict(json.loads(text)) if text.startswith("{") else {}

    def window(self) -> tuple[int, str]:
        """(epoch, phase) of the newest window, as the ledger has it on disk."""
        path = self.folder / "run" / "ledger.db"
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
            row = db.execute("SELECT epoch, phase FROM windows ORDER BY epoch DESC LIMIT 1")
            epoch, phase = row.fetchone()
            return int(epoch), str(phase)

    def served_rows(self) -> list[tuple[str, str]]:
        """(version, digest) of each time that an engine went on."""
        rows = [json.loads(line) for line in self.served.read_text().splitlines()]
        return [(row["version"], row["digest"]) for row in rows]


@asynccontextmanager
async def open_world(folder: Path) -> AsyncIterator[World]:
    world = World(folder)
    world.start()
    try:
        yield world
    finally:
        assert world.process is not None
        world.process.terminate()  # it removes its engines' folders
        try:
            world.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            world.kill()


async def until(done: Any) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not await done():
            await asyncio.sleep(0.02)


async def is_serving(client: RolloutClient) -> bool:
    try:
        await client.get_status()
    except UnavailableError:
        return False
    return True


@pytest.mark.parametrize("path", PHASES, ids=lambda path: path.strip("/"))
async def test_a_manager_killed_in_a_window_leaves_no_engine_between_versions(tmp_path, path):
    sync = WeightSyncConfig(bucket_bytes=16 * 1024)
    expected = {
        str(version): digest(make_weights(NUM_TENSORS, NUM_ELEMENTS, version).values())
        for version in (1, 2, 3)
    }

    def weights(version: int) -> Any:
        return make_weights(NUM_TENSORS, NUM_ELEMENTS, version).items()

    async with open_world(tmp_path) as world, dial(world.address) as channel:
        client = RolloutClient(channel)
        publisher = WeightPublisher(sync, client)
        await until(lambda: is_serving(client))
        await publisher.publish(weights(1), 1)
        pids = [(await world.call(engine, "/weights"))["pid"] for engine in (0, 1)]

        # Version 2 gets as far as `path` on engine1.
        fault = {"path": path, "action": "stall" if path == UPDATE else "hang"}
        await world.call(1, "/fault", fault)
        before = len((await world.call(1, "/state"))["calls"])
        num_buckets = (await world.call(1, "/weights"))["num_buckets"]
        publication = asyncio.create_task(publisher.publish(weights(2), 2))

        async def is_inside() -> bool:
            if (
                path == UPDATE
                and (await world.call(1, "/weights"))["num_buckets"] < num_buckets + 2
            ):
                return False
            return path in (await world.call(1, "/state"))["calls"][before:]

        await until(is_inside)
        epoch, phase = world.window()
        assert phase == PHASES[path]
        world.kill()

        # The publication ends, and no engine outlives the manager.
        with pytest.raises(UnavailableError):
            await asyncio.wait_for(publication, DEADLINE_S)

        async def are_gone() -> bool:
            return not any(Path(f"/proc/{pid}").exists() for pid in pids)

        await until(are_gone)

        # The next manager knows the window to be over, and fences the old sender.
        world.start()
        await until(lambda: is_serving(client))
        assert world.window() == (epoch, "closed")
        late = pb.CloseUpdateWindowRequest(epoch=epoch, weight_version=2)
        for name in ("engine0", "engine1"):
            late.results.add(engine=name, complete=True, touched=True)
        with pytest.raises(FencedError):
            await client.close_update_window(late)
        # Version 2 is spent: who knows what was sampled with it.
        with pytest.raises(ConflictError):
            await publisher.publish(weights(2), 2)
        result = await publisher.publish(weights(3), 3)
        assert set(result.engines) == {"engine0", "engine1"}
        for engine in (0, 1):
            assert (await world.call(engine, "/weights"))["digest"] == expected["3"]
        assert world.window()[0] > epoch
        rows = world.served_rows()
        assert {version for version, _ in rows} >= {"1", "3"}
        assert all(found == expected[version] for version, found in rows), rows
