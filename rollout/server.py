"""The RolloutManager's process: `python -P -m rollout.server --config F --listen A`.

Owner: rollout. Opens the ledger and the token store under the run directory, serves
rollout.servicer, then starts the engines. SIGTERM ends waiting calls, drains, ends the
engines and exits 0. A bad configuration, a port in use or a ledger that another manager
holds is one line on stderr and exit status 2.
"""

from __future__ import annotations

import argparse
import functools
import logging
import secrets
import sys
import time
from pathlib import Path

from pydantic import ValidationError

from proto.serving import (
    ServingConfig,
    ServingError,
    add_serving_arguments,
    fail,
    make_server,
    run_service,
    serving_config,
    termination_event,
    write_address,
)
from rollout.config import RolloutConfig


async def run(config: RolloutConfig, serving: ServingConfig, address_file: Path | None) -> None:
    """Serves until SIGTERM or SIGINT. Raises ServingError or RolloutError when it cannot start."""
    # Imported here, so that --help and a bad configuration answer at once.
    from proto import rollout_pb2_grpc as pb_grpc
    from rollout.engines.engine_pool import EnginePool
    from rollout.ledger import Ledger
    from rollout.manager import RolloutManager
    from rollout.servicer import SERVICE_NAME, RolloutServicer
    from rollout.token_store import TokenStore

    stop = termination_event()
    fsync = config.durability == "power"
    path = config.run_dir / "ledger.db"
    ledger = Ledger(path, fsync=fsync, lock_wait_s=config.lock_wait_s)
    manager = RolloutManager(
        config=config,
        ledger=ledger,
        tokens=TokenStore(config.run_dir / "tokens", fsync=fsync),
        pool=EnginePool(config.engines, config.run_dir, config.run_dir / "logs", time.monotonic),
        clock=time.time,
        monotonic=time.monotonic,
        make_key=functools.partial(secrets.token_urlsafe, 32),
    )
    server = make_server(
        serving,
        lambda grpc_server: pb_grpc.add_RolloutManagerServicer_to_server(
            RolloutServicer(manager), grpc_server
        ),
        [SERVICE_NAME],
    )

    try:
        manager.recover()
        address = await server.start()  # before the engines: a taken port is told at once
        await manager.start()
        if address_file is not None:
            write_address(address_file, address)
        await stop.wait()
        manager.waiters.close()
        await server.stop()
    finally:
        await manager.close()


def main(argv: list[str] | None = None) -> int:
    """Parses arguments and serves; returns the exit status."""
    parser = argparse.ArgumentParser(prog="rollout.server", description="The RolloutManager.")
    parser.add_argument("--config", type=Path, required=True, help="JSON of RolloutConfig")
    parser.add_argument(
        "--sweep", action="store_true", help="remove what killed managers left behind, and exit"
    )
    add_serving_arguments(parser)
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    if args.sweep:
        from rollout.engines.engine_process import sweep_folders

        sweep_folders()
        return 0
    try:
        config = RolloutConfig.model_validate_json(args.config.read_text())
        serving = serving_config(args).model_copy(
            update={"drain_timeout_s": config.drain_timeout_s}
        )
    except (OSError, ValidationError, ServingError) as error:
        return fail(f"rollout.server: {args.config}: {error}")
    from rollout.errors import RolloutError

    try:
        run_service(run(config, serving, args.address_file))
    except (ServingError, RolloutError, OSError) as error:
        return fail(f"rollout.server: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
