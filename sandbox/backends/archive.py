"""Tar archives into and out of a sandbox's root.

Owner: the local backend; runs in its transfer threads. Invariants: nothing outside the root is
read or written (see rooted.py); device nodes, FIFOs and setuid files never enter or leave; reads
never block on a FIFO.
"""

from __future__ import annotations

import io
import os
import stat
import tarfile
import tempfile
from pathlib import PurePosixPath
from typing import IO, BinaryIO, cast

from sandbox.backends import rooted
from sandbox.errors import InvalidRequestError, TooLargeError

_SPOOL_BYTES = 4 * 2**20
_COPY_BYTES = 256 * 1024
_SPECIAL_BITS = stat.S_ISUID | stat.S_ISGID


def spool() -> BinaryIO:
    """A temporary file that stays in memory while it is small."""
    return cast("BinaryIO", tempfile.SpooledTemporaryFile(max_size=_SPOOL_BYTES))


def unpack(root_fd: int, target_dir: str, archive: BinaryIO, max_bytes: int) -> tuple[int, int]:
    """Unpacks archive below target_dir. Returns (files, bytes of content).

    Raises InvalidRequestError for a bad archive or a member that may not enter, TooLargeError
    past max_bytes. Members before the one at fault have been written.
    """
    num_files = num_bytes = 0
    try:
        os.close(rooted.make_directories(root_fd, target_dir))
        with tarfile.open(fileobj=archive, mode="r:*") as tar:
            for member in tar:
                num_bytes += member.size if member.isreg() else 0
                if num_bytes > max_bytes:
                    raise TooLargeError(
                        f"upload to {target_dir} has more than {max_bytes} bytes of content "
                        "(max_transfer_bytes)"
                    )
                _unpack_member(root_fd, target_dir, tar, member)
                num_files += not member.isdir()
    except tarfile.TarError as error:
        raise InvalidRequestError(
            f"upload to {target_dir} is not a tar archive: {error}"
        ) from error
    except OSError as error:
        raise InvalidRequestError(f"cannot unpack below {target_dir}: {error}") from error
    return num_files, num_bytes


def _unpack_member(
    root_fd: int, target_dir: str, tar: tarfile.TarFile, member: tarfile.TarInfo
) -> None:
    name = PurePosixPath(member.name.lstrip("/"))
    if member.isdir():
        with rooted.directory(root_fd, f"{target_dir}/{name}", create=True) as fd:
            os.fchmod(fd, member.mode & 0o1777)
        return
    if not (member.isreg() or member.issym() or member.islnk()):
        raise InvalidRequestError(f"member {member.name!r} is a device or FIFO: not unpacked")
    if member.isreg() and member.mode & _SPECIAL_BITS:
        raise InvalidRequestError(f"member {member.name!r} is setuid or setgid: not unpacked")
    if name.name in ("", ".", ".."):
        raise InvalidRequestError(f"member {member.name!r} has no file name")
    with rooted.directory(root_fd, f"{target_dir}/{name.parent}", create=True) as parent:
        rooted.remove_entry(parent, name.name)
        if member.issym():
            os.symlink(member.linkname, name.name, dir_fd=parent)
        elif member.islnk():
            _hard_link(root_fd, target_dir, member.linkname, parent, name.name)
        else:
            source = tar.extractfile(member)
            assert source is not None, "regular members have content"
            _write_file(parent, name.name, source, member)


def _write_file(parent: int, name: str, source: IO[bytes], member: tarfile.TarInfo) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(name, flags, 0o600, dir_fd=parent)
    try:
        while chunk := source.read(_COPY_BYTES):
            view = memoryview(chunk)
            while view:
                view = view[os.write(fd, view) :]
        os.fchmod(fd, member.mode & 0o777)
        os.utime(fd, (member.mtime, member.mtime))
    finally:
        os.close(fd)


def _hard_link(root_fd: int, target_dir: str, linkname: str, parent: int, name: str) -> None:
    source = PurePosixPath(linkname.lstrip("/"))
    with rooted.directory(root_fd, f"{target_dir}/{source.parent}") as source_parent:
        os.link(
            source.name, name, src_dir_fd=source_parent, dst_dir_fd=parent, follow_symlinks=False
        )


class Packer:
    """Writes entries of a sandbox into a tar file, within a byte limit."""

    def __init__(self, what: str, max_bytes: int) -> None:
        """Args: what names the transfer in errors."""
        self._what = what
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._file = spool()
        self._tar = tarfile.TarFile(fileobj=self._file, mode="w", format=tarfile.PAX_FORMAT)

    def add(self, parent_fd: int, name: str, member_name: str) -> os.stat_result | None:
        """Adds one entry, not its children; returns its status, None when it was left out.

        An entry that vanishes meanwhile is left out; so are devices, FIFOs and sockets.
        """
        try:
            status = os.stat(name, dir_fd=parent_fd, follow_symlinks=False)
            if stat.S_ISREG(status.st_mode):
                return self._add_file(parent_fd, name, member_name)
            member = self._member(member_name, status)
            if stat.S_ISLNK(status.st_mode):
                member.type, member.linkname = tarfile.SYMTYPE, os.readlink(name, dir_fd=parent_fd)
            elif stat.S_ISDIR(status.st_mode):
                member.type = tarfile.DIRTYPE
            else:
                return None
        except (FileNotFoundError, NotADirectoryError):
            return None
        self._tar.addfile(member)
        return status

    def finish(self) -> BinaryIO:
        """Ends the archive; the file is positioned at its start and the caller's to close."""
        self._tar.close()
        self._file.seek(0)
        return self._file

    def abandon(self) -> None:
        """Frees the archive after an error."""
        self._file.close()

    def _add_file(self, parent_fd: int, name: str, member_name: str) -> os.stat_result | None:
        try:
            opened = rooted.open_regular(parent_fd, name)
        except OSError:
            return None  # swapped for something else since the stat
        if opened is None:
            return None
        fd, status = opened
        with os.fdopen(fd, "rb") as source:
            self._num_bytes += status.st_size
            if self._num_bytes > self._max_bytes:
                raise TooLargeError(
                    f"{self._what} has more than {self._max_bytes} bytes of content: "
                    "raise max_bytes or name a smaller directory"
                )
            member = self._member(member_name, status)
            member.size = status.st_size
            self._tar.addfile(member, _Exactly(source, status.st_size))
        return status

    @staticmethod
    def _member(name: str, status: os.stat_result) -> tarfile.TarInfo:
        member = tarfile.TarInfo(name)
        member.mode = stat.S_IMODE(status.st_mode) & ~_SPECIAL_BITS
        member.uid, member.gid, member.mtime = status.st_uid, status.st_gid, int(status.st_mtime)
        return member


class _Exactly(io.RawIOBase):
    """A file that changes size while it is read still gives exactly `size` bytes."""

    def __init__(self, source: IO[bytes], size: int) -> None:
        super().__init__()
        self._source = source
        self._left = size

    def read(self, size: int = -1) -> bytes:
        want = self._left if size < 0 else min(size, self._left)
        data = self._source.read(want)
        self._left -= want
        return data.ljust(want, b"\0")


def pack(root_fd: int, path: str, max_bytes: int) -> BinaryIO:
    """Packs a file (one member, its base name) or the content of a directory.

    Raises InvalidRequestError when path is missing or is no file or directory, TooLargeError.
    """
    packer = Packer(f"download of {path}", max_bytes)
    try:
        _pack(packer, root_fd, path)
        return packer.finish()
    except OSError as error:
        packer.abandon()
        raise InvalidRequestError(f"cannot read {path}: {error}") from error
    except Exception:  # whatever it is goes on to the caller; only the file is freed here
        packer.abandon()
        raise


def _pack(packer: Packer, root_fd: int, path: str) -> None:
    resolved = PurePosixPath(rooted.real_path(root_fd, path))
    with rooted.directory(root_fd, str(resolved.parent)) as parent:
        if resolved.name:
            status = os.stat(resolved.name, dir_fd=parent, follow_symlinks=False)
            if not stat.S_ISDIR(status.st_mode):
                name = PurePosixPath(path).name
                if packer.add(parent, resolved.name, name) is None:
                    raise InvalidRequestError(f"{path} is no regular file or directory")
                return
    with rooted.directory(root_fd, str(resolved)) as fd:
        _pack_children(packer, fd, "")


def _pack_children(packer: Packer, directory_fd: int, prefix: str) -> None:
    for name in sorted(os.listdir(directory_fd)):
        status = packer.add(directory_fd, name, prefix + name)
        if status is not None and stat.S_ISDIR(status.st_mode):
            child = open_child(directory_fd, name)
            if child is None:
                continue
            try:
                _pack_children(packer, child, f"{prefix}{name}/")
            finally:
                os.close(child)


def open_child(directory_fd: int, name: str) -> int | None:
    """Opens a subdirectory without following a link; None when it is one no more."""
    try:
        return os.open(
            name,
            os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC,
            dir_fd=directory_fd,
        )
    except OSError:
        return None
