"""How the first rank of a trainer leads the others: it says what all do next, and all do it.

    first rank (serves RPCs, owns progress)          every other rank
    work.method(args) --order: name, arguments-->    follow: the same method, the same arguments
    `---------------- both run it; its collectives join them ----------------'

Orders travel through the process group's store, in which a rank can wait for hours; a collective could
not. Owner: one Team a process. Invariants: orders are carried out in the order given, each by every
rank; with one rank nothing is sent. A method that can fail on one rank alone agrees on it
(`ranks.in_step`), so that all ranks raise or none.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import logging
import pickle
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from rollout.client import RolloutError
from trainer.errors import LeaderLostError, TrainerError

_log = logging.getLogger(__name__)
_P = ParamSpec("_P")
_T = TypeVar("_T")
_WAIT_S = 30.0
_KEPT_ORDERS = 256
"""Orders that stay in the store for a rank that is behind; collectives keep ranks closer together."""


class Store(Protocol):
    """What is used of a torch.distributed.Store."""

    def set(self, key: str, value: bytes) -> None: ...
    def get(self, key: str) -> bytes: ...
    def wait(self, keys: list[str], timeout: datetime.timedelta) -> None: ...
    def check(self, keys: list[str]) -> bool: ...
    def delete_key(self, key: str) -> bool: ...


class Member(Protocol):
    """Work of which the ranks do the same."""

    team: Team
    team_name: str


_M = TypeVar("_M", bound=Member)


class Team:
    """The ranks of one trainer, as one of them sees them."""

    def __init__(self, store: Store | None, rank: int = 0) -> None:
        """Args: store is reached by every rank; None: there is one rank."""
        self._store = store
        self._rank = rank
        self._num_orders = 0
        self._members: dict[str, Any] = {}

    def join(self, member: Member) -> None:
        """Orders for `member.team_name` are for this object from now on."""
        self._members[member.team_name] = member

    def order(self, name: str, method: str, arguments: tuple[Any, ...]) -> None:
        """On the first rank: tells the others."""
        if self._store is None:
            return
        self._num_orders += 1
        self._store.set(self._key(self._num_orders), pickle.dumps((name, method, arguments)))
        if self._num_orders > _KEPT_ORDERS:
            with contextlib.suppress(RuntimeError):
                self._store.delete_key(self._key(self._num_orders - _KEPT_ORDERS))

    def dismiss(self) -> None:
        """On the first rank: lets the others end."""
        self.order("", "", ())

    def follow(self) -> None:
        """On every other rank: carries out orders until dismissed.

        What an order raises that all ranks raise is the first rank's to tell.

        Raises:
          LeaderLostError: the first rank is gone.
        """
        while True:
            self._num_orders += 1
            name, method, arguments = pickle.loads(self._next(self._key(self._num_orders)))
            if not name:
                return
            member = self._members[name]
            try:
                getattr(type(member), method).alone(member, *arguments)
            except (TrainerError, RolloutError) as error:
                _log.info("rank %d: %s.%s: %s", self._rank, name, method, error)

    def _next(self, key: str) -> bytes:
        assert self._store is not None
        while True:
            try:
                self._store.wait([key], datetime.timedelta(seconds=_WAIT_S))
                return bytes(self._store.get(key))
            except RuntimeError as error:  # torch has one class for late and for lost
                try:
                    self._store.check([key])
                except RuntimeError:
                    raise LeaderLostError(f"rank {self._rank}: rank 0 is gone: {error}") from error

    @staticmethod
    def _key(number: int) -> str:
        return f"team/{number}"


def together(
    method: Callable[Concatenate[_M, _P], _T],
) -> Callable[Concatenate[_M, _P], _T]:
    """Makes a method that, called on the first rank, every rank carries out. Positional arguments
    only, which can be pickled. Not to be called from another such method.
    """

    @functools.wraps(method)
    def led(self: _M, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        assert not kwargs, f"{method.__name__} takes positional arguments only"
        self.team.order(self.team_name, method.__name__, args)
        return method(self, *args, **kwargs)

    led.alone = method  # type: ignore[attr-defined]
    return led
