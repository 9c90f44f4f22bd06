"""A runner of attempts with a scripted gateway, on a broker that the test brings."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from proto import rollout_pb2, trajectory_pb2
from proto.serving import dial
from rollout.harness.attempt_runner import AttemptRunner
from rollout.harness.config import HarnessConfig
from rollout.harness.fakes import FakeGateway
from rollout.harness.gateway_client import GatewayClient
from sandbox.client import SandboxClient

KEY = "k" * 40
FIX = "sed -i s/-/+/ calc.py"
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


class AttemptRig:
    """`start` it, `configure` it anew as often as wished, `run` attempts, `stop` it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.gateway = FakeGateway()

    async def start(self, broker_address: str) -> None:
        await self.gateway.start()
        self._address = broker_address
        self._channel = dial(broker_address)
        self.sandboxes = SandboxClient(self._channel)
        self._pool = ThreadPoolExecutor(16)
        self._clients: list[GatewayClient] = []
        self.configure()

    def configure(self, **settings: Any) -> None:
        """Makes a runner with these settings over the test's defaults."""
        self.config = HarnessConfig(
            **{
                "manager_address": "127.0.0.1:1",
                "broker_address": self._address,
                "gateway_urls": [self.gateway.url],
                "trials_dir": self.folder / "trials",
                "trajectories_dir": self.folder / "trajectories",
                "model_retry_max_s": 0.01,
                **settings,
            }
        )
        client = GatewayClient(self.config)
        self._clients.append(client)
        self.runner = AttemptRunner(self.config, self.sandboxes, client, self._pool)

    async def stop(self) -> None:
        for client in self._clients:
            await client.close()
        await self._channel.close()
        await self.gateway.stop()
        self._pool.shutdown()

    def lease(self, task: Path, agent: str = "mini", **fields: Any) -> rollout_pb2.LeasedAttempt:
        """An attempt as the manager would lease it."""
        return rollout_pb2.LeasedAttempt(
            **{
                "attempt_id": "a1",
                "epoch": 3,
                "task_id": task.name,
                "task_path": str(task),
                "session_key": KEY,
                "agent": agent,
                **fields,
            }
        )

    async def run(
        self, task: Path, agent: str = "mini", **fields: Any
    ) -> tuple[str, float | None, rollout_pb2.AttemptReport]:
        """Cause, reward and report of one attempt, which must leave no trial folder."""
        done = await self.runner.run(self.lease(task, agent, **fields))
        assert done.epoch == 3 and done.attempt_id == "a1"
        reward = done.reward if done.HasField("reward") else None
        assert not list((self.folder / "trials").iterdir()), "a trial folder was left"
        return trajectory_pb2.Cause.Name(done.cause), reward, done.report
