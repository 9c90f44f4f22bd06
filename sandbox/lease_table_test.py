"""LeaseTable: expiry, fencing, idempotency, on a clock that tests move."""

from __future__ import annotations

import pytest

from sandbox.errors import StaleEpochError, UnknownLeaseError
from sandbox.lease_table import LeaseTable


class FakeClock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def table(clock: FakeClock) -> LeaseTable[str]:
    return LeaseTable(clock)


def test_lease_is_found_until_it_expires(table: LeaseTable[str], clock: FakeClock) -> None:
    lease = table.add("box", ttl_s=10)
    clock.now_s += 9.9
    assert table.get(lease.lease_id, lease.epoch).sandbox == "box"
    clock.now_s += 0.1
    with pytest.raises(UnknownLeaseError, match=lease.lease_id):
        table.get(lease.lease_id, lease.epoch)


def test_an_unknown_lease_is_named(table: LeaseTable[str]) -> None:
    with pytest.raises(UnknownLeaseError, match="lease-x"):
        table.get("lease-x", 1)


def test_a_wrong_epoch_is_fenced(table: LeaseTable[str]) -> None:
    lease = table.add("box", ttl_s=10)
    for call in (table.get, lambda i, e: table.renew(i, e, 10), table.remove):
        with pytest.raises(StaleEpochError, match=str(lease.epoch + 1)):
            call(lease.lease_id, lease.epoch + 1)
    assert len(table) == 1


def test_epochs_never_repeat(table: LeaseTable[str]) -> None:
    epochs = []
    for _ in range(5):
        lease = table.add("box", ttl_s=10)
        epochs.append(lease.epoch)
        table.remove(lease.lease_id, lease.epoch)
    assert sorted(set(epochs)) == epochs


def test_renew_never_moves_the_expiry_back(table: LeaseTable[str], clock: FakeClock) -> None:
    lease = table.add("box", ttl_s=10)
    assert table.renew(lease.lease_id, lease.epoch, 30).expires_s == clock.now_s + 30
    assert table.renew(lease.lease_id, lease.epoch, 1).expires_s == clock.now_s + 30


def test_pop_expired_takes_only_what_is_due(table: LeaseTable[str], clock: FakeClock) -> None:
    late, soon = table.add("late", ttl_s=20), table.add("soon", ttl_s=10)
    clock.now_s += 15
    assert table.pop_expired() == [soon]
    assert [lease.lease_id for lease in table] == [late.lease_id]


def test_remove_is_idempotent_and_leaves_expired_leases_to_the_reaper(
    table: LeaseTable[str], clock: FakeClock
) -> None:
    lease = table.add("box", ttl_s=10)
    assert table.remove(lease.lease_id, lease.epoch) is lease
    assert table.remove(lease.lease_id, lease.epoch) is None
    other = table.add("box", ttl_s=10)
    clock.now_s += 11
    assert table.remove(other.lease_id, other.epoch) is None
    assert table.pop_expired() == [other]


def test_an_idempotency_key_finds_its_living_lease(
    table: LeaseTable[str], clock: FakeClock
) -> None:
    lease = table.add("box", ttl_s=10, idempotency_key="key")
    assert table.find("key") is lease
    assert table.find("") is None
    clock.now_s += 11
    assert table.find("key") is None
    table.pop_expired()
    again = table.add("box", ttl_s=10, idempotency_key="key")
    assert table.find("key") is again


def test_a_key_taken_over_by_a_new_lease_survives_the_old_ones_end(
    table: LeaseTable[str], clock: FakeClock
) -> None:
    table.add("old", ttl_s=1, idempotency_key="key")
    clock.now_s += 2
    new = table.add("new", ttl_s=10, idempotency_key="key")
    table.pop_expired()
    assert table.find("key") is new
