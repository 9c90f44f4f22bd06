"""File access that cannot leave a sandbox's root, whatever its symbolic links say.

Every path is resolved by the kernel with openat2(RESOLVE_IN_ROOT) from a descriptor of the
sandbox's root: absolute links and `..` stay inside, and a directory that is swapped for a link
meanwhile changes nothing. The last component is then used relative to its parent's descriptor,
by calls that do not follow links.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import PurePosixPath

from sandbox.errors import InvalidRequestError

_SYS_OPENAT2 = 437  # the same on every architecture
_RESOLVE_NO_MAGICLINKS = 0x02
_RESOLVE_NO_SYMLINKS = 0x04
_RESOLVE_IN_ROOT = 0x10
_MAX_RACES = 64
"""The kernel answers EAGAIN when a rename races with resolution; retried this often."""


class _OpenHow(ctypes.Structure):
    _fields_ = (
        ("flags", ctypes.c_uint64),
        ("mode", ctypes.c_uint64),
        ("resolve", ctypes.c_uint64),
    )


_libc = ctypes.CDLL(None, use_errno=True)


def open_in_root(
    root_fd: int, path: str, flags: int, mode: int = 0, *, follow_links: bool = True
) -> int:
    """Opens path (absolute or relative, taken from root_fd as `/`). Raises OSError."""
    how = _OpenHow(
        flags | os.O_CLOEXEC,
        mode,
        _RESOLVE_IN_ROOT | _RESOLVE_NO_MAGICLINKS | (0 if follow_links else _RESOLVE_NO_SYMLINKS),
    )
    code = errno.EAGAIN
    for _ in range(_MAX_RACES):
        fd = int(
            _libc.syscall(
                _SYS_OPENAT2,
                root_fd,
                ctypes.c_char_p(os.fsencode(path)),
                ctypes.byref(how),
                ctypes.c_size_t(ctypes.sizeof(how)),
            )
        )
        if fd >= 0:
            return fd
        code = ctypes.get_errno()
        if code not in (errno.EAGAIN, errno.EINTR):
            break
    raise OSError(code, os.strerror(code), path)


def normalise(path: str) -> str:
    """An absolute path of the sandbox, checked. Raises InvalidRequestError."""
    if not path.startswith("/") or "\0" in path:
        raise InvalidRequestError(f"path {path!r} is not an absolute path of the sandbox")
    return path


@contextmanager
def directory(root_fd: int, path: str, *, create: bool = False) -> Iterator[int]:
    """A descriptor of a directory of the sandbox, made with its parents when asked."""
    fd = make_directories(root_fd, path) if create else _open_directory(root_fd, path)
    try:
        yield fd
    finally:
        os.close(fd)


def _open_directory(root_fd: int, path: str) -> int:
    return open_in_root(root_fd, path, os.O_RDONLY | os.O_DIRECTORY)


def make_directories(root_fd: int, path: str) -> int:
    """Opens a directory, making what is missing of it (mode 0755). Raises OSError."""
    try:
        return _open_directory(root_fd, path)
    except FileNotFoundError:
        pass
    parts = [part for part in PurePosixPath(path).parts if part != "/"]
    current = ""
    fd = _open_directory(root_fd, "/")
    for part in parts:
        current = f"{current}/{part}"
        try:
            child = _open_or_make(root_fd, fd, current)
        finally:
            os.close(fd)
        fd = child
    return fd


def _open_or_make(root_fd: int, parent_fd: int, path: str) -> int:
    try:
        return _open_directory(root_fd, path)
    except FileNotFoundError:
        pass
    try:
        os.mkdir(PurePosixPath(path).name, 0o755, dir_fd=parent_fd)
    except FileExistsError as error:
        # A dangling link: making its target would be guessing.
        raise NotADirectoryError(
            errno.ENOTDIR, "a dangling symbolic link is in the way", path
        ) from error
    return _open_directory(root_fd, path)


def real_path(root_fd: int, path: str) -> str:
    """path with its symbolic links resolved inside the root; missing parts stay as they are."""
    pending = [part for part in PurePosixPath(path).parts if part != "/"][::-1]
    done: list[str] = []
    for _ in range(4096):
        if not pending:
            return "/" + "/".join(done)
        part = pending.pop()
        if part == "..":
            done = done[:-1]
            continue
        try:
            with directory(root_fd, "/" + "/".join(done)) as parent:
                target = os.readlink(part, dir_fd=parent)
        except OSError:
            done.append(part)  # not a link, or not there
            continue
        if target.startswith("/"):
            done = []
        pending += [piece for piece in PurePosixPath(target).parts if piece != "/"][::-1]
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)


def remove_entry(parent_fd: int, name: str) -> None:
    """Removes a file or link so that another can take its place; a directory raises."""
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=parent_fd)


def open_regular(parent_fd: int, name: str) -> tuple[int, os.stat_result] | None:
    """Opens a regular file for reading without following a link or blocking; None for others."""
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=parent_fd)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        return None
    return fd, status
