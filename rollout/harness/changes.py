"""Which of the agent's changes reach the grading sandbox, and how they are packed: pure functions.

Owner: `rollout.harness`. Invariants: only regular files and symbolic links below the workdir
are carried; what the grading spec restores, caches and version control are not.
"""

from __future__ import annotations

import io
import posixpath
import tarfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

_DROPPED_PARTS = frozenset({"__pycache__", ".git", ".pytest_cache", ".mypy_cache", ".ruff_cache"})
_DROPPED_SUFFIXES = (".pyc", ".pyo")
_EMPTY_TAR = bytes(1024)


@dataclass(frozen=True)
class TreeFile:
    """A regular file to be written: content and permission bits."""

    content: bytes
    mode: int = 0o644


@dataclass(frozen=True)
class TreeLink:
    """A symbolic link to be made."""

    target: str


@dataclass
class Changes:
    """The agent's work, relative to the workdir."""

    written: dict[str, TreeFile | TreeLink] = field(default_factory=dict)
    deleted: list[str] = field(default_factory=list)
    num_dropped: int = 0


def normal_path(name: str) -> str | None:
    """A tar member's path relative to the root of the archive, or None when it leaves it."""
    path = posixpath.normpath(name)
    if path == "." or path.startswith(("/", "../")) or path == "..":
        return None
    return path


def is_noise(path: str) -> bool:
    """True for bytecode, caches and version control, which no grading needs."""
    return path.endswith(_DROPPED_SUFFIXES) or not _DROPPED_PARTS.isdisjoint(path.split("/"))


def select_changes(
    archive: bytes,
    deleted_paths: Iterable[str],
    base: dict[str, TreeFile | TreeLink],
    is_restored: Callable[[str, bool], bool],
) -> Changes:
    """Picks what to carry from the tar of everything that changed since the lease began.

    Args: archive holds paths relative to the workdir; `base` is the task's environment folder,
    which was uploaded after the lease began and so is in the archive too; `is_restored(path,
    created)` is the grading spec's. Raises tarfile.TarError on a broken archive.
    """
    changes = Changes()
    seen: set[str] = set()
    with tarfile.open(fileobj=io.BytesIO(archive or _EMPTY_TAR), mode="r:") as tar:
        for member in tar:
            path = normal_path(member.name)
            if path is None or member.isdir():
                continue
            seen.add(path)
            entry = _read(tar, member)
            if entry is None or is_noise(path):
                changes.num_dropped += 1
            elif base.get(path) == entry:
                continue
            elif is_restored(path, path not in base):
                changes.num_dropped += 1
            else:
                changes.written[path] = entry
    gone = {path for name in deleted_paths if (path := normal_path(name))}
    gone |= base.keys() - seen
    for path in sorted(gone):
        if is_noise(path) or is_restored(path, False):
            changes.num_dropped += 1
        else:
            changes.deleted.append(path)
    return changes


def _read(tar: tarfile.TarFile, member: tarfile.TarInfo) -> TreeFile | TreeLink | None:
    if member.issym():
        return TreeLink(member.linkname)
    stream = tar.extractfile(member) if member.isreg() or member.islnk() else None
    if stream is None:
        return None
    executable = 0o111 if member.mode & 0o100 else 0
    return TreeFile(stream.read(), 0o644 | executable)


def graded_tree(
    base: dict[str, TreeFile | TreeLink], changes: Changes
) -> dict[str, TreeFile | TreeLink]:
    """The workdir's files for grading: the environment folder with the changes applied."""
    gone = set(changes.deleted)
    tree = {path: entry for path, entry in base.items() if path not in gone}
    # A file in the place of a directory, or the other way round, would clash while unpacking.
    directories = {parent for path in tree for parent in _parents(path)}
    for path in changes.written:
        for parent in _parents(path):
            tree.pop(parent, None)
        if path in directories:
            tree = {
                other: entry for other, entry in tree.items() if not other.startswith(path + "/")
            }
    tree.update(changes.written)
    return tree


def _parents(path: str) -> Iterable[str]:
    while "/" in path:
        path = path.rsplit("/", 1)[0]
        yield path


def deleted_outside(base: dict[str, TreeFile | TreeLink], changes: Changes) -> list[str]:
    """Deleted paths that the image itself brought, to be removed in the fresh sandbox."""
    return [path for path in changes.deleted if path not in base]


def pack(
    trees: dict[str, dict[str, TreeFile | TreeLink]], directories: Iterable[str] = ()
) -> bytes:
    """Packs trees below their absolute roots into one tar to be unpacked at `/`.

    Args: trees maps an absolute root such as `/app` to its files; directories are made too.
    """
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for directory in dict.fromkeys([*directories, *trees]):
            if not directory.strip("/"):
                continue
            info = tarfile.TarInfo(directory.strip("/"))
            info.type, info.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(info)
        for root, tree in trees.items():
            for path in sorted(tree):
                entry = tree[path]
                info = tarfile.TarInfo(posixpath.join(root.strip("/"), path))
                if isinstance(entry, TreeLink):
                    info.type, info.linkname = tarfile.SYMTYPE, entry.target
                    tar.addfile(info)
                else:
                    info.size, info.mode = len(entry.content), entry.mode
                    tar.addfile(info, io.BytesIO(entry.content))
    return buffer.getvalue()
