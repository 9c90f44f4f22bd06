"""The RolloutManager's process: `python -P -m rollout.server --config F --listen A`.

Owner: rollout. Opens the ledger and the token store under the run directory, serves
rollout.servicer, then starts the engines. SIGTERM ends waiting calls, drains, ends the
engines and exits 0. A bad configuration, a port in use or a ledger that another manager
holds is one line on stderr and exit status 2.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from pydantic import ValidationError

from proto.serving import (
    ServingConfig,
    ServingError,
    add_serving_arguments,
    fail,
    run_service,
    serving_config,
    termination_event,
    write_address,
)
from rollout.config import RolloutConfig


async def run(config: RolloutConfig, serving: ServingConfig, address_file: Path | None) -> None:
    """Serves until SIGTERM or SIGINT. Raises ServingError or RolloutError when it cannot start."""
    # Imported here, so that --help and a bad configuration answer at once.
    from rollout.assembly import manager_server, open_manager

    stop = termination_event()
    manager = open_manager(config)
    server = manager_server(manager, serving)

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
