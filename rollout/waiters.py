"""A broadcast on one event loop: long polls wait for it and look again.

Owner: rollout.manager. A waiter that checks, then waits without an await between the two,
misses nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")


class Waiters:
    """Wakes every waiter whenever something changed."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()
        self._closed = False

    def notify(self) -> None:
        """Lets every waiter look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    def close(self) -> None:
        """Ends all waiting, now and later: the server drains."""
        self._closed = True
        self.notify()

    async def until(self, look: Callable[[], _T | None], timeout_s: float) -> _T | None:
        """The first result of `look` that is not None; None once `timeout_s` passed."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + timeout_s
        while True:
            changed = self._changed
            found = look()
            left_s = end_s - loop.time()
            if found is not None or self._closed or left_s <= 0:
                return found
            try:
                await asyncio.wait_for(changed.wait(), left_s)
            except TimeoutError:
                return look()
