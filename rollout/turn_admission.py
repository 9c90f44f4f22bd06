"""Tickets: which model call may run where, from AdmitTurn until AppendTurn or ReleaseTicket.

Owner: rollout.manager. Drives the native KvScheduler, which decides; this file holds the
callers that wait for it, follows the engines' states, and gives up lost tickets. Tickets
live in memory only: after a restart every attempt is requeued under a new epoch anyway.
Invariants: a ticket is queued, granted or gone; a granted one holds budget until it is
finished, released, lost with its engine or attempt, or older than `ticket_ttl_s`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from rollout.config import SchedulerConfig
from rollout.errors import CapExceededError, ConflictError, DeadlineError, UnavailableError
from rollout.kv_keys import KvEngine, KvKey, KvKeys
from rollout.scheduler import KvScheduler

_LOG = logging.getLogger(__name__)


class EngineView(KvEngine, Protocol):
    """What admission reads of rollout.engines' Engine."""

    @property
    def state(self) -> str: ...
    @property
    def token_budget(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Grant:
    """Where a call may run, what it may read there, and how long it waited in seconds."""

    engine: str
    kv: KvKey
    queued_s: float


@dataclass(slots=True)
class _Ticket:
    ticket_id: str
    session: str
    granted: asyncio.Future[Grant] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    granted_at_s: float = 0.0
    num_waiters: int = 0


class TurnAdmission:
    """Waits of model calls for engines. Everything runs on one event loop."""

    def __init__(
        self, config: SchedulerConfig, kv_keys: KvKeys, clock: Callable[[], float]
    ) -> None:
        """`clock` counts monotonic seconds."""
        self._config = config
        self._kv_keys = kv_keys
        self._clock = clock
        self._scheduler = KvScheduler(
            high_watermark=config.high_watermark,
            ageing_s=config.ageing_s,
            hard_context_cap=config.hard_context_cap,
            growth_tokens=config.growth_tokens,
        )
        self._tickets: dict[str, _Ticket] = {}
        self._engines: dict[str, EngineView] = {}
        self._paused = False
        self.num_admitted = 0

    @property
    def num_queued(self) -> int:
        """Calls that wait."""
        return int(self._scheduler.stats()["queued"])

    def tokens_reserved(self, engine: str) -> int:
        """Predicted KV use of an engine, in tokens; 0 for one that serves nothing."""
        stats = self._scheduler.stats()["engines"].get(engine)
        return 0 if stats is None else int(stats["tokens_reserved"])

    def follow_engine(self, engine: EngineView) -> None:
        """Takes an engine in when it serves, and out when it is lost.

        An engine that is updating stays: its calls go on after the window.
        """
        if engine.state == "serving":
            if engine.name not in self._engines:
                self._engines[engine.name] = engine
                self._scheduler.add_engine(engine.name, engine.token_budget)
        elif engine.state != "updating" and engine.name in self._engines:
            del self._engines[engine.name]
            lost = self._scheduler.remove_engine(engine.name)
            for ticket_id in lost:
                self._tickets.pop(ticket_id, None)
            _LOG.warning("engine %s is %s: %d calls lost", engine.name, engine.state, len(lost))
        self.pump()

    def set_paused(self, paused: bool) -> None:
        """While paused, as in an update window, nothing is admitted."""
        if paused != self._paused:
            self._paused = paused
            self._scheduler.set_paused(paused)
            self.pump()

    async def admit(
        self,
        ticket_id: str,
        session: str,
        prompt_tokens: int,
        max_new_tokens: int,
        priority: int,
        timeout_s: float,
    ) -> Grant:
        """Waits until an engine has room. A repeated ticket joins the first.

        Raises:
            CapExceededError: the call can never fit.
            ConflictError: the ticket is another session's.
            UnavailableError: the time ran out while no engine admitted anything.
            DeadlineError: the time ran out in the queue.
        """
        ticket = self._tickets.get(ticket_id)
        if ticket is None:
            ticket = self._submit(ticket_id, session, prompt_tokens, max_new_tokens, priority)
        elif ticket.session != session:
            raise ConflictError(f"ticket {ticket_id} belongs to another session; make a new one")
        ticket.num_waiters += 1
        try:
            return await asyncio.wait_for(asyncio.shield(ticket.granted), timeout_s)
        except TimeoutError:
            raise self._timed_out(ticket_id, timeout_s) from None
        finally:
            ticket.num_waiters -= 1
            if not ticket.granted.done() and ticket.num_waiters == 0:
                self.release(ticket_id)

    def finish(self, ticket_id: str, resident_tokens: int) -> None:
        """The call ended; its session keeps `resident_tokens` in that engine's cache."""
        if self._tickets.pop(ticket_id, None) is not None:
            self._scheduler.finish(ticket_id, resident_tokens, self._clock())
            self.pump()

    def release(self, ticket_id: str) -> str:
        """Gives a ticket back; returns the engine that it ran on, or an empty string."""
        ticket = self._tickets.pop(ticket_id, None)
        if ticket is None:
            return ""
        self._scheduler.cancel(ticket_id)
        if not ticket.granted.done():
            ticket.granted.cancel()
            return ""
        self.pump()
        return "" if ticket.granted.cancelled() else ticket.granted.result().engine

    def end_session(self, session: str) -> None:
        """The attempt's try is over: its tickets and resident tokens go."""
        for ticket in [t for t in self._tickets.values() if t.session == session]:
            self.release(ticket.ticket_id)
        self._scheduler.end_session(session)
        self._kv_keys.end_session(session)
        self.pump()

    def reclaim_lost(self) -> int:
        """Gives up granted tickets whose gateway fell silent; returns how many."""
        limit_s = self._clock() - self._config.ticket_ttl_s
        lost = [
            t.ticket_id
            for t in self._tickets.values()
            if t.granted.done() and t.granted_at_s < limit_s
        ]
        for ticket_id in lost:
            _LOG.warning("ticket %s was neither used nor released in time", ticket_id)
            self.release(ticket_id)
        return len(lost)

    def pump(self) -> None:
        """Grants what the scheduler admits now."""
        now_s = self._clock()
        for admission in self._scheduler.poll(now_s):
            ticket = self._tickets.get(admission.ticket_id)
            if ticket is None or ticket.granted.done():
                self._scheduler.cancel(admission.ticket_id)
                continue
            ticket.granted_at_s = now_s
            kv = self._kv_keys.grant(ticket.session, self._engines[admission.engine])
            ticket.granted.set_result(Grant(admission.engine, kv, admission.queued_s))
            self.num_admitted += 1

    def _submit(
        self,
        ticket_id: str,
        session: str,
        prompt_tokens: int,
        max_new_tokens: int,
        priority: int,
    ) -> _Ticket:
        try:
            self._scheduler.submit(
                ticket_id, session, prompt_tokens, max_new_tokens, priority, self._clock()
            )
        except ValueError as error:
            raise CapExceededError(str(error), "hard_context_cap") from error
        ticket = self._tickets[ticket_id] = _Ticket(ticket_id, session)
        self.pump()
        return ticket

    def _timed_out(self, ticket_id: str, timeout_s: float) -> UnavailableError | DeadlineError:
        if not self._engines or self._paused:
            why = "an update window is open" if self._engines else "no engine serves"
            return UnavailableError(
                f"ticket {ticket_id}: {why}, and {timeout_s:.1f} s passed; ask again"
            )
        return DeadlineError(
            f"ticket {ticket_id} waited {timeout_s:.1f} s behind {self.num_queued} calls; ask again"
        )
