"""Which process holds a worker's name: the newest that came with it.

Owner: rollout.manager. Pure. In memory only: a restart of the manager requeues every leased
attempt anyway, so that the next caller under a name finds nothing to take over.
"""

from __future__ import annotations

from rollout.errors import FencedError


class WorkerNames:
    """Incarnations by worker name."""

    def __init__(self) -> None:
        self._present: dict[str, str] = {}
        self._retired: set[tuple[str, str]] = set()

    def claim(self, worker: str, incarnation: str) -> bool:
        """True when this process is new under the name, and takes over what the name held.

        A worker without an incarnation takes nothing over.

        Raises:
            FencedError: a newer process has the name.
        """
        if not incarnation or self._present.get(worker) == incarnation:
            return False
        if (worker, incarnation) in self._retired:
            raise FencedError(
                f"worker {worker}: another process leases under this name since; stop this one, "
                "or give each worker a --name of its own"
            )
        if before := self._present.get(worker):
            self._retired.add((worker, before))
        self._present[worker] = incarnation
        return True
