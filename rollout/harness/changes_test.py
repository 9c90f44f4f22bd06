"""What of the agent's work reaches the grading sandbox."""

from __future__ import annotations

import io
import tarfile
from typing import Any

import pytest

from rollout.harness.changes import (
    Changes,
    TreeFile,
    TreeLink,
    deleted_outside,
    graded_tree,
    normal_path,
    pack,
    select_changes,
)

BASE: dict[str, TreeFile | TreeLink] = {
    "a.py": TreeFile(b"a"),
    "b.py": TreeFile(b"b"),
    "run.sh": TreeFile(b"#!", 0o755),
    "pkg/m.py": TreeFile(b"m"),
    "link": TreeLink("a.py"),
}


def archive(tree: dict[str, Any]) -> bytes:
    return pack({"/": tree})


def select(tree: dict[str, Any], deleted: tuple[str, ...] = (), restored: Any = None) -> Changes:
    return select_changes(archive(tree), deleted, BASE, restored or (lambda path, created: False))


def test_nothing_changed() -> None:
    assert select(dict(BASE)) == Changes()
    assert graded_tree(BASE, Changes()) == BASE


def test_modified_created_deleted() -> None:
    tree = {**BASE, "a.py": TreeFile(b"A"), "new/x.py": TreeFile(b"x")}
    del tree["b.py"]
    changes = select(tree, deleted=("image_file.txt",))
    assert set(changes.written) == {"a.py", "new/x.py"}
    assert changes.deleted == ["b.py", "image_file.txt"]
    assert deleted_outside(BASE, changes) == ["image_file.txt"]
    graded = graded_tree(BASE, changes)
    assert graded["a.py"] == TreeFile(b"A") and "b.py" not in graded and "new/x.py" in graded


def test_mode_is_a_change() -> None:
    assert set(select({**BASE, "a.py": TreeFile(b"a", 0o755)}).written) == {"a.py"}


def test_restored_paths_stay_the_tasks() -> None:
    tree = {**BASE, "a.py": TreeFile(b"A"), "conftest.py": TreeFile(b"!")}
    del tree["b.py"]

    def restored(path: str, created: bool) -> bool:
        return path in ("a.py", "b.py") or created

    changes = select(tree, restored=restored)
    assert changes == Changes(num_dropped=3)


def test_caches_and_version_control_are_dropped() -> None:
    noise = ("pkg/__pycache__/m.pyc", ".git/HEAD", "x.pyc", ".pytest_cache/v")
    changes = select({**BASE, **{name: TreeFile(b"?") for name in noise}})
    assert changes == Changes(num_dropped=len(noise))


def test_special_files_and_escaping_names_are_dropped() -> None:
    buffer = io.BytesIO(archive(dict(BASE)))
    with tarfile.open(fileobj=buffer, mode="a") as tar:
        for name, kind in (("fifo", tarfile.FIFOTYPE), ("../evil", tarfile.REGTYPE)):
            info = tarfile.TarInfo(name)
            info.type = kind
            tar.addfile(info)
    changes = select_changes(buffer.getvalue(), (), BASE, lambda path, created: False)
    assert changes == Changes(num_dropped=1)


def test_file_and_directory_may_swap_places() -> None:
    tree = {k: v for k, v in BASE.items() if not k.startswith("pkg/") and k != "a.py"}
    tree |= {"pkg": TreeFile(b"now a file"), "a.py/inside": TreeFile(b"now a folder")}
    graded = graded_tree(BASE, select(tree))
    assert graded["pkg"] == TreeFile(b"now a file") and "pkg/m.py" not in graded
    assert "a.py" not in graded and "a.py/inside" in graded


def test_empty_archive_deletes_all() -> None:
    assert select_changes(b"", (), BASE, lambda p, c: False).deleted == sorted(BASE)


def test_pack_keeps_modes_and_links() -> None:
    data = pack({"/app": BASE}, ("/logs/verifier",))
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        members = {member.name: member for member in tar}
    assert members["logs/verifier"].isdir() and members["app"].isdir()
    assert members["app/run.sh"].mode == 0o755 and members["app/a.py"].mode == 0o644
    assert members["app/link"].linkname == "a.py"


@pytest.mark.parametrize(
    ("name", "want"),
    [("./a", "a"), ("a/../b", "b"), ("../a", None), ("/a", None), (".", None), ("..", None)],
)
def test_normal_path(name: str, want: str | None) -> None:
    assert normal_path(name) == want
