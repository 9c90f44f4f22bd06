"""Leases of attempts: who may start what now, who holds it, and who took a name over.

Owner: rollout.manager. Works on the ledger's rows. An attempt may start when the staleness
gate or a queue has one, admission does not hold it, every backend that it needs is believed
to work (rollout.backends), and, for `mini`, an engine serves.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from proto import rollout_pb2 as pb
from rollout.attempt_ends import AttemptEnds
from rollout.attempt_table import Attempt, AttemptTable
from rollout.config import RolloutConfig
from rollout.engines.engine_pool import EnginePool
from rollout.evaluations import AGENTS
from rollout.ledger import Ledger
from rollout.staleness_gate import StalenessGate
from rollout.worker_names import WorkerNames

_LOG = logging.getLogger(__name__)


class Leases:
    """Grants, extends and takes back."""

    def __init__(
        self,
        config: RolloutConfig,
        ledger: Ledger,
        attempts: AttemptTable,
        ends: AttemptEnds,
        pool: EnginePool,
        clock: Callable[[], float],
    ) -> None:
        """`clock` gives Unix seconds."""
        self._config = config
        self._ledger = ledger
        self._attempts = attempts
        self._ends = ends
        self._pool = pool
        self._clock = clock
        self._gate = StalenessGate(config.max_staleness, config.batch_groups)
        self._names = WorkerNames()

    @property
    def has_engine(self) -> bool:
        """Whether an engine serves, or will once the open window is over."""
        states = {engine.state for engine in self._pool.engines.values()}
        return bool(states & {"serving", "updating"})

    def claim_name(self, worker: str, incarnation: str) -> int:
        """A worker's process calls; if it is new, its predecessor's attempts are queued again.

        Returns how many there were.

        Raises:
            FencedError: a newer process has the name.
        """
        if not self._names.claim(worker, incarnation):
            return 0
        held = self._attempts.select("worker=? AND state IN ('leased','running')", worker)
        for attempt in held:
            self._ends.take_back(attempt, "the worker restarted")
        self._ends.backends.worker_restarted(worker)
        if held:
            _LOG.warning("worker %s restarted: %d attempts queued again", worker, len(held))
        return len(held)

    def grant(
        self, worker: str, max_attempts: int, *, new_groups: bool, training: bool
    ) -> list[Attempt] | None:
        """Leases up to `max_attempts`; None when nothing may start now.

        Args:
            new_groups: groups may be started for it.
            training: attempts of training groups may be leased, not evaluations' alone.
        """
        now_s = self._clock()
        backends = self._ends.backends
        rooms = {agent: backends.room(agent, worker) for agent in AGENTS}
        agents = [a for a in AGENTS if rooms[a] != 0 and (a != "mini" or self.has_engine)]
        if not agents:
            return None
        max_attempts = min([max_attempts, *(r for a in agents if (r := rooms[a]) is not None)])
        with self._ledger.transaction():
            if new_groups and self._config.agent in agents:
                self._start_groups(max_attempts - self._attempts.count("state='queued'"), now_s)
            expires_at = now_s + self._config.lease_ttl_s
            leased = self._attempts.lease(
                worker, max_attempts, agents, now_s, expires_at, training=training
            )
        for attempt in leased:
            backends.started(attempt)
        return leased or None

    def renew(self, worker: str, keys: Sequence[pb.AttemptKey]) -> tuple[list[bool], float]:
        """Extends leases; which are held, and until when (Unix seconds)."""
        expires_at = self._clock() + self._config.lease_ttl_s
        with self._ledger.transaction():
            held = [self._attempts.renew(k.attempt_id, k.epoch, worker, expires_at) for k in keys]
        return held, expires_at

    def _start_groups(self, num_attempts: int, now_s: float) -> None:
        """Starts as many groups as `num_attempts` need and the gate allows."""
        startable = self._gate.num_startable(self._attempts.num_unconsumed_groups())
        while num_attempts > 0 and startable > 0:
            task_id = self._ledger.sample_task(pb.POOL_TRAIN, self._config.seed)
            if task_id is None:
                return
            size = self._config.group_size
            self._attempts.start_group(task_id, self._config.agent, size, now_s)
            num_attempts -= size
            startable -= 1
