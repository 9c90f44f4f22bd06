"""Turns a recipe and a run directory into running processes: addresses, config files, specs.

Owner: `launch`. What a recipe leaves open is filled in here (addresses, paths, interpreters,
values that several processes share) and then checked by the model of the package that owns it,
before anything is started.

    broker <- manager (owns engines) <- gateways <- workers        trainer -> manager, engines
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from pydantic import BaseModel

from bazel.environments import PYTHON
from launch.ports import choose_ports
from launch.recipe import Recipe, RunSettings, validated
from launch.run_directory import RunDirectory, write_json
from launch.supervisor import ProcessSpec, RestartPolicy, Supervisor
from proto import rollout_pb2, sandbox_pb2, sandbox_pb2_grpc, serving
from rollout.client import RolloutClient
from rollout.config import RolloutConfig
from rollout.gateway.config import GatewayConfig
from rollout.harness.config import HarnessConfig
from sandbox.config import BrokerConfig
from trainer.client import TrainerClient
from trainer.config import TrainerConfig

_PROBE_TIMEOUT_S = 2.0
_SCRATCH_PARENT = Path("/dev/shm")
_SCRATCH_PREFIX = "swe_rl-launch-"
_CALL_TIMEOUT_S = 20.0
_SWEEP_TIMEOUT_S = 60.0
_SWEPT = {"broker": "sandbox.server", "manager": "rollout.server", "trainer": "trainer.server"}
"""Servers that leave something on the machine when they are killed, and can remove it."""

_IMAGE_ENV = {"toy": {"PYTHONDONTWRITEBYTECODE": "1"}}
"""Of each command in the image; a toy task's bytecode would be read once at most."""


class Deployment:
    """The processes of one run on this machine."""

    supervisor: Supervisor
    started_at: float
    """Unix seconds at which the processes were up."""
    at_start: rollout_pb2.GetStatusReply
    """The manager's counts at that moment: not zero when a run was resumed."""

    def __init__(
        self,
        recipe: Recipe,
        run: RunDirectory,
        *,
        with_trainer: bool = True,
        serve_model: Path | None = None,
        only_broker: bool = False,
        images: Sequence[str] = ("toy",),
    ) -> None:
        """Checks every setting. Raises UsageError; nothing is started or written yet.

        Without a trainer there are engines only for serve_model, a Hugging Face folder whose
        weights they serve as they are. only_broker starts nothing else. images: the layers in the run
        directory that the broker offers.
        """
        self._recipe, self._run = recipe, run
        self._with_trainer, self._serve_model = with_trainer, serve_model
        self._only_broker = only_broker
        self._images = tuple(images)
        fleet = recipe.fleet
        self._gateways = [f"gateway-{i}" for i in range(fleet.num_gateways)]
        self._workers = [f"worker-{i}" for i in range(fleet.num_workers)]
        names = ["broker", "manager", "trainer", *self._gateways]
        self._ports = choose_ports(names, recipe.run.base_port)
        self.gateway_urls = [f"http://{self._address(name)}" for name in self._gateways]
        # Sandboxes and trials are small, many and short-lived: they belong in memory.
        self._scratch = _SCRATCH_PARENT / f"{_SCRATCH_PREFIX}{os.getpid()}"
        self._configs: dict[str, BaseModel] = {
            "broker": self._sandbox_config(),
            "manager": self._rollout_config(),
            "gateway": self._gateway_config(),
            "worker": self._harness_config(),
        }
        if with_trainer:
            self._configs["trainer"] = self._trainer_config()

    def _address(self, name: str) -> str:
        return f"127.0.0.1:{self._ports[name]}"

    def resolved(self) -> dict[str, Any]:
        """Each package's section with every setting, defaults and filled-in values included."""
        sections = {"broker": "sandbox", "manager": "rollout", "worker": "harness"}
        return {
            sections.get(name, name): config.model_dump(mode="json", exclude_none=True)
            for name, config in self._configs.items()
        }

    def config_of(self, name: str) -> Any:
        """The checked settings of `broker`, `manager`, `gateway`, `worker` or `trainer`."""
        return self._configs[name]

    @property
    def broker_address(self) -> str:
        """HOST:PORT of the sandbox broker."""
        return self._address("broker")

    @property
    def manager_address(self) -> str:
        """HOST:PORT of the rollout manager."""
        return self._address("manager")

    @property
    def num_slots(self) -> int:
        """Attempts that run at a time, over all harness workers."""
        config = self._configs["worker"]
        assert isinstance(config, HarnessConfig)
        return config.concurrency * len(self._workers)

    @property
    def serves_model(self) -> bool:
        """True when there are engines and gateways: something may ask the policy."""
        return self._with_trainer or self._serve_model is not None

    @property
    def _model(self) -> Path:
        return self._serve_model or self._run.model

    # ---- settings ----------------------------------------------------------------------

    def _sandbox_config(self) -> BaseModel:
        images = {
            name: {
                "base": "host",
                "layers": [str(self._run.layers / name)],
                "env": _IMAGE_ENV.get(name, {}),
            }
            for name in self._images
        }
        defaults = {"images": images, "state_dir": str(self._scratch / "sandboxes")}
        return validated(BrokerConfig, _merged(defaults, self._recipe.sandbox), "[sandbox]")

    def _rollout_config(self) -> BaseModel:
        rl, given = self._recipe.rl, self._recipe.rollout
        sampling = {"banned_token_ids": [0, 1, 3, 4, 5], "stop_token_ids": [2]}
        engines: dict[str, Any] = {
            "python": PYTHON["engine"],
            "model_path": str(self._model),
            "context_length": 512,
            "max_total_tokens": 16384,
        }
        if self._serve_model is not None:
            engines["load_format"] = "auto"
        elif not self.serves_model:
            engines["num_engines"] = 0
        defaults = {
            "run_dir": str(self._run.root),
            "seed": self._recipe.run.seed,
            "group_size": rl.group_size,
            "batch_groups": rl.groups_per_step,
            "max_staleness": rl.max_staleness,
            "sampling": sampling,
            "engines": engines,
            # What the tiny policy is made for; a recipe for another model sets its own.
            "caps": {"max_new_tokens_per_turn": 40, "max_total_tokens": 512, "max_turns": 4},
            "scheduler": {"hard_context_cap": 512, "growth_tokens": 64},
        }
        return validated(RolloutConfig, _merged(defaults, given), "[rollout]")

    def _gateway_config(self) -> BaseModel:
        defaults = {"manager_address": self._address("manager"), "model_dir": str(self._model)}
        return validated(GatewayConfig, _merged(defaults, self._recipe.gateway), "[gateway]")

    def _harness_config(self) -> BaseModel:
        defaults = {
            "manager_address": self._address("manager"),
            "broker_address": self._address("broker"),
            "gateway_urls": self.gateway_urls,
            "trials_dir": str(self._scratch / "trials"),
            "trajectories_dir": str(self._run.trajectories),
        }
        return validated(HarnessConfig, _merged(defaults, self._recipe.harness), "[harness]")

    def _trainer_config(self) -> BaseModel:
        rl = self._recipe.rl
        defaults = {
            "model_dir": str(self._run.model),
            "run_dir": str(self._run.root),
            "manager_address": self._address("manager"),
            "seed": self._recipe.run.seed,
            "rl": {"groups_per_step": rl.groups_per_step, "max_staleness": rl.max_staleness},
        }
        return validated(TrainerConfig, _merged(defaults, self._recipe.trainer), "[trainer]")

    # ---- processes ---------------------------------------------------------------------

    @asynccontextmanager
    async def running(
        self, notify: Callable[[str], None] = lambda _: None
    ) -> AsyncIterator[tuple[RolloutClient, TrainerClient]]:
        """Starts everything in order of need and takes it down at the end, whatever happens.

        notify is told of restarts.
        """
        self._clear_scratch()
        for name, config in self._configs.items():
            (self._run.processes / f"{name}.json").write_text(config.model_dump_json(indent=1))
        write_json(self._run.addresses, {name: self._address(name) for name in self._ports})
        self.supervisor = Supervisor(notify=notify)
        try:
            async with AsyncExitStack() as stack:
                for spec in self._specs():
                    await self.supervisor.guard(self.supervisor.start(spec))
                channels = {
                    name: await stack.enter_async_context(serving.dial(self._address(name)))
                    for name in ("broker", "manager", "trainer")
                }
                rollout = RolloutClient(channels["manager"])
                self.started_at = time.time()
                if not self._only_broker:
                    self.at_start = await rollout.get_status()
                self._broker: Any = sandbox_pb2_grpc.SandboxBrokerStub(channels["broker"])
                yield rollout, TrainerClient(channels["trainer"])
        finally:
            await self.supervisor.close()
            for name, module in _SWEPT.items():
                if self.supervisor.exit_codes.get(name, 0) != 0:
                    self._sweep(name, module)
            self._clear_scratch()

    async def sandbox_status(self) -> sandbox_pb2.GetStatusReply:
        """The broker's counters."""
        reply: sandbox_pb2.GetStatusReply = await self._broker.GetStatus(
            sandbox_pb2.GetStatusRequest(), timeout=_CALL_TIMEOUT_S
        )
        return reply

    def _sweep(self, name: str, module: str) -> None:
        """Removes what a process that was killed could not: no later one may come to do it."""
        config = str(self._run.processes / f"{name}.json")
        argv = [PYTHON["main"], "-P", "-m", module, "--config", config, "--sweep"]
        with (self._run.logs / f"{name}.log").open("ab") as log:
            subprocess.run(argv, stdout=log, stderr=log, timeout=_SWEEP_TIMEOUT_S, check=False)

    def _clear_scratch(self) -> None:
        """Removes our scratch folder, and those of commands that were killed."""
        for path in _SCRATCH_PARENT.glob(f"{_SCRATCH_PREFIX}*"):
            owner = path.name.removeprefix(_SCRATCH_PREFIX)
            if path == self._scratch or not Path("/proc", owner).exists():
                shutil.rmtree(path, ignore_errors=True)

    def _specs(self) -> list[ProcessSpec]:
        specs = [self._server("broker", "sandbox.server")]
        if self._only_broker:
            return specs
        specs.append(self._server("manager", "rollout.server"))
        if self._with_trainer:
            specs.append(self._server("trainer", "trainer.server"))
        if self.serves_model:
            module = "rollout.gateway.app"
            specs += [self._server(name, module, config="gateway") for name in self._gateways]
        specs += [self._worker(name) for name in self._workers]
        return specs

    def _server(self, name: str, module: str, config: str = "") -> ProcessSpec:
        return server_spec(
            self._recipe.run,
            self._run,
            name,
            module,
            self._address(name),
            config=config,
            serves_http=config == "gateway",
        )

    def _worker(self, name: str) -> ProcessSpec:
        config = str(self._run.processes / "worker.json")
        argv = [
            PYTHON["harness"],
            "-P",
            "-m",
            "rollout.harness.worker",
            "--config",
            config,
            "--name",
            name,
        ]

        async def started() -> bool:
            return True  # it serves nothing: it leases work as soon as it can

        return _spec(self._recipe.run, self._run, name, argv, started)


def server_spec(
    settings: RunSettings,
    run: RunDirectory,
    name: str,
    module: str,
    address: str,
    *,
    config: str = "",
    serves_http: bool = False,
) -> ProcessSpec:
    """A server of the main environment, with the config file `processes/<config or name>.json`.

    It is up when its gRPC health, or its page /health, says so.
    """
    path = run.processes / f"{config or name}.json"
    arguments = ["--config", str(path), "--listen", address]

    async def grpc_ready() -> bool:
        return await serving.is_serving(address, timeout_s=_PROBE_TIMEOUT_S)

    async def http_ready() -> bool:
        return await _http_ok(f"http://{address}/health")

    argv = [PYTHON["main"], "-P", "-m", module, *arguments]
    return _spec(settings, run, name, argv, http_ready if serves_http else grpc_ready)


def _spec(
    settings: RunSettings, run: RunDirectory, name: str, argv: list[str], ready: Any
) -> ProcessSpec:
    return ProcessSpec(
        name=name,
        argv=argv,
        log_path=run.logs / f"{name}.log",
        ready=ready,
        env={"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
        start_timeout_s=settings.start_timeout_s,
        stop_timeout_s=settings.stop_timeout_s,
        restart=RestartPolicy(max_restarts=settings.max_restarts),
    )


async def _http_ok(url: str) -> bool:
    timeout = aiohttp.ClientTimeout(total=_PROBE_TIMEOUT_S)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url) as reply:
            return reply.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


def _merged(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """given over defaults, nested tables merged key by key."""
    result = dict(defaults)
    for key, value in given.items():
        if isinstance(value, dict) and isinstance(result.get(key), dict):
            result[key] = _merged(result[key], value)
        else:
            result[key] = value
    return result
