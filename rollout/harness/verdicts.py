"""Verdicts on equal work, kept so that it is graded once.

Owner: one task folder. The members of a group often hand in the same patch; the same files under
the same tests have the same verdict, as long as the tests do not depend on chance or time. Off by
default (`grading.reuse_verdicts`), since only the one who chose the tasks knows that.

Invariants: only a verdict that the tests gave is kept, never a failure or a death; the key covers
every path, mode and byte that grading would see beyond the task's own files.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from rollout.harness.changes import Changes, TreeFile

_V = TypeVar("_V")


def digest(changes: Changes) -> bytes:
    """SHA-256 over what the agent changed, in an order of its own."""
    sha = hashlib.sha256()
    for path in sorted(changes.written):
        entry = changes.written[path]
        if isinstance(entry, TreeFile):
            kind, content = f"file {entry.mode:o}", entry.content
        else:
            kind, content = "link", entry.target.encode("utf-8", "surrogateescape")
        head = f"{kind} {len(content)} ".encode()
        sha.update(head + path.encode("utf-8", "surrogateescape") + b"\0" + content)
    for path in sorted(changes.deleted):
        sha.update(b"deleted " + path.encode("utf-8", "surrogateescape") + b"\0")
    return sha.digest()


class Verdicts:
    """Verdicts of one task by `digest`, least recently used dropped. Not for several loops."""

    def __init__(self) -> None:
        self._kept: OrderedDict[bytes, Any] = OrderedDict()
        self._under_way: dict[bytes, asyncio.Future[None]] = {}

    async def get(
        self,
        key: bytes,
        grade: Callable[[], Awaitable[_V]],
        is_kept: Callable[[_V], bool],
        max_kept: int,
    ) -> tuple[_V, bool]:
        """(verdict, whether it is another attempt's): `grade`s unless it is known.

        While one attempt is graded, those with the same key wait for it; if it ends with nothing to
        keep, they grade on their own, all at once. Raises what `grade` raises.
        """
        under_way = self._under_way.get(key)
        if under_way is not None:
            await asyncio.wait({under_way})
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key], True
        ended = asyncio.get_running_loop().create_future()
        if under_way is None:
            self._under_way[key] = ended
        try:
            verdict = await grade()
            if is_kept(verdict):
                self._kept[key] = verdict
                while len(self._kept) > max_kept:
                    self._kept.popitem(last=False)
            return verdict, False
        finally:
            if self._under_way.get(key) is ended:
                del self._under_way[key]
            ended.set_result(None)
