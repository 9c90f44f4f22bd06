"""The trainer process.

    python -P -m trainer.server --config FILE.json --listen HOST:PORT --address-file PATH

    main thread: StageRunner (torch, stages, checkpoints)
    loop thread: gRPC service, channel to the RolloutManager, weight publisher

On a grid of several ranks this is the first; it starts the others (followers.py), or torchrun has
started them all. Another rank serves nothing: it follows (team.py), reads its own tokens from the
manager, and ends with the first.

Start order: configuration, the run directory's lock, device, weights (the newest sound checkpoint,
else model_dir), then the port is bound, the address written, and health goes SERVING. SIGTERM and SIGINT end the
process after the current step, with a checkpoint if one is due.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from proto.serving import Server
    from trainer.config import TrainerConfig
    from trainer.manager_link import ManagerLink

SERVICE = "swe_rl.trainer.v1.Trainer"


class LoopThread:
    """An asyncio loop in a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="loop", daemon=True)
        self._thread.start()

    def call(self, coroutine: Any) -> Any:
        """Runs a coroutine in the loop and returns its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    def close(self) -> None:
        """Ends the loop."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()


def make_link(
    config: TrainerConfig, loop: asyncio.AbstractEventLoop, *, publishes: bool = True
) -> ManagerLink | None:
    """Connects to the manager, or returns None when there is none. Call it in the loop."""
    if not config.manager_address:
        return None
    from proto.serving import ClientSecurity, dial
    from rollout.client import RolloutClient
    from trainer.manager_link import CountingPublisher, ManagerLink
    from weightsync.publisher import PublishError, WeightPublisher

    channel = dial(config.manager_address, ClientSecurity.from_environment())
    client = RolloutClient(channel, call_timeout_s=config.manager_timeout_s)
    if config.replay_of is not None or not publishes:
        return ManagerLink(loop, client, CountingPublisher(), config.manager_retry_s)
    publisher = WeightPublisher(config.weight_sync, client)
    return ManagerLink(loop, client, publisher, config.manager_retry_s, (PublishError,))


def serve(
    config: TrainerConfig, config_file: Path, serving: Any, address_file: Path | None
) -> None:
    """Runs the process until it is told to stop, as the only trainer on its run directory.

    Raises:
      TrainerError, ServingError, ValueError: it cannot start.
    """
    from trainer.followers import following
    from trainer.run_lock import run_lock

    with (
        run_lock(config.run_dir, config.lock_wait_s),
        following(config.grid.num_ranks, config_file, config.collective_timeout_s),
    ):
        _serve(config, serving, address_file)


def follow(config: TrainerConfig) -> None:
    """Runs another rank than the first until that one ends.

    Raises:
      TrainerError: it cannot start, or the first rank is gone.
    """
    from trainer import device as devices
    from trainer.followers import end_with_parent
    from trainer.grid_work import GridWork
    from trainer.team import Team

    end_with_parent()
    for number in (signal.SIGTERM, signal.SIGINT):  # the first rank's to heed
        signal.signal(number, signal.SIG_IGN)
    device = devices.enter(config.num_threads, config.collective_timeout_s)
    loop_thread = LoopThread()

    async def link() -> ManagerLink | None:
        return make_link(config, asyncio.get_running_loop(), publishes=False)

    own = loop_thread.call(link())
    team = Team(devices.team_store(), devices.rank())
    GridWork(config, device, None if own is None else own.fetch, team)
    team.follow()
    loop_thread.close()
    devices.leave()


def _serve(config: TrainerConfig, serving: Any, address_file: Path | None) -> None:
    from proto import trainer_pb2_grpc
    from proto.serving import make_server, write_address
    from trainer import device as devices
    from trainer.service import TrainerService
    from trainer.stage_runner import StageRunner
    from trainer.team import Team

    device = devices.enter(config.num_threads, config.collective_timeout_s)
    loop_thread = LoopThread()

    async def link() -> ManagerLink | None:
        return make_link(config, asyncio.get_running_loop())

    runner = StageRunner(config, device, loop_thread.call(link()), team=Team(devices.team_store()))

    async def start() -> tuple[Server, asyncio.Event]:
        stopping = asyncio.Event()
        service = TrainerService(runner, stopping)
        server = make_server(
            serving,
            lambda s: trainer_pb2_grpc.add_TrainerServicer_to_server(service, s),  # type: ignore[no-untyped-call]
            [SERVICE],
        )
        await server.start()
        return server, stopping

    server, stopping = loop_thread.call(start())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: runner.stop(save_checkpoint=True))
    if address_file is not None:
        write_address(address_file, server.address)
    try:
        runner.run()
    finally:

        async def drain() -> None:
            stopping.set()
            await server.stop()

        loop_thread.call(drain())
        loop_thread.close()
        devices.leave()


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    from proto import serving as serving_module

    parser = argparse.ArgumentParser(description="Serve the trainer.")
    parser.add_argument("--config", type=Path, required=True, help="JSON of TrainerConfig")
    parser.add_argument(
        "--sweep", action="store_true", help="remove what killed trainers left behind, and exit"
    )
    serving_module.add_serving_arguments(parser)
    args = parser.parse_args(argv)
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
    )
    # It reports every parameter and setting at INFO.
    logging.getLogger("megatron").setLevel(logging.WARNING)
    from trainer.config import TrainerConfig
    from trainer.errors import BadRequestError, LeaderLostError

    try:
        config = TrainerConfig.model_validate_json(args.config.read_text())
        if args.sweep:
            from weightsync.publisher import sweep

            sweep(config.weight_sync)
            return 0
        if int(os.environ.get("RANK", "0")) > 0:
            follow(config)
            return 0
        serving = serving_module.serving_config(args).model_copy(
            update={"drain_timeout_s": config.drain_timeout_s}
        )
        serve(config, args.config, serving, args.address_file)
    except (OSError, ValueError, BadRequestError, LeaderLostError) as error:
        return serving_module.fail(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
