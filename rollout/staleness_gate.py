"""How many groups may be under way, so that slow ones are not born stale.

Owner: rollout.manager. Pure. A group is unconsumed from its start until the trainer has
trained it or it was dropped: open, ready and claimed ones count. With at most
(max_staleness + 1) x batch_groups of them, a group that starts now is consumed, taken
oldest first, at most max_staleness + 1 batches from now, hence after at most max_staleness
further updates.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StalenessGate:
    """The bound on started, unconsumed groups."""

    max_staleness: int  # versions
    batch_groups: int  # groups in a batch

    @property
    def limit(self) -> int:
        """Started, unconsumed groups allowed at once."""
        return (self.max_staleness + 1) * self.batch_groups

    def num_startable(self, num_unconsumed: int) -> int:
        """Groups that may start now, given those started and not consumed yet."""
        return max(0, self.limit - num_unconsumed)
