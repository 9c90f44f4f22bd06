"""A real manager, gateway and SGLang engines in one place, for tests of what passes between them.

    players --HTTP--> Gateway --gRPC--> RolloutManager --HTTP--> two SGLang servers (processes)
                         `--------------HTTP /generate-------------^
    trainer ranks (processes, tests/export_rank.py) --gRPC--> RolloutManager
           `===========shm | tcp=================================> loader in each server

Owner: the test that opens it. Manager and gateway run on the test's event loop; closing ends every
process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import aiohttp
from aiohttp import web

from bazel.environments import PYTHON
from proto import rollout_pb2 as pb
from proto import trajectory_pb2 as tpb
from proto.free_ports import free_ports
from proto.serving import ServingConfig, dial
from rollout.assembly import manager_server, open_manager
from rollout.client import RolloutClient
from rollout.config import RolloutConfig
from rollout.engines.tiny_moe import CONFIG, VOCAB
from rollout.gateway.app import Gateway
from rollout.gateway.chat_template import ChatTemplate
from rollout.gateway.config import GatewayConfig
from rollout.gateway.engine_client import EngineClient
from rollout.gateway.tiny_tokenizer import SPECIALS, TINY, write_model
from rollout.manager import RolloutManager

END_OF_TURN = SPECIALS.index("<|im_end|>")
_START_S = 240.0
_CALL_S = 120.0


class Trainer:
    """Ranks of tests/export_rank.py."""

    def __init__(self, processes: list[asyncio.subprocess.Process]) -> None:
        self._processes = processes

    @classmethod
    async def start(
        cls, model_dir: Path, manager: str, tensor_parallel: int = 1, expert_parallel: int = 1
    ) -> Trainer:
        """Starts the ranks, and waits until they have built their model."""
        world = tensor_parallel * expert_parallel
        arguments = [f"--model-dir={model_dir}", f"--manager={manager}"]
        arguments += [f"--tensor-parallel={tensor_parallel}"]
        arguments += [f"--expert-parallel={expert_parallel}"]
        master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}
        processes = [
            await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-m",
                "tests.export_rank",
                *arguments,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE if rank == 0 else asyncio.subprocess.DEVNULL,
                env={**os.environ, **master, "RANK": str(rank), "WORLD_SIZE": str(world)},
                limit=2**26,
            )
            for rank in range(world)
        ]
        trainer = cls(processes)
        await trainer._answer()
        return trainer

    async def order(self, **order: Any) -> dict[str, Any]:
        """Sends one order to rank 0; returns its answer."""
        stdin = self._processes[0].stdin
        assert stdin is not None
        stdin.write(json.dumps(order).encode() + b"\n")
        await stdin.drain()
        return await self._answer()

    async def _answer(self) -> dict[str, Any]:
        stdout = self._processes[0].stdout
        assert stdout is not None
        async with asyncio.timeout(_START_S):
            while line := await stdout.readline():
                if line.startswith(b"{"):  # libraries may print lines of their own
                    return dict(json.loads(line))
        raise AssertionError(f"rank 0 ended: {await self._processes[0].wait()}")

    async def close(self) -> None:
        """Kills every rank."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


@dataclass
class World:
    """Everything that runs."""

    folder: Path
    model_dir: Path
    address: str
    client: RolloutClient
    manager: RolloutManager
    gateway_url: str
    http: aiohttp.ClientSession
    trainers: list[Trainer] = field(default_factory=list)

    async def start_trainer(self, tensor_parallel: int = 1, expert_parallel: int = 1) -> Trainer:
        """A trainer on so many ranks; ends with the world."""
        trainer = await Trainer.start(
            self.model_dir, self.address, tensor_parallel, expert_parallel
        )
        self.trainers.append(trainer)
        return trainer

    async def checksums(self, engine: str) -> dict[str, str]:
        """SHA-256 prefixes of the engine's live parameters, by SGLang itself."""
        url = self.manager.pool.engines[engine].url + "/weights_checker"
        async with self.http.post(url, json={"action": "checksum"}) as response:
            assert response.status == 200, await response.text()
            return dict((await response.json())["ranks"][0]["checksums"])

    async def lease(self, num_attempts: int) -> list[pb.LeasedAttempt]:
        """Starts groups until so many attempts are held."""
        request = pb.AddTasksRequest(
            pool=pb.POOL_TRAIN, tasks=[pb.Task(task_id=f"t{i}", path="/t") for i in range(4)]
        )
        await self.client.add_tasks(request)
        await self.client.set_admission(pb.SetAdmissionRequest(open=True))
        held: list[pb.LeasedAttempt] = []
        while len(held) < num_attempts:
            more = pb.LeaseAttemptsRequest(worker="w", max_attempts=num_attempts - len(held))
            held += (await self.client.lease_attempts(more, timeout_s=10.0)).attempts
        return held

    async def play(self, attempt: pb.LeasedAttempt, stop: asyncio.Event, max_turns: int) -> None:
        """Talks until told to stop, then ends the attempt."""
        # What no other session begins with, so that engines share nothing but the template.
        messages = [{"role": "user", "content": f"{attempt.attempt_id} begins"}]
        headers = {"Authorization": f"Bearer {attempt.session_key}"}
        for turn in range(max_turns):
            if stop.is_set():
                break
            async with self.http.post(
                f"{self.gateway_url}/v1/chat/completions",
                json={"model": "m", "messages": messages},
                headers=headers,
            ) as response:
                body = await response.json()
                assert response.status == 200, body
            messages.append(body["choices"][0]["message"])
            messages.append({"role": "user", "content": f"go on {turn}"})
        await self.client.finish_attempt(
            pb.FinishAttemptRequest(
                attempt_id=attempt.attempt_id,
                epoch=attempt.epoch,
                cause=tpb.CAUSE_TURN_CAP,
                reward=0.0,
            )
        )


@contextlib.asynccontextmanager
async def open_world(folder: Path, kv_policy: Literal["flush", "keep"]) -> AsyncIterator[World]:
    """Starts two engines, whose weights nothing has filled yet, and what is in front of them."""
    model_dir = write_model(folder / "model", TINY)
    CONFIG.save_pretrained(model_dir)
    chat = ChatTemplate.load(model_dir)
    banned = {*chat.special_ids, *range(chat.vocab_size, VOCAB)} - {END_OF_TURN}
    config = RolloutConfig.model_validate(
        {
            "run_dir": folder / "run",
            "group_size": 4,
            "batch_groups": 4,
            "lease_ttl_s": 600.0,
            "caps": {"max_new_tokens_per_turn": 100, "max_total_tokens": 4000, "max_turns": 60},
            "sampling": {"banned_token_ids": sorted(banned), "stop_token_ids": [END_OF_TURN]},
            "engines": {
                "python": PYTHON["engine"],
                "model_path": model_dir,
                "num_engines": 2,
                "context_length": 4096,
                "max_total_tokens": 65536,
                "max_running_requests": 8,
                "poll_interval_s": 0.2,
                "kv_policy": kv_policy,
            },
        }
    )
    config.run_dir.mkdir()
    async with contextlib.AsyncExitStack() as stack:
        manager = open_manager(config)
        server = manager_server(manager, ServingConfig())
        manager.recover()
        stack.push_async_callback(manager.close)
        address = await server.start()
        stack.push_async_callback(server.stop, 0)
        await manager.start()
        client = RolloutClient(
            await stack.enter_async_context(dial(address)), call_timeout_s=_CALL_S
        )
        engines = await stack.enter_async_context(
            EngineClient(max_connections=0, connect_s=10.0, abort_timeout_s=5.0)
        )
        http = await stack.enter_async_context(
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(_START_S))
        )
        gateway = Gateway(
            GatewayConfig(manager_address=address, model_dir=model_dir), client, engines, chat
        )
        runner = web.AppRunner(gateway.app(), handler_cancellation=True, access_log=None)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        stack.push_async_callback(gateway.runner.close)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        world = World(folder, model_dir, address, client, manager, url, http)
        try:
            yield world
        finally:
            for trainer in world.trainers:
                await trainer.close()
            manager.waiters.close()
