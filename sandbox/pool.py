"""Warm sandboxes by image: made ahead of time, handed out once, never taken back.

Owner: the broker's event loop. Invariant: a sandbox that died while it waited is never handed
out. The pool holds no capacity of its own: its owner counts what it adds and takes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Generic, TypeVar

from sandbox.backends.base import Sandbox

S = TypeVar("S", bound=Sandbox)


class WarmPool(Generic[S]):
    """Ready sandboxes, oldest first."""

    def __init__(self, targets: Mapping[str, int]) -> None:
        """Args: targets is the number to keep ready by image name."""
        self._targets = {image: count for image, count in targets.items() if count > 0}
        self._ready: dict[str, deque[S]] = {image: deque() for image in self._targets}

    def __len__(self) -> int:
        return sum(len(ready) for ready in self._ready.values())

    def missing(self) -> list[str]:
        """Images below their target, one entry a missing sandbox, emptiest image first."""
        shortfalls = sorted(
            ((len(self._ready[image]) / target, image) for image, target in self._targets.items())
        )
        return [
            image
            for _, image in shortfalls
            for _ in range(self._targets[image] - len(self._ready[image]))
        ]

    def add(self, image: str, sandbox: S) -> None:
        """Puts a fresh sandbox in."""
        self._ready[image].append(sandbox)

    def take(self, image: str) -> S | None:
        """The oldest living sandbox of the image, or None. Dead ones stay for take_dead."""
        ready = self._ready.get(image, deque())
        for index, sandbox in enumerate(ready):
            if sandbox.alive:
                del ready[index]
                return sandbox
        return None

    def take_dead(self) -> list[S]:
        """Takes out the sandboxes that died while they waited."""
        dead: list[S] = []
        for image, ready in self._ready.items():
            dead += [sandbox for sandbox in ready if not sandbox.alive]
            self._ready[image] = deque(sandbox for sandbox in ready if sandbox.alive)
        return dead

    def take_any(self) -> S | None:
        """One sandbox to give up for another image's sake: from the fullest image."""
        image = max(self._ready, key=lambda name: len(self._ready[name]), default=None)
        if image is None or not self._ready[image]:
            return None
        return self._ready[image].popleft()
