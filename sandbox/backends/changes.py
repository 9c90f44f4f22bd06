"""What a sandbox changed: a walk over its overlay's upper layer.

Owner: the local backend; runs in its transfer threads. The overlay is mounted without redirects
and metadata-only copies, so the upper layer holds whole files. A whiteout (character device 0:0)
is a deletion; an opaque directory hides all that the lower layers have under its name.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from sandbox.backends import rooted
from sandbox.backends.archive import Packer, open_child
from sandbox.errors import InvalidRequestError

_OPAQUE = "trusted.overlay.opaque"


class LowerView:
    """The merged image below an upper layer, as far as names and kinds of entries go."""

    def __init__(self, lowers: Sequence[Path]) -> None:
        """Args: lowers are the image's layers, topmost first."""
        self._lowers = lowers

    def kind(self, path: str) -> int | None:
        """The file type bits of an absolute path in the image, None when it is not there."""
        for lower in self._lowers:
            status, hides = _look_up(lower, path)
            if status is not None:
                return None if _is_whiteout(status) else stat.S_IFMT(status.st_mode)
            if hides:
                return None
        return None

    def names(self, path: str) -> set[str]:
        """Names in a directory of the image."""
        found: dict[str, bool] = {}
        for lower in self._lowers:
            status, hides = _look_up(lower, path)
            if status is not None and stat.S_ISDIR(status.st_mode):
                directory = lower / path.lstrip("/")
                for name in os.listdir(directory):
                    entry = _lstat(directory / name)
                    found.setdefault(name, entry is not None and not _is_whiteout(entry))
            if hides:
                break
        return {name for name, visible in found.items() if visible}


def collect(
    root_fd: int, upper_fd: int, lower: LowerView, path: str, max_bytes: int
) -> tuple[BinaryIO, list[str]]:
    """Packs what changed below path; returns the archive and the deleted paths, relative to it.

    Directories appear only when the image has none there. Raises InvalidRequestError when path
    is no directory, TooLargeError past max_bytes.
    """
    packer = Packer(f"changes below {path}", max_bytes)
    deleted: list[str] = []
    try:
        resolved = rooted.real_path(root_fd, path)
        with rooted.directory(root_fd, resolved):
            pass
        opaque = _is_opaque_within(upper_fd, resolved)
        try:
            fd = rooted.open_in_root(
                upper_fd, resolved, os.O_RDONLY | os.O_DIRECTORY, follow_links=False
            )
        except FileNotFoundError:
            return packer.finish(), deleted  # nothing was written below it
        try:
            _walk(packer, fd, lower, PurePosixPath(resolved), "", opaque, deleted)
        finally:
            os.close(fd)
        return packer.finish(), sorted(deleted)
    except OSError as error:
        packer.abandon()
        raise InvalidRequestError(f"cannot collect changes below {path}: {error}") from error
    except Exception:  # whatever it is goes on to the caller; only the file is freed here
        packer.abandon()
        raise


def _walk(
    packer: Packer,
    fd: int,
    lower: LowerView,
    at: PurePosixPath,
    prefix: str,
    opaque: bool,
    deleted: list[str],
) -> None:
    names = sorted(os.listdir(fd))
    if opaque:
        deleted += [prefix + name for name in lower.names(str(at)) - set(names)]
    for name in names:
        path = at / name
        status = os.stat(name, dir_fd=fd, follow_symlinks=False)
        if _is_whiteout(status):
            if lower.kind(str(path)) is not None:
                deleted.append(prefix + name)
            continue
        if not stat.S_ISDIR(status.st_mode):
            packer.add(fd, name, prefix + name)
            continue
        if lower.kind(str(path)) != stat.S_IFDIR:
            packer.add(fd, name, prefix + name)
        child = open_child(fd, name)
        if child is None:
            continue
        try:
            hides = opaque or _is_opaque(child)
            _walk(packer, child, lower, path, f"{prefix}{name}/", hides, deleted)
        finally:
            os.close(child)


def _look_up(layer: Path, path: str) -> tuple[os.stat_result | None, bool]:
    """(status of path in one layer, whether the layers under it are hidden there).

    Links on the way are never followed: they would lead out of the layer, into the host.
    """
    parts = PurePosixPath(path.lstrip("/")).parts
    current = layer
    status = _lstat(current)
    hides = False
    for part in parts:
        if status is None or not stat.S_ISDIR(status.st_mode):
            return None, hides or status is not None
        current = current / part
        status = _lstat(current)
        if status is not None:
            hides = hides or not stat.S_ISDIR(status.st_mode) or _is_opaque(current)
    return status, hides


def _lstat(path: Path) -> os.stat_result | None:
    try:
        return path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None


def _is_whiteout(status: os.stat_result) -> bool:
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == 0


def _is_opaque(directory: Path | int) -> bool:
    try:
        return os.getxattr(directory, _OPAQUE) == b"y"
    except OSError:
        return False


def _is_opaque_within(upper_fd: int, path: str) -> bool:
    """True when path or a parent of it is opaque in the upper layer."""
    current = ""
    for part in PurePosixPath(path.lstrip("/")).parts:
        current = f"{current}/{part}"
        try:
            fd = rooted.open_in_root(
                upper_fd, current, os.O_RDONLY | os.O_DIRECTORY, follow_links=False
            )
        except OSError:
            return False
        try:
            if _is_opaque(fd):
                return True
        finally:
            os.close(fd)
    return False
