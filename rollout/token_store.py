"""Token arrays on disk: one append-only file an attempt, named by the ledger's rows.

Owner: rollout.manager (its only writer). A record is u32 length, u32 crc32 of the payload,
then the payload (a serialised TurnRecord); little-endian. The experts of a turn, where they are
recorded, are a record of their own right before the turn's: whoever reads turns does not read them.

Invariants: a record is written whole before the ledger row that names it, and is never
changed after. The rows are the authority: records that no row names (a crash came between
the two, or the try was discarded) are dead bytes. A torn tail is cut off before the first
append after a restart.
"""

from __future__ import annotations

import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

from rollout.errors import CorruptStoreError

_HEAD = struct.Struct("<II")


@dataclass(frozen=True, slots=True)
class TokenLocation:
    """Where a record lies: file name under the store's folder, byte offset, payload bytes."""

    file: str
    offset: int
    size: int


class TokenStore:
    """Appends and reads records. Not thread-safe: one event loop owns it."""

    def __init__(self, folder: Path, *, fsync: bool) -> None:
        """Makes `folder`; with `fsync` an append returns once the disk has it."""
        self._folder = folder
        self._fsync = fsync
        self._ends: dict[str, int] = {}  # attempt files this process has appended to
        folder.mkdir(parents=True, exist_ok=True)

    def append(self, attempt_id: str, payload: bytes, before: bytes = b"") -> TokenLocation:
        """Appends a record to the attempt's file, and one of `before` in front of it, if not empty.

        Raises OSError when the disk refuses.
        """
        name = f"{attempt_id}.turns"
        path = self._folder / name
        leading = _record(before) if before else b""
        record = leading + _record(payload)
        created = not path.exists()
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            end = self._ends.get(name)
            if end is None:
                end = _valid_end(descriptor)
                os.ftruncate(descriptor, end)
            self._write(descriptor, record, end)
            if self._fsync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if self._fsync and created:
            self._sync_folder()
        self._ends[name] = end + len(record)
        return TokenLocation(file=name, offset=end + len(leading), size=len(payload))

    def read(self, location: TokenLocation) -> bytes:
        """The payload at `location`. Raises CorruptStoreError if it is not what was written."""
        path = self._folder / location.file
        try:
            with path.open("rb") as file:
                file.seek(location.offset)
                record = file.read(_HEAD.size + location.size)
        except FileNotFoundError as error:
            raise CorruptStoreError(
                f"token file {path} is gone, but the ledger names {location}; was it deleted?"
            ) from error
        if len(record) != _HEAD.size + location.size:
            raise CorruptStoreError(
                f"token file {path} is cut at {location}: got {len(record)} B, wanted "
                f"{_HEAD.size + location.size} B"
            )
        size, checksum = _HEAD.unpack_from(record)
        payload = record[_HEAD.size :]
        if size != location.size or checksum != zlib.crc32(payload):
            raise CorruptStoreError(f"token file {path} is corrupt at {location}: wrong checksum")
        return payload

    def read_before(self, location: TokenLocation, size: int) -> bytes:
        """The payload, of `size` bytes, of the record right before `location`, as `read` does."""
        offset = location.offset - _HEAD.size - size
        if offset < 0:
            raise CorruptStoreError(
                f"token file {self._folder / location.file} has no {size} B before {location}"
            )
        return self.read(TokenLocation(location.file, offset, size))

    def close_attempt(self, attempt_id: str) -> None:
        """Forgets the attempt's append position; a later append looks it up again."""
        self._ends.pop(f"{attempt_id}.turns", None)

    def delete(self, attempt_id: str) -> None:
        """Deletes the attempt's file, if there is one."""
        self.close_attempt(attempt_id)
        (self._folder / f"{attempt_id}.turns").unlink(missing_ok=True)

    def _write(self, descriptor: int, record: bytes, offset: int) -> None:
        view = memoryview(record)
        while view:
            written = os.pwrite(descriptor, view, offset)
            offset += written
            view = view[written:]

    def _sync_folder(self) -> None:
        descriptor = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _record(payload: bytes) -> bytes:
    return _HEAD.pack(len(payload), zlib.crc32(payload)) + payload


def _valid_end(descriptor: int) -> int:
    """End of the last whole record: where the next one goes."""
    total = os.fstat(descriptor).st_size
    offset = 0
    while offset + _HEAD.size <= total:
        size, checksum = _HEAD.unpack(os.pread(descriptor, _HEAD.size, offset))
        payload = os.pread(descriptor, size, offset + _HEAD.size)
        if len(payload) != size or zlib.crc32(payload) != checksum:
            break
        offset += _HEAD.size + size
    return offset
