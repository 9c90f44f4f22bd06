"""A file that grows by lines, and that a full disk does not stop.

Lines that cannot be written are kept in memory and written with the next one. A line is whole or
absent: what a failed write left of it is cut off, and what a crash left is ended before the next.
Owner: one thread of one process.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

_log = logging.getLogger(__name__)


class LineLog:
    """Appends to one file."""

    def __init__(self, path: Path) -> None:
        """Args: path is made by the first line; its folder is there."""
        self._path = path
        self._unwritten: list[str] = []

    def append(self, line: str) -> None:
        """Adds a line, given without its end; it is in the file at once unless that fails."""
        was_failing = bool(self._unwritten)
        self._unwritten.append(line)
        error = self._write()
        if error is not None and not was_failing:
            _log.warning("%s: kept in memory until there is room: %s", self._path, error)

    def close(self) -> None:
        """Tries a last time to write what is kept."""
        if self._unwritten and (error := self._write()) is not None:
            _log.error("%s: %d lines are lost: %s", self._path, len(self._unwritten), error)

    def _write(self) -> OSError | None:
        try:
            with self._path.open("a+b", buffering=0) as file:
                size = file.seek(0, os.SEEK_END)
                text = "".join(line + "\n" for line in self._unwritten)
                if size:
                    file.seek(size - 1)
                    text = text if file.read(1) == b"\n" else "\n" + text
                data = text.encode()
                try:
                    while data:
                        data = data[file.write(data) :]
                except OSError:
                    file.truncate(size)
                    raise
        except OSError as error:
            return error
        self._unwritten.clear()
        return None
