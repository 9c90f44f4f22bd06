"""Sessions in memory: a cache of what the manager holds durably.

Owner: the gateway. A session key stands for one attempt under one epoch. Invariants:
  * One call at a time for each session: a second waits for the first.
  * Memory is a cache. An unknown key is loaded by GetSession with every durable turn, so any
    gateway can take a session over; a session whose state is in doubt is dropped, and the
    next call loads it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from proto import trajectory_pb2 as tpb
from rollout.client import NotFoundError, RolloutClient, RolloutError
from rollout.gateway.history import History
from rollout.gateway.refusal import Reason, Refusal
from rollout.gateway.turn_record import history_of

MIN_KEY_LENGTH = 32


@dataclass(slots=True)
class Session:
    """One attempt's turns and how they are sampled."""

    key: str = field(repr=False)
    attempt_id: str
    epoch: int
    sampling: tpb.SamplingParams
    caps: tpb.TokenCaps
    history: History
    # Set where turns are recorded with the experts that engines chose.
    expert_layout: tpb.ExpertLayout | None = None
    # The newest turn, while nobody knows that its answer reached the client.
    undelivered: int | None = None
    dropped: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False)


class SessionCache:
    """Sessions by key; the longest unused leaves first."""

    def __init__(
        self, rollout: RolloutClient, max_sessions: int, default_stop_ids: Sequence[int]
    ) -> None:
        """`default_stop_ids` serve where the manager names none."""
        self._rollout = rollout
        self._max_sessions = max_sessions
        self._default_stop_ids = list(default_stop_ids)
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._loading: dict[str, asyncio.Task[Session]] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    @contextlib.asynccontextmanager
    async def use(self, key: str) -> AsyncIterator[Session]:
        """The session of `key`, alone. Raises Refusal when the key is unknown."""
        while True:
            session = await self._get(key)
            async with session.lock:
                if session.dropped:
                    continue
                yield session
                return

    def drop(self, session: Session) -> None:
        """Forgets a session whose durable state may differ from ours."""
        session.dropped = True
        if self._sessions.get(session.key) is session:
            del self._sessions[session.key]

    async def _get(self, key: str) -> Session:
        if len(key) < MIN_KEY_LENGTH:
            raise Refusal(
                Reason.UNKNOWN_KEY,
                f"Incorrect API key provided: want a session key of at least {MIN_KEY_LENGTH} "
                "characters as `Authorization: Bearer KEY`",
            )
        session = self._sessions.get(key)
        if session is not None:
            self._sessions.move_to_end(key)
            return session
        loading = self._loading.get(key)
        if loading is None:
            loading = asyncio.create_task(self._load(key))
            self._loading[key] = loading
            loading.add_done_callback(lambda _: self._loading.pop(key, None))
        # A caller that leaves must not take the load from the others.
        return await asyncio.shield(loading)

    async def _load(self, key: str) -> Session:
        try:
            header, records = await self._rollout.get_session(key)
            history = history_of(records)
        except NotFoundError as error:
            raise Refusal(Reason.UNKNOWN_KEY, f"Incorrect API key provided: {error}") from error
        except RolloutError as error:
            raise Refusal(
                Reason.MANAGER_UNAVAILABLE, f"the session cannot be loaded: {error}"
            ) from error
        sampling = tpb.SamplingParams()
        sampling.CopyFrom(header.sampling)
        if not sampling.stop_token_ids:
            sampling.stop_token_ids.extend(self._default_stop_ids)
        session = Session(
            key=key,
            attempt_id=header.attempt_id,
            epoch=header.epoch,
            sampling=sampling,
            caps=header.caps,
            history=history,
            expert_layout=header.expert_layout if header.HasField("expert_layout") else None,
            undelivered=len(history.turns) - 1 if history.turns else None,
        )
        self._sessions[key] = session
        self._make_room()
        return session

    def _make_room(self) -> None:
        num_over = max(0, len(self._sessions) - self._max_sessions)
        for key in list(itertools.islice(self._sessions, num_over)):
            # One in use stays: two copies of a session could disagree.
            if not self._sessions[key].lock.locked():
                del self._sessions[key]
