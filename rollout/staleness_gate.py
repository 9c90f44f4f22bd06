"""How many groups may be under way, so that slow ones are not born stale.

Owner: rollout.manager. Pure. A group is unconsumed from its start until the trainer has
trained it or it was dropped: open, ready and claimed ones count. With at most
(max_staleness + 1) x batch_groups of them, and batches that take the oldest ready groups, a
group that ends no later than those started after it is in one of the next max_staleness + 1
batches: at most max_staleness updates come between its start and its batch. One that is
overtaken may be staler; the trainer masks its old tokens. With max_staleness 0 nothing starts
between the claim of a batch and its acknowledgement, which follows the publication: that is
synchronous RL.
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
