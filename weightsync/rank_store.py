"""What the ranks of a Broadcaster tell each other through a store, before any tensor moves.

    plan       each rank says its plan's digest; where one differs from rank 0's, it says in what
    broadcast  each rank says whether it is ready; rank 0 answers with how to connect, or with
               what is wrong where, so that all give up at once

Owner: one Broadcaster a rank; ranks make the same calls in the same order. Invariants: every wait has
a deadline; a rank that fails says so before it raises; keys of a broadcast are removed when the
next one begins, those of plans stay.
"""

from __future__ import annotations

import contextlib
import json
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from weightsync.errors import PlanMismatchError, TransferTimeoutError

if TYPE_CHECKING:
    import torch.distributed

    from weightsync.plan import Plan


@dataclass(frozen=True, slots=True)
class Order:
    """What rank 0 tells the others about one broadcast."""

    version: int
    endpoint: dict[str, Any] = field(default_factory=dict)
    """How to reach the sender; see transports.py."""
    problems: dict[int, str] = field(default_factory=dict)
    """Rank -> why it cannot take part. Any: nobody sends or receives anything."""


class RankStore:
    """One rank's view."""

    def __init__(
        self, store: torch.distributed.Store, rank: int, world: int, timeout_s: float
    ) -> None:
        self._store, self._rank, self._world = store, rank, world
        self._timeout_s = timeout_s
        self._num_plans = 0
        self._num_broadcasts = 0

    # ---- plans

    def refuse_plan(self, reason: str) -> None:
        """Tells the others that this rank has no plan."""
        self._num_plans += 1
        self._say_plan(self._num_plans, {"refused": reason})

    def agree_on_plan(self, plan: Plan) -> None:
        """Returns when every rank has this plan.

        Raises PlanMismatchError, which says of each rank that differs what the first difference to
        rank 0's plan is, and TransferTimeoutError for a rank that did not come.
        """
        self._num_plans += 1
        number = self._num_plans
        mine = {"digest": plan.digest, "bucket_bytes": plan.bucket_bytes}
        if self._rank == 0:
            text = zlib.compress(json.dumps(plan.to_json()["tensors"]).encode())
            self._store.set(f"weightsync/plan/{number}/tensors", text)
        self._say_plan(number, mine)
        said = [self._hear_plan(number, rank) for rank in range(self._world)]
        problems = {}
        for rank, words in enumerate(said):
            if "refused" in words:
                problems[rank] = f"it has no plan: {words['refused']}"
        if not problems and said[self._rank] != said[0]:
            why = self._difference(number, plan, said[0])
            self._say(f"plan/{number}/why/{self._rank}", why)
        if not problems:
            problems = {
                rank: self._hear(f"plan/{number}/why/{rank}", f"what differs at rank {rank}")
                for rank, words in enumerate(said)
                if words != said[0]
            }
        if problems:
            raise PlanMismatchError(
                f"rank {self._rank}: the ranks' plans differ: " + listed(problems)
            )

    def _difference(self, number: int, plan: Plan, first: dict[str, Any]) -> str:
        """Between this rank's plan and rank 0's."""
        if plan.digest == first["digest"]:
            return f"bucket_bytes is {plan.bucket_bytes}, at rank 0 {first['bucket_bytes']}"
        self._wait(f"weightsync/plan/{number}/tensors", "rank 0's tensors", self._timeout_s)
        data = bytes(self._store.get(f"weightsync/plan/{number}/tensors"))
        theirs = json.loads(zlib.decompress(data))
        pairs = zip_longest(plan.to_json()["tensors"], theirs)
        index, (here, there) = next((i, (a, b)) for i, (a, b) in enumerate(pairs) if a != b)
        return f"tensor {index} is {_tensor(here)}, at rank 0 {_tensor(there)}"

    def _say_plan(self, number: int, words: dict[str, Any]) -> None:
        self._say(f"plan/{number}/{self._rank}", json.dumps(words))

    def _hear_plan(self, number: int, rank: int) -> dict[str, Any]:
        return dict(json.loads(self._hear(f"plan/{number}/{rank}", f"the plan of rank {rank}")))

    # ---- broadcasts

    def begin(self) -> int:
        """The number of the next broadcast; call before anything of it can fail."""
        self._num_broadcasts += 1
        return self._num_broadcasts

    def say_ready(self, version: int, problem: str) -> None:
        """At ranks above 0: what this rank wants, or why it cannot take part."""
        words = {"version": version, "problem": problem}
        self._say(f"broadcast/{self._num_broadcasts}/{self._rank}", json.dumps(words))

    def gather_problems(self, version: int) -> dict[int, str]:
        """At rank 0: waits for every rank's word; rank -> why it cannot take part."""
        problems = {}
        deadline_s = time.monotonic() + self._timeout_s
        for rank in range(1, self._world):
            key = f"broadcast/{self._num_broadcasts}/{rank}"
            try:
                left_s = max(0.001, deadline_s - time.monotonic())
                words = json.loads(self._hear(key, f"rank {rank}", left_s))
            except TransferTimeoutError:
                problems[rank] = f"it did not come within {self._timeout_s} s"
                continue
            if words["problem"]:
                problems[rank] = words["problem"]
            elif words["version"] != version:
                problems[rank] = f"it wants version {words['version']}, sent is {version}"
        self._remove(self._num_broadcasts - 1)
        return problems

    def give_order(self, order: Order) -> None:
        """At rank 0: the answer to all."""
        words = {
            "version": order.version,
            "endpoint": order.endpoint,
            "problems": {str(rank): text for rank, text in order.problems.items()},
        }
        self._say(f"broadcast/{self._num_broadcasts}/order", json.dumps(words))

    def take_order(self) -> Order:
        """At ranks above 0: rank 0's answer, which may itself have waited for another rank."""
        number = self._num_broadcasts
        key = f"broadcast/{number}/order"
        words = json.loads(self._hear(key, f"broadcast {number} of rank 0", 2 * self._timeout_s))
        problems = {int(rank): text for rank, text in words["problems"].items()}
        return Order(words["version"], words["endpoint"], problems)

    def _remove(self, number: int) -> None:
        """Every rank has come to the next broadcast, and read all of this one, or has given up."""
        for what in (*range(1, self._world), "order"):
            with contextlib.suppress(RuntimeError):  # a store that cannot remove keeps its keys
                self._store.delete_key(f"weightsync/broadcast/{number}/{what}")

    # ---- words of any kind

    def share_id(self, make: Callable[[], bytes]) -> bytes:
        """The bytes that rank 0 makes, at every rank."""
        if self._rank == 0:
            self._say("rccl", make().hex())
        return bytes.fromhex(self._hear("rccl", "rank 0's id"))

    def _say(self, key: str, text: str) -> None:
        self._store.set(f"weightsync/{key}", text)

    def _hear(self, key: str, what: str, timeout_s: float | None = None) -> str:
        self._wait(f"weightsync/{key}", what, timeout_s or self._timeout_s)
        return bytes(self._store.get(f"weightsync/{key}")).decode()

    def _wait(self, key: str, what: str, timeout_s: float) -> None:
        try:
            self._store.wait([key], timedelta(seconds=timeout_s))
        except RuntimeError as error:  # torch's DistStoreError and its time-outs
            raise TransferTimeoutError(
                f"rank {self._rank}: {what} did not come within {timeout_s} s: {error}"
            ) from error


def listed(problems: dict[int, str]) -> str:
    """Rank -> reason, as text."""
    return "; ".join(f"rank {rank}: {text}" for rank, text in problems.items())


def _tensor(row: list[Any] | None) -> str:
    if row is None:
        return "missing"
    name, shape, dtype = row
    return f"{name} {dtype}{tuple(shape)}"
