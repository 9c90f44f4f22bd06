"""Serves a recorded run to a trainer: `python -P -m rollout.recorded_server --config F --listen A`.

    trainer --NextBatch, FetchSequences--> recorded_server --> RecordedRun (ledger copy, tokens)
            --Rewind, AckBatch, ReportCheckpoint--> nothing: the record does not change

Owner: rollout. It stands in for the RolloutManager in a replay. SIGTERM ends waiting calls and
drains. A run that cannot be replayed is one line on stderr and exit status 2.
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
    make_server,
    run_service,
    serving_config,
    termination_event,
    write_address,
)
from rollout.config import RecordedRunConfig


async def run(config: RecordedRunConfig, serving: ServingConfig, address_file: Path | None) -> None:
    """Serves until SIGTERM or SIGINT. Raises ServingError or RolloutError when it cannot start."""
    from proto import rollout_pb2_grpc as pb_grpc
    from rollout.recorded_run import RecordedRun
    from rollout.recorded_servicer import RecordedServicer
    from rollout.servicer import SERVICE_NAME

    stop = termination_event()
    recorded = RecordedRun(config)
    try:
        servicer = RecordedServicer(config, recorded, stop)
        server = make_server(
            serving,
            lambda s: pb_grpc.add_RolloutManagerServicer_to_server(servicer, s),
            [SERVICE_NAME],
        )
        address = await server.start()
        if address_file is not None:
            write_address(address_file, address)
        await stop.wait()
        await server.stop()
    finally:
        recorded.close()


def main(argv: list[str] | None = None) -> int:
    """Parses arguments and serves; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="rollout.recorded_server", description="A recorded run's batches, for a replay."
    )
    parser.add_argument("--config", type=Path, required=True, help="JSON of RecordedRunConfig")
    add_serving_arguments(parser)
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        config = RecordedRunConfig.model_validate_json(args.config.read_text())
        serving = serving_config(args).model_copy(
            update={"drain_timeout_s": config.rollout.drain_timeout_s}
        )
    except (OSError, ValidationError, ServingError) as error:
        return fail(f"rollout.recorded_server: {args.config}: {error}")
    from rollout.errors import RolloutError

    try:
        run_service(run(config, serving, args.address_file))
    except (ServingError, RolloutError, OSError) as error:
        return fail(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
