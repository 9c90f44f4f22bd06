"""How many optimizer updates lie between two weight_versions.

A resume publishes the loaded weights under a new version, and a lost publication uses up one: how
far two versions are apart does not say how far their weights are. Counted in versions, what was
sampled before a resume would be masked as stale although the weights have hardly changed.

    RUN/versions.jsonl   one Noted a line, written before the version goes out; on a full disk
                         once there is room

Each process begins a branch at the checkpoint that it loaded. Between versions of two branches lie
the updates from either back to where the branches part. Owner: StageRunner. Versions never repeat,
so lines of abandoned lineages stay true.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trainer.line_log import LineLog

_ROOT = -1
"""The branch from which those begin that loaded no checkpoint."""


@dataclasses.dataclass(frozen=True)
class Noted:
    """What a version holds."""

    weight_version: int
    update: int
    """Updates from the run's beginning to these weights, along their branch."""
    branch: int
    parent: int
    """The branch from which this one parted; _ROOT for none."""
    fork: int
    """`update` at which it did."""


class VersionSteps:
    """The updates that each version holds, on disk."""

    def __init__(self, path: Path, from_version: int = 0) -> None:
        """Reads the file, if there is one, and begins a branch at `from_version`.

        Args:
          from_version: the version of the checkpoint that was loaded; 0: none was.
        """
        self._lines = LineLog(path)
        self._noted: dict[int, Noted] = {}
        # A line cut by a crash is of a version that was never published.
        for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
            try:
                noted = Noted(**json.loads(line))
            except (ValueError, TypeError):
                continue
            self._noted[noted.weight_version] = noted
        self._branches = {n.branch: (n.parent, n.fork) for n in self._noted.values()}
        self._branch = max(self._branches, default=_ROOT) + 1
        start = self._noted.get(from_version)
        self._parent, self._fork = (start.branch, start.update) if start else (_ROOT, 0)
        self._branches[self._branch] = (self._parent, self._fork)

    def add(self, weight_version: int, num_updates: int) -> None:
        """Notes what a version is about to hold: `num_updates` since this process began."""
        noted = Noted(
            weight_version, self._fork + num_updates, self._branch, self._parent, self._fork
        )
        self._noted[weight_version] = noted
        self._lines.append(json.dumps(dataclasses.asdict(noted)))

    def aged(self, versions: npt.NDArray[np.int64], weight_version: int) -> npt.NDArray[np.int64]:
        """int64[T] versions -> int64[T]: `weight_version` less the updates that lie between.

        So they would be if every version were one update after the one before. A version that was
        not noted stays as it is.
        """
        if weight_version not in self._noted:
            return versions
        distinct, inverse = np.unique(versions, return_inverse=True)
        mapped = [
            weight_version - self.distance(v, weight_version) if v in self._noted else v
            for v in distinct.tolist()
        ]
        return np.asarray(mapped, dtype=np.int64)[inverse]

    def distance(self, version: int, other: int) -> int:
        """Updates between two noted versions. Raises KeyError for one that was not noted."""
        near, far = self._noted[version], self._noted[other]
        (a, m), (b, n) = (near.branch, near.update), (far.branch, far.update)
        updates = 0
        while a != b:
            # Branches are numbered as they began, so the younger one parted from something older.
            if a > b:
                parent, fork = self._branches[a]
                updates, a, m = updates + m - fork, parent, fork
            else:
                parent, fork = self._branches[b]
                updates, b, n = updates + n - fork, parent, fork
        return updates + abs(m - n)
