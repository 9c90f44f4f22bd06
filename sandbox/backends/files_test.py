"""rooted, archive and changes on plain directories: nothing escapes the root."""

from __future__ import annotations

import io
import os
import stat
import tarfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import pytest

from sandbox.backends import archive, rooted
from sandbox.backends.changes import LowerView, collect
from sandbox.errors import InvalidRequestError, TooLargeError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text("secret")
    return tmp_path / "root"


@pytest.fixture
def root_fd(root: Path) -> Iterator[int]:
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


def tar_of(*members: tuple[tarfile.TarInfo, bytes]) -> BinaryIO:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for member, content in members:
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    buffer.seek(0)
    return buffer


def member(
    name: str, kind: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o644
) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, link, mode
    return info


def names_in(archive_file: BinaryIO) -> list[str]:
    with tarfile.open(fileobj=archive_file) as tar:
        return tar.getnames()


def outside_is_untouched(root: Path) -> bool:
    outside = root.parent / "outside"
    return os.listdir(outside) == ["secret"] and (outside / "secret").read_text() == "secret"


@pytest.mark.parametrize(
    "target",
    ["/outside", "../../outside", "../../../../../../{outside}", "{outside}"],
    ids=["inside-name", "dotdot", "many-dotdot", "absolute"],
)
def test_a_hostile_directory_link_stays_inside(root: Path, root_fd: int, target: str) -> None:
    outside = str(root.parent / "outside")
    (root / "link").symlink_to(
        target.format(outside=outside.lstrip("/") if ".." in target else outside)
    )
    with suppress(
        InvalidRequestError
    ):  # a dangling link inside the root is refused, which is as good
        archive.unpack(root_fd, "/link", tar_of((member("f"), b"x")), 100)
    assert outside_is_untouched(root)


@pytest.mark.parametrize("name", ["../../outside/f", "/../../outside/f", "a/../../../outside/f"])
def test_member_names_with_dotdot_stay_inside(root: Path, root_fd: int, name: str) -> None:
    with suppress(InvalidRequestError):
        archive.unpack(root_fd, "/", tar_of((member(name), b"x")), 100)
    assert outside_is_untouched(root)


def test_a_link_in_the_archive_then_a_file_through_it_stays_inside(
    root: Path, root_fd: int
) -> None:
    outside = str(root.parent / "outside")
    archive_file = tar_of((member("d", tarfile.SYMTYPE, outside), b""), (member("d/f"), b"x"))
    with pytest.raises(InvalidRequestError):
        archive.unpack(root_fd, "/", archive_file, 100)
    assert outside_is_untouched(root)


def test_a_file_replaces_a_link_instead_of_writing_through_it(root: Path, root_fd: int) -> None:
    (root / "f").symlink_to(root.parent / "outside" / "secret")
    archive.unpack(root_fd, "/", tar_of((member("f"), b"new")), 100)
    assert (root / "f").read_text() == "new" and not (root / "f").is_symlink()
    assert outside_is_untouched(root)


def test_a_hard_link_to_the_outside_is_refused(root: Path, root_fd: int) -> None:
    for link in ("../outside/secret", str(root.parent / "outside" / "secret")):
        with pytest.raises(InvalidRequestError):
            archive.unpack(root_fd, "/", tar_of((member("h", tarfile.LNKTYPE, link), b"")), 100)
    assert os.listdir(root) == []


@pytest.mark.parametrize(
    "bad",
    [
        member("dev", tarfile.CHRTYPE),
        member("blk", tarfile.BLKTYPE),
        member("fifo", tarfile.FIFOTYPE),
        member("suid", mode=0o4755),
        member("sgid", mode=0o2755),
    ],
    ids=lambda info: info.name,
)
def test_special_members_are_refused(root: Path, root_fd: int, bad: tarfile.TarInfo) -> None:
    with pytest.raises(InvalidRequestError, match=bad.name):
        archive.unpack(root_fd, "/", tar_of((bad, b"")), 100)
    assert os.listdir(root) == []


def test_what_is_not_a_tar_and_what_is_too_large_is_refused(root_fd: int) -> None:
    with pytest.raises(InvalidRequestError, match="not a tar"):
        archive.unpack(root_fd, "/", io.BytesIO(b"nonsense" * 100), 100)
    with pytest.raises(TooLargeError):
        archive.unpack(root_fd, "/", tar_of((member("f"), b"x" * 101)), 100)


def test_a_tree_round_trips(root: Path, root_fd: int) -> None:
    sent = tar_of(
        (member("d/run", mode=0o755), b"#!/bin/sh\n"),
        (member("d/link", tarfile.SYMTYPE, "run"), b""),
        (member("d/hard", tarfile.LNKTYPE, "d/run"), b""),
        (member("empty", tarfile.DIRTYPE, mode=0o700), b""),
    )
    assert archive.unpack(root_fd, "/app/new", sent, 100) == (3, 10)
    assert os.access(root / "app/new/d/run", os.X_OK)
    assert os.path.samefile(root / "app/new/d/run", root / "app/new/d/hard")
    packed = archive.pack(root_fd, "/app/new", 100)
    assert names_in(packed) == ["d", "d/hard", "d/link", "d/run", "empty"]


def test_packing_never_follows_links_or_blocks(root: Path, root_fd: int) -> None:
    (root / "d").mkdir()
    (root / "d" / "out").symlink_to(root.parent / "outside" / "secret")
    os.mkfifo(root / "d" / "fifo")
    with tarfile.open(fileobj=archive.pack(root_fd, "/d", 100)) as tar:
        assert [m.name for m in tar] == ["out"] and tar.getmembers()[0].issym()
    with pytest.raises(InvalidRequestError):
        archive.pack(root_fd, "/d/fifo", 100)
    with pytest.raises(InvalidRequestError):
        archive.pack(root_fd, "/d/out", 100)  # dangling inside the root


def test_packing_one_file_and_its_limit(root: Path, root_fd: int) -> None:
    (root / "f").write_bytes(b"x" * 50)
    (root / "l").symlink_to("/f")
    assert names_in(archive.pack(root_fd, "/f", 50)) == ["f"]
    assert names_in(archive.pack(root_fd, "/l", 50)) == ["l"]
    with pytest.raises(TooLargeError):
        archive.pack(root_fd, "/", 49)


def test_real_path_resolves_inside(root: Path, root_fd: int) -> None:
    (root / "a").mkdir()
    (root / "abs").symlink_to("/a/b")
    (root / "up").symlink_to("../../../a")
    (root / "loop").symlink_to("loop")
    assert rooted.real_path(root_fd, "/abs/c") == "/a/b/c"
    assert rooted.real_path(root_fd, "/up/../x") == "/x"
    with pytest.raises(OSError):
        rooted.real_path(root_fd, "/loop")


def test_changes_are_what_the_upper_layer_holds(tmp_path: Path) -> None:
    lower, upper = tmp_path / "lower", tmp_path / "upper"
    (lower / "app" / "pkg").mkdir(parents=True)
    (lower / "app" / "kept.py").write_text("k")
    (lower / "app" / "pkg" / "old.py").write_text("o")
    (upper / "app" / "pkg").mkdir(parents=True)
    (upper / "app" / "kept.py").write_text("changed")
    (upper / "app" / "new").mkdir()
    (upper / "app" / "new" / "n.py").write_text("n")
    (upper / "other").write_text("not below /app")
    fds = [os.open(d, os.O_RDONLY | os.O_DIRECTORY) for d in (lower, upper)]
    try:
        packed, deleted = collect(fds[0], fds[1], LowerView([lower]), "/app", 1000)
        assert names_in(packed) == ["kept.py", "new", "new/n.py"]
        assert deleted == []
    finally:
        for fd in fds:
            os.close(fd)


def test_a_layers_links_are_not_followed_into_the_host(tmp_path: Path) -> None:
    layer, under, outside = tmp_path / "layer", tmp_path / "under", tmp_path / "outside"
    (outside / "sub").mkdir(parents=True)
    (outside / "sub" / "host-name").write_text("x")
    (under / "app" / "sub").mkdir(parents=True)
    (under / "app" / "sub" / "hidden").write_text("x")
    layer.mkdir()
    (layer / "app").symlink_to(outside)
    view = LowerView([layer, under])
    assert view.kind("/app") == stat.S_IFLNK
    assert view.kind("/app/sub") is None
    assert view.names("/app/sub") == set() and view.names("/app") == set()
    assert LowerView([under, layer]).names("/app/sub") == {"hidden"}
