"""A RolloutManager with what belongs to it, and its gRPC server: as the process runs them.

Tests that drive a real manager in their own event loop make it here too.
"""

from __future__ import annotations

import functools
import secrets
import time

from proto import rollout_pb2_grpc as pb_grpc
from proto.serving import Server, ServingConfig, make_server
from rollout.config import RolloutConfig
from rollout.engines.engine_pool import EnginePool
from rollout.ledger import Ledger
from rollout.manager import RolloutManager
from rollout.servicer import SERVICE_NAME, RolloutServicer
from rollout.token_store import TokenStore

_KEY_BYTES = 32


def open_manager(config: RolloutConfig) -> RolloutManager:
    """Opens ledger and token store under `run_dir`; `recover` and `start` come next.

    Raises RolloutError when another manager holds the ledger.
    """
    fsync = config.durability == "power"
    return RolloutManager(
        config=config,
        ledger=Ledger(config.run_dir / "ledger.db", fsync=fsync, lock_wait_s=config.lock_wait_s),
        tokens=TokenStore(config.run_dir / "tokens", fsync=fsync),
        pool=EnginePool(config.engines, config.run_dir, config.run_dir / "logs", time.monotonic),
        clock=time.time,
        monotonic=time.monotonic,
        make_key=functools.partial(secrets.token_urlsafe, _KEY_BYTES),
    )


def manager_server(manager: RolloutManager, serving: ServingConfig) -> Server:
    """A server of the manager, not started."""
    return make_server(
        serving,
        lambda server: pb_grpc.add_RolloutManagerServicer_to_server(
            RolloutServicer(manager), server
        ),
        [SERVICE_NAME],
    )
