"""Tickets: permission to run one engine call, from AdmitTurn until it is given back.

Owner: TurnRunner. Invariant: every ticket asked for ends by AppendTurn or by ReleaseTicket,
also when the client leaves while the grant is on its way. A repeated AdmitTurn or
ReleaseTicket is safe: both are idempotent by ticket_id.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from proto import rollout_pb2 as pb
from rollout.client import (
    CapExceededError,
    DeadlineError,
    FencedError,
    NotFoundError,
    RolloutClient,
    RolloutError,
    UnavailableError,
)
from rollout.gateway.config import GatewayConfig
from rollout.gateway.engine_client import EngineClient
from rollout.gateway.refusal import Reason, Refusal, token_cap, turn_cap
from rollout.gateway.session import Session, SessionCache

_LOG = logging.getLogger(__name__)


class Tickets:
    """Asks for tickets and gives them back; `close` waits for what is under way."""

    def __init__(
        self,
        config: GatewayConfig,
        rollout: RolloutClient,
        engines: EngineClient,
        sessions: SessionCache,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]],
    ) -> None:
        """`clock` counts monotonic seconds."""
        self._config = config
        self._rollout = rollout
        self._engines = engines
        self._sessions = sessions
        self._clock = clock
        self._sleep = sleep
        self._background: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Waits until every ticket under way is given back."""
        await asyncio.gather(*self._background, return_exceptions=True)

    async def admit(
        self,
        session: Session,
        ticket_id: str,
        prompt_tokens: int,
        max_new_tokens: int,
        deadline_s: float,
    ) -> pb.AdmitTurnReply:
        """Waits for an engine with room, until the turn's deadline. Raises Refusal."""
        request = pb.AdmitTurnRequest(
            ticket_id=ticket_id,
            attempt_id=session.attempt_id,
            epoch=session.epoch,
            prompt_tokens=prompt_tokens,
            max_new_tokens=max_new_tokens,
        )
        while True:
            left_s = deadline_s - self._clock()
            try:
                return await self._rollout.admit_turn(
                    request, timeout_s=max(0.001, min(self._config.admission_wait_s, left_s))
                )
            except (UnavailableError, DeadlineError) as error:
                if deadline_s - self._clock() <= self._config.manager_retry_pause_s:
                    self.release_later(ticket_id, "deadline")
                    raise Refusal(
                        Reason.NO_ENGINE,
                        f"attempt {session.attempt_id}: not admitted within "
                        f"{self._config.turn_deadline_s:g} s: {error}",
                    ) from error
                await self._sleep(self._config.manager_retry_pause_s)
            except CapExceededError as error:
                if error.cap == "max_turns":
                    raise turn_cap(session.caps.max_turns) from error
                raise token_cap(session.caps.max_total_tokens, prompt_tokens) from error
            except (FencedError, NotFoundError) as error:
                self._sessions.drop(session)
                raise Refusal(Reason.FENCED, str(error)) from error
            except RolloutError as error:
                raise Refusal(Reason.MANAGER_UNAVAILABLE, str(error)) from error
            except asyncio.CancelledError:
                # The grant may be on its way.
                self.release_later(ticket_id, "client left")
                raise

    async def release(self, ticket_id: str, *, engine_failed: bool, detail: str) -> None:
        """Gives a ticket back; a failed engine is checked by the manager before this returns."""
        # Shielded: a client that leaves now must not leave the ticket behind.
        await asyncio.shield(
            self._later(self._release(ticket_id, engine_failed=engine_failed, detail=detail))
        )

    def release_later(self, ticket_id: str, detail: str) -> None:
        """Gives a ticket back without waiting for it."""
        self._later(self._release(ticket_id, engine_failed=False, detail=detail))

    def give_up_later(self, engine_url: str, ticket_id: str) -> None:
        """Tells the engine to stop a call whose client left, then gives the ticket back."""

        async def give_up() -> None:
            await self._engines.abort(engine_url, ticket_id)
            await self._release(ticket_id, engine_failed=False, detail="client left")

        self._later(give_up())

    async def _release(self, ticket_id: str, *, engine_failed: bool, detail: str) -> None:
        request = pb.ReleaseTicketRequest(
            ticket_id=ticket_id, engine_failed=engine_failed, detail=detail[:1000]
        )
        try:
            await self._rollout.release_ticket(request)
        except RolloutError as error:
            # The manager gives silent tickets up by itself.
            _LOG.warning("ticket %s was not released: %s", ticket_id, error)

    def _later(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task
