"""Runs one turn: plan, render, admit, generate, make durable.

Owner: the gateway. The caller holds the session's lock for the whole of `run`. Invariants:
  * The prompt's ids are the parent turn's whole ids followed by the rendering of new
    messages only.
  * The answer is returned after AppendTurn succeeded, never before.
  * Every ticket ends: by AppendTurn, or by ReleaseTicket, also when the client leaves.

Retries: AdmitTurn is repeated under one ticket (idempotent), AppendTurn with the identical
record (idempotent by content), both until the turn's deadline. A generate call is repeated
at most `max_engine_retries` times: nothing of a lost call was answered, and an aborted one
goes on from the ids that it sampled.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from proto import rollout_pb2 as pb
from proto import trajectory_pb2 as tpb
from rollout.client import (
    BadRequestError,
    ConflictError,
    DeadlineError,
    FencedError,
    RolloutClient,
    RolloutError,
    UnavailableError,
)
from rollout.gateway.chat_template import ChatTemplate, ChatTemplateError
from rollout.gateway.config import GatewayConfig
from rollout.gateway.counters import Counters
from rollout.gateway.engine_client import (
    NOTHING,
    EngineClient,
    EngineLostError,
    EngineRefusedError,
    Generation,
)
from rollout.gateway.history import ROOT, Message, Plan, PlanKind
from rollout.gateway.refusal import Reason, Refusal, token_cap, turn_cap
from rollout.gateway.routing import Routing, TurnRouting
from rollout.gateway.session import Session, SessionCache
from rollout.gateway.tickets import Tickets
from rollout.gateway.turn_record import Timing, to_record, unpack_ids

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Answer:
    """What the client gets for one turn."""

    text: str
    finish_reason: str  # stop or length
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    turn_index: int
    decode_s: float  # inside the engine, its own queue left out


@dataclass(slots=True)
class _Sampled:
    """What the engine calls of one turn gave together."""

    generation: Generation = NOTHING
    ticket_id: str = ""
    engine: str = ""
    kv_version_lower_bound: int = 0
    queued_s: float = 0.0
    generating_s: float = 0.0

    def bound_kv(self, grant: pb.AdmitTurnReply, part: Generation) -> None:
        """Lowers the bound to what this call may have read."""
        # Without a key of its own a call reads no entry older than the version serving it.
        oldest = min(span.weight_version for span in part.spans)
        bound = grant.kv_version_lower_bound if grant.extra_key else oldest
        known = self.kv_version_lower_bound
        self.kv_version_lower_bound = min(known, bound) if known else bound


class TurnRunner:
    """Stateless between turns, but for tickets that are being given back."""

    def __init__(
        self,
        config: GatewayConfig,
        rollout: RolloutClient,
        engines: EngineClient,
        chat: ChatTemplate,
        sessions: SessionCache,
        counters: Counters,
        *,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        new_id: Callable[[], str],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`clock` counts monotonic seconds, `wall_clock` Unix seconds."""
        self._config = config
        self._rollout = rollout
        self._engines = engines
        self._chat = chat
        self._sessions = sessions
        self._counters = counters
        self._clock = clock
        self._wall_clock = wall_clock
        self._new_id = new_id
        self._sleep = sleep
        self._tickets = Tickets(config, rollout, engines, sessions, clock, sleep)

    async def close(self) -> None:
        """Waits until every ticket under way is given back."""
        await self._tickets.close()

    async def run(
        self, session: Session, messages: list[Message], max_tokens: int | None
    ) -> Answer:
        """The next turn after `messages`. Raises Refusal."""
        received_at_s = self._wall_clock()
        deadline_s = self._clock() + self._config.turn_deadline_s
        try:
            plan = session.history.plan(messages)
        except ValueError as error:
            raise Refusal(Reason.BAD_REQUEST, str(error), "messages") from error
        if plan.resent is not None and plan.resent == session.undelivered:
            self._counters.num_replayed += 1
            return self._replay(session, plan.resent)
        delta = self._render(session, plan)
        prompt = session.history.ids(plan.parent) + delta
        room = self._room(session, len(prompt), max_tokens)
        history_length = len(prompt) - len(delta)
        routing = TurnRouting(session.expert_layout, history_length)
        sampled = await self._sample(session, prompt, routing, room, deadline_s)
        answer = Message("assistant", self._text(session, sampled.generation.ids))
        record = to_record(
            attempt_id=session.attempt_id,
            turn_index=len(session.history.turns),
            plan=plan,
            history_length=history_length,
            prompt_ids=delta,
            generation=sampled.generation,
            answer=answer,
            sampling=session.sampling,
            kv_version_lower_bound=sampled.kv_version_lower_bound,
            engine=sampled.engine,
            timing=Timing(
                received_at_s,
                sampled.queued_s,
                sampled.generating_s,
                sampled.generation.engine_queued_s,
            ),
            expert_layout=session.expert_layout,
        )
        await self._commit(
            session,
            plan,
            record,
            sampled.generation.experts,
            answer,
            sampled.ticket_id,
            deadline_s,
        )
        if plan.kind is PlanKind.BRANCH:
            self._counters.num_branches += 1
        self._counters.observe_turn(sampled.queued_s, sampled.generating_s)
        generation = sampled.generation
        return Answer(
            text=answer.content,
            finish_reason=generation.finish,
            prompt_tokens=len(prompt),
            completion_tokens=len(generation.ids),
            cached_tokens=generation.cached_tokens,
            turn_index=record.turn_index,
            decode_s=max(0.0, sampled.generating_s - generation.engine_queued_s),
        )

    def _replay(self, session: Session, index: int) -> Answer:
        turn = session.history.turns[index]
        return Answer(
            text=turn.answer.content,
            finish_reason="length" if turn.cut else "stop",
            prompt_tokens=turn.total_length - len(turn.sampled_ids),
            completion_tokens=len(turn.sampled_ids),
            cached_tokens=0,
            turn_index=index,
            decode_s=0.0,
        )

    def _render(self, session: Session, plan: Plan) -> list[int]:
        """Ids of the new messages; a turn that a cap cut is closed first."""
        try:
            delta = self._chat.encode_delta(
                [m._asdict() for m in plan.new_messages],
                add_generation_prompt=True,
                is_first=plan.parent == ROOT,
            )
        except ChatTemplateError as error:
            raise Refusal(Reason.BAD_REQUEST, str(error), "messages") from error
        if plan.parent != ROOT:
            sampled = session.history.turns[plan.parent].sampled_ids
            if not sampled or sampled[-1] != self._chat.end_of_turn_id:
                delta.insert(0, self._chat.end_of_turn_id)
        return delta

    def _room(self, session: Session, num_prompt: int, max_tokens: int | None) -> int:
        """Most ids that the turn may sample. Raises Refusal at a cap."""
        caps = session.caps
        if len(session.history.turns) >= caps.max_turns:
            raise turn_cap(caps.max_turns)
        room = caps.max_total_tokens - num_prompt
        if room <= 0:
            raise token_cap(caps.max_total_tokens, num_prompt)
        room = min(room, caps.max_new_tokens_per_turn)
        return room if max_tokens is None else min(room, max_tokens)

    def _text(self, session: Session, ids: list[int]) -> str:
        if ids and ids[-1] in session.sampling.stop_token_ids:
            ids = ids[:-1]
        return self._chat.decode(ids)

    async def _sample(
        self,
        session: Session,
        prompt: list[int],
        routing: TurnRouting,
        room: int,
        deadline_s: float,
    ) -> _Sampled:
        """One or more engine calls. The ticket of the last is still open on return."""
        sampled = _Sampled()
        failure = ""
        for _ in range(self._config.max_engine_retries + 1):
            so_far = sampled.generation.ids
            if len(so_far) >= room:
                cut = dataclasses.replace(sampled.generation, finish="length")
                if not routing.is_whole(cut.experts, len(prompt) + len(so_far)):
                    _LOG.warning("attempt %s: a turn is kept without experts", session.attempt_id)
                    cut = dataclasses.replace(cut, experts=b"")
                sampled.generation = cut
                return sampled
            ticket_id = sampled.ticket_id = self._new_id()
            whole = prompt + so_far
            grant = await self._tickets.admit(
                session, ticket_id, len(whole), room - len(so_far), deadline_s
            )
            sampled.queued_s += grant.queued.ToTimedelta().total_seconds()
            sampled.engine = grant.engine
            began_s = self._clock()
            try:
                part = await self._generate(
                    session,
                    grant,
                    ticket_id,
                    whole,
                    room - len(so_far),
                    deadline_s,
                    routing.next_call(sampled.generation.experts),
                )
            except EngineLostError as error:
                failure = f"engine {grant.engine}: {error}"
                _LOG.warning("attempt %s: %s", session.attempt_id, failure)
                self._counters.lose_engine(grant.engine)
                await self._tickets.release(ticket_id, engine_failed=True, detail=failure)
                continue
            finally:
                sampled.generating_s += self._clock() - began_s
            self._counters.num_generate_calls += 1
            self._counters.num_sampled_tokens += len(part.ids)
            sampled.generation = whole_of(sampled.generation, part)
            if part.ids:
                sampled.bound_kv(grant, part)
            if part.finish != "abort":
                return sampled
            failure = f"engine {grant.engine} aborted the call"
            await self._tickets.release(ticket_id, engine_failed=False, detail=failure)
        raise Refusal(
            Reason.ENGINE_FAILED,
            f"attempt {session.attempt_id}: no turn after "
            f"{self._config.max_engine_retries + 1} engine calls, the last: {failure}",
        )

    async def _generate(
        self,
        session: Session,
        grant: pb.AdmitTurnReply,
        ticket_id: str,
        prompt: list[int],
        max_new_tokens: int,
        deadline_s: float,
        routing: Routing | None,
    ) -> Generation:
        """One engine call; whatever ends it but an answer gives the engine's work up."""
        try:
            return await self._engines.generate(
                grant.engine_url,
                ticket_id,
                prompt,
                max_new_tokens=max_new_tokens,
                temperature=session.sampling.temperature,
                stop_token_ids=session.sampling.stop_token_ids,
                banned_token_ids=session.sampling.banned_token_ids,
                extra_key=grant.extra_key,
                timeout_s=max(0.001, deadline_s - self._clock()),
                routing=routing,
            )
        except EngineRefusedError as error:
            await self._tickets.release(ticket_id, engine_failed=False, detail=str(error))
            raise Refusal(
                Reason.ENGINE_REFUSED, f"attempt {session.attempt_id}: {error}"
            ) from error
        except TimeoutError as error:
            detail = f"engine {grant.engine} gave no answer before the turn's deadline"
            await self._engines.abort(grant.engine_url, ticket_id)
            await self._tickets.release(ticket_id, engine_failed=True, detail=detail)
            raise Refusal(
                Reason.ENGINE_FAILED, f"attempt {session.attempt_id}: {detail}"
            ) from error
        except asyncio.CancelledError:
            self._tickets.give_up_later(grant.engine_url, ticket_id)
            raise

    async def _commit(
        self,
        session: Session,
        plan: Plan,
        record: tpb.TurnRecord,
        experts: bytes,
        answer: Message,
        ticket_id: str,
        deadline_s: float,
    ) -> None:
        """Makes the turn durable and known here, even if the client leaves meanwhile."""

        async def commit() -> None:
            await self._append(session, record, experts, ticket_id, deadline_s)
            turn = session.history.add(
                plan.parent,
                plan.new_messages,
                answer,
                unpack_ids(record.prompt_ids),
                unpack_ids(record.sampled_ids),
                cut=record.finish_reason != tpb.FINISH_REASON_STOP,
            )
            session.undelivered = turn.index

        task = asyncio.create_task(commit())
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            # The session stays locked until it is known how the call ended.
            try:
                await asyncio.wait({task})
            finally:
                if not task.done() or task.cancelled() or task.exception() is not None:
                    self._sessions.drop(session)
            raise

    async def _append(
        self,
        session: Session,
        record: tpb.TurnRecord,
        experts: bytes,
        ticket_id: str,
        deadline_s: float,
    ) -> None:
        request = pb.AppendTurnRequest(ticket_id=ticket_id, epoch=session.epoch, turn=record)
        while True:
            try:
                await self._rollout.append_turn(request, experts)
                return
            except (UnavailableError, DeadlineError) as error:
                if self._clock() >= deadline_s:
                    raise self._undone(
                        session, ticket_id, Reason.MANAGER_UNAVAILABLE, error
                    ) from error
                await self._sleep(self._config.manager_retry_pause_s)
            except FencedError as error:
                raise self._undone(session, ticket_id, Reason.FENCED, error) from error
            except ConflictError as error:
                raise self._undone(session, ticket_id, Reason.SESSION_MOVED, error) from error
            except BadRequestError as error:
                moved = await self._has_moved(session)
                reason = Reason.SESSION_MOVED if moved else Reason.ENGINE_REFUSED
                raise self._undone(session, ticket_id, reason, error) from error
            except RolloutError as error:
                raise self._undone(session, ticket_id, Reason.MANAGER_UNAVAILABLE, error) from error

    async def _has_moved(self, session: Session) -> bool:
        """Whether another gateway appended turns that we do not know."""
        try:
            header, turns = await self._rollout.get_session(session.key)
        except RolloutError:
            return True
        return header.epoch != session.epoch or len(turns) != len(session.history.turns)

    def _undone(
        self, session: Session, ticket_id: str, reason: Reason, error: RolloutError
    ) -> Refusal:
        self._sessions.drop(session)
        self._tickets.release_later(ticket_id, str(error))
        return Refusal(reason, f"attempt {session.attempt_id}: the turn is not durable: {error}")


def whole_of(partial: Generation, later: Generation) -> Generation:
    """A turn's ids so far, continued."""
    return partial.then(later) if partial.ids else later
