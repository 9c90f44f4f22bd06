"""Who owns which sandbox until when.

Owner: the broker's event loop; no locks, no I/O. Invariants: an epoch is never given twice; a
lease past its expiry is unknown even before the reaper takes it; an expiry never moves back.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from sandbox.errors import StaleEpochError, UnknownLeaseError

T = TypeVar("T")


@dataclass
class Lease(Generic[T]):
    """Time-limited ownership of one sandbox."""

    lease_id: str
    epoch: int
    sandbox: T
    holder: str
    image: str
    workdir: str
    idempotency_key: str
    expires_s: float
    """On the table's clock."""
    num_execs: int = field(default=0)


class LeaseTable(Generic[T]):
    """Leases by id and by idempotency key."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._leases: dict[str, Lease[T]] = {}
        self._by_key: dict[str, str] = {}
        self._next_epoch = 1

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease[T]]:
        return iter(list(self._leases.values()))

    def add(
        self,
        sandbox: T,
        *,
        ttl_s: float,
        holder: str = "",
        image: str = "",
        workdir: str = "/",
        idempotency_key: str = "",
    ) -> Lease[T]:
        """Makes a lease under a new id and epoch."""
        lease = Lease(
            lease_id=f"lease-{secrets.token_hex(8)}",
            epoch=self._next_epoch,
            sandbox=sandbox,
            holder=holder,
            image=image,
            workdir=workdir,
            idempotency_key=idempotency_key,
            expires_s=self._clock() + ttl_s,
        )
        self._next_epoch += 1
        self._leases[lease.lease_id] = lease
        if idempotency_key:
            self._by_key[idempotency_key] = lease.lease_id
        return lease

    def get(self, lease_id: str, epoch: int) -> Lease[T]:
        """The live lease. Raises UnknownLeaseError, StaleEpochError."""
        lease = self._leases.get(lease_id)
        if lease is None:
            raise UnknownLeaseError(
                f"lease {lease_id!r} is unknown: released, expired or never made; acquire a new one"
            )
        if lease.epoch != epoch:
            raise StaleEpochError(
                f"lease {lease_id} has epoch {lease.epoch}, the call names {epoch}: "
                "another owner holds it"
            )
        if lease.expires_s <= self._clock():
            raise UnknownLeaseError(
                f"lease {lease_id} (holder {lease.holder!r}) expired: renew earlier, "
                "or ask for a longer ttl"
            )
        return lease

    def find(self, idempotency_key: str) -> Lease[T] | None:
        """The live lease made under the key."""
        lease = self._leases.get(self._by_key.get(idempotency_key, ""))
        return lease if lease is not None and lease.expires_s > self._clock() else None

    def renew(self, lease_id: str, epoch: int, ttl_s: float) -> Lease[T]:
        """Moves the expiry to ttl_s from now, never back. Raises as get does."""
        lease = self.get(lease_id, epoch)
        lease.expires_s = max(lease.expires_s, self._clock() + ttl_s)
        return lease

    def remove(self, lease_id: str, epoch: int) -> Lease[T] | None:
        """Takes the lease out; None when it is gone already. Raises StaleEpochError."""
        try:
            lease = self.get(lease_id, epoch)
        except UnknownLeaseError:
            # One past its expiry stays for pop_expired, so that it is counted as expired.
            return None
        self._forget(lease)
        return lease

    def pop_expired(self) -> list[Lease[T]]:
        """Takes out every lease past its expiry, oldest expiry first."""
        now = self._clock()
        expired = [lease for lease in self._leases.values() if lease.expires_s <= now]
        for lease in expired:
            self._forget(lease)
        return sorted(expired, key=lambda lease: lease.expires_s)

    def pop_all(self) -> list[Lease[T]]:
        """Takes out every lease."""
        leases = list(self._leases.values())
        self._leases.clear()
        self._by_key.clear()
        return leases

    def _forget(self, lease: Lease[T]) -> None:
        del self._leases[lease.lease_id]
        if self._by_key.get(lease.idempotency_key) == lease.lease_id:
            del self._by_key[lease.idempotency_key]
