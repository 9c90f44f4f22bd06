"""Calls from the agent's thread into the worker's event loop.

Owner: one agent run. mini-swe-agent is synchronous, everything else here is asyncio. After
`abandon` the call in flight is cancelled and every later one raises, so that the thread ends.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from rollout.harness.errors import AttemptAbandonedError

_T = TypeVar("_T")


class LoopBridge:
    """Made on the loop, used by one thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, attempt_id: str) -> None:
        self._loop, self._attempt_id = loop, attempt_id
        self._lock = threading.Lock()
        self._abandoned = False
        self._future: concurrent.futures.Future[Any] | None = None

    def call(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Runs the coroutine on the loop and waits for it. Raises AttemptAbandonedError."""
        with self._lock:
            if self._abandoned:
                coroutine.close()
                raise AttemptAbandonedError(f"attempt {self._attempt_id} was given up")
            future = self._future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError as error:
            raise AttemptAbandonedError(f"attempt {self._attempt_id} was given up") from error

    def abandon(self) -> None:
        """Ends the call in flight and refuses further ones. Called on the loop."""
        with self._lock:
            self._abandoned = True
            if self._future is not None:
                self._future.cancel()
