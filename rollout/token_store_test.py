"""Records survive as written; torn tails and corruption are found."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.errors import CorruptStoreError
from rollout.token_store import TokenLocation, TokenStore


@pytest.mark.parametrize(
    "fsync", [pytest.param(False, id="process"), pytest.param(True, id="power")]
)
def test_records_are_read_back(tmp_path: Path, fsync: bool) -> None:
    store = TokenStore(tmp_path / "tokens", fsync=fsync)
    locations = [store.append("a", bytes([i]) * i) for i in range(4)]
    assert [store.read(at) for at in locations] == [bytes([i]) * i for i in range(4)]
    store.delete("a")
    store.delete("a")
    with pytest.raises(CorruptStoreError):
        store.read(locations[1])


@settings(deadline=None, max_examples=40)
@given(
    payloads=st.lists(st.binary(max_size=40), min_size=1, max_size=5), torn=st.integers(1, 1_000)
)
def test_a_torn_tail_loses_only_the_torn_record(
    tmp_path_factory: pytest.TempPathFactory, payloads: list[bytes], torn: int
) -> None:
    folder = tmp_path_factory.mktemp("tokens")
    store = TokenStore(folder, fsync=False)
    locations = [store.append("a", p) for p in payloads]
    path = folder / "a.turns"
    size = path.stat().st_size
    cut = size - 1 - torn % (size - locations[-1].offset)
    with path.open("r+b") as file:
        file.truncate(max(cut, locations[-1].offset))
    after = TokenStore(folder, fsync=False)
    added = after.append("a", b"new")
    assert added.offset == locations[-1].offset
    assert [after.read(at) for at in locations[:-1]] == payloads[:-1]
    assert after.read(added) == b"new"


def test_corruption_is_an_error(tmp_path: Path) -> None:
    store = TokenStore(tmp_path, fsync=False)
    at = store.append("a", b"payload")
    path = tmp_path / at.file
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptStoreError):
        store.read(at)
    with pytest.raises(CorruptStoreError):
        store.read(TokenLocation(at.file, at.offset, at.size + 1))


def test_what_stands_before_a_record_is_read_back(tmp_path: Path) -> None:
    store = TokenStore(tmp_path / "tokens", fsync=False)
    store.append("a", b"first")
    at = store.append("a", b"turn", before=b"experts")
    plain = store.append("a", b"turn")
    assert (store.read(at), store.read_before(at, 7)) == (b"turn", b"experts")
    assert store.read_before(plain, 4) == b"turn"
    for location, size in ((at, 6), (at, 8), (plain, 7), (at, 10_000)):
        with pytest.raises(CorruptStoreError):
            store.read_before(location, size)
    again = TokenStore(tmp_path / "tokens", fsync=False)
    assert again.read(again.append("a", b"last")) == b"last"
    assert again.read_before(at, 7) == b"experts"
