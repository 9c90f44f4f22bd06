"""Frees sandboxes whose lease nobody renewed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

_log = logging.getLogger(__name__)


async def run_reaper(reap: Callable[[], Awaitable[int]], interval_s: float) -> None:
    """Calls `reap` (frees what has expired, returns how many) every interval_s until cancelled."""
    while True:
        await asyncio.sleep(interval_s)
        try:
            count = await reap()
        except OSError:
            # One sandbox that cannot be torn down must not stop the reaping of others.
            _log.exception("reaping failed; trying again in %.1f s", interval_s)
            continue
        if count:
            _log.info("reaped %d expired leases", count)
