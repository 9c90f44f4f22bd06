"""Files in and out of live sandboxes, hostile ones included. Needs root."""

from __future__ import annotations

import asyncio
import io
import tarfile
from pathlib import Path

import pytest

from sandbox.client import (
    MAX_ACQUIRE_ARCHIVE_BYTES,
    InvalidRequestError,
    TooLargeError,
    UnknownLeaseError,
)
from sandbox.config import ImageConfig
from sandbox.conftest import Rig, RunRig


def names(archive: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return tar.getnames()


def tar_of(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


async def test_directories_and_files_go_in_and_come_out(rig: Rig, tmp_path: Path) -> None:
    (tmp_path / "src" / "pkg").mkdir(parents=True)
    (tmp_path / "src" / "pkg" / "a.py").write_text("print('hi')")
    (tmp_path / "src" / "run.sh").write_text("#!/bin/sh\npython3 pkg/a.py\n")
    (tmp_path / "src" / "run.sh").chmod(0o755)
    big = bytes(range(256)) * 8192
    async with rig.lease() as lease:
        assert (await rig.client.upload_dir(lease, tmp_path / "src", "/app"))[0] == 2
        await rig.client.upload_files(lease, {"deep/er/big": big}, "/data")
        assert await rig.text(lease, "./run.sh; stat -c %u run.sh") == "hi\n0"
        assert await rig.client.download_file(lease, "/data/deep/er/big") == big
        assert names(await rig.client.download(lease, "/app")) == ["pkg", "pkg/a.py", "run.sh"]
        with pytest.raises(InvalidRequestError, match="/nothing"):
            await rig.client.download(lease, "/nothing")
        with pytest.raises(TooLargeError):
            await rig.client.download(lease, "/data", max_bytes=1000)
        with pytest.raises(InvalidRequestError, match="not an absolute"):
            await rig.client.download(lease, "app")


async def test_a_sandboxs_links_lead_nowhere_outside(rig: Rig, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("host secret")
    async with rig.lease() as lease:
        await rig.client.exec(
            lease,
            f"ln -s {tmp_path} /app/abs; ln -s ../../../../../..{tmp_path} /app/rel;"
            f"ln -s {tmp_path}/secret /app/file; ln -s /proc/1/root /app/magic;"
            "ln -s /proc/self/fd /app/fds; mkdir /app/inside; ln -s /app/inside /app/fine",
        )
        for path in ("abs/secret", "rel/secret", "file", "fds/0"):
            with pytest.raises(InvalidRequestError):
                await rig.client.download(lease, f"/app/{path}")
        own = await rig.client.download_file(lease, "/etc/passwd")
        assert await rig.client.download_file(lease, "/app/magic/etc/passwd") == own
        for path in ("abs", "rel", "magic/tmp", "fds"):
            with pytest.raises(InvalidRequestError):
                await rig.client.upload_files(lease, {"planted": b"x"}, f"/app/{path}")
        assert sorted(p.name for p in tmp_path.iterdir()) == ["secret"]
        await rig.client.upload_files(lease, {"f": b"x", "file": b"y"}, "/app/fine")
        assert await rig.text(lease, "cat inside/f inside/file") == "xy"
        await rig.client.upload_files(lease, {"file": b"replaced"}, "/app")
        assert (tmp_path / "secret").read_text() == "host secret"


async def test_a_directory_swapped_for_a_link_while_files_arrive(rig: Rig, tmp_path: Path) -> None:
    async with rig.lease() as lease:
        swap = (
            f"ln -s {tmp_path} evil; mkdir d;"
            "while :; do mv d e; mv evil d; mv d evil; mv e d; done 2>/dev/null"
        )
        running = asyncio.create_task(rig.client.exec(lease, swap, timeout_s=4))
        await asyncio.sleep(0.2)
        for index in range(60):
            try:
                await rig.client.upload_files(lease, {f"f{index}": b"x"}, "/app/d")
            except InvalidRequestError:
                continue
        await rig.client.kill_processes(lease)
        await running
        assert list(tmp_path.iterdir()) == []


async def test_uploads_cannot_reach_kernel_files(rig: Rig) -> None:
    async with rig.lease() as lease:
        for target in ("/proc/sys/kernel", "/usr/bin"):
            with pytest.raises(InvalidRequestError):
                await rig.client.upload_files(lease, {"core_pattern": b"x"}, target)


async def test_changes_are_collected(rig_factory: RunRig, tmp_path: Path) -> None:
    app = tmp_path / "layer" / "app"
    (app / "pkg" / "sub").mkdir(parents=True)
    for name in ("keep.py", "edit.py", "drop.py", "pkg/a.py", "pkg/b.py", "pkg/sub/c.py"):
        (app / name).write_text(name)
    images = {"task": ImageConfig(layers=(tmp_path / "layer",))}
    async with rig_factory(images=images) as rig, rig.lease("task") as lease:
        changes = await rig.client.collect_changes(lease, "/app")
        assert names(changes.archive) == [] and changes.deleted_paths == ()
        await rig.client.exec(
            lease,
            "echo new > edit.py; rm drop.py; rm -r pkg; mkdir -p pkg; echo b2 > pkg/b.py;"
            "mkdir empty; ln -s edit.py link; touch tmp; rm tmp; echo out > /tmp/other;"
            "ln -s /app /app-link",
        )
        for path in ("/app", "/app-link", "/tmp/../app/"):
            changes = await rig.client.collect_changes(lease, path)
            assert names(changes.archive) == ["edit.py", "empty", "link", "pkg/b.py"]
            assert changes.deleted_paths == ("drop.py", "pkg/a.py", "pkg/sub")
        # A fresh sandbox with the changes applied equals the old one.
        listing = "find . -type f | sort | xargs md5sum"
        async with rig.lease("task") as fresh:
            await rig.client.exec(fresh, "rm -rf " + " ".join(changes.deleted_paths))
            await rig.client.upload_tar(fresh, changes.archive, "/app")
            assert await rig.text(fresh, listing) == await rig.text(lease, listing)
        with pytest.raises(InvalidRequestError):
            await rig.client.collect_changes(lease, "/app/edit.py")


async def test_uploads_count_as_changes_on_a_bare_image(rig: Rig) -> None:
    async with rig.lease() as lease:
        await rig.client.upload_files(lease, {"a": b"1", "d/b": b"2"}, "/app")
        changes = await rig.client.collect_changes(lease, "/app")
        assert names(changes.archive) == ["a", "d", "d/b"]


async def test_an_archive_that_comes_with_acquire_is_there_from_the_start(rig: Rig) -> None:
    lease = await rig.client.acquire("host", archive=tar_of({"app/a": b"1", "tests/t.sh": b"2"}))
    assert await rig.text(lease, "cat a /tests/t.sh") == "12"
    changes = await rig.client.collect_changes(lease, "/app")
    assert names(changes.archive) == ["a"]
    await rig.client.release(lease)


@pytest.mark.parametrize(
    "archive",
    [
        pytest.param(b"no tar" * 1000, id="broken"),
        pytest.param(bytes(MAX_ACQUIRE_ARCHIVE_BYTES + 1), id="too_large"),
    ],
)
async def test_an_archive_that_cannot_be_taken_leaves_no_sandbox(rig: Rig, archive: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        await rig.client.acquire("host", archive=archive)
    status = await rig.client.status()
    assert (status.num_active, status.counters["num_acquired"]) == (0, 0)


async def test_changes_are_collected_once_nothing_runs_any_more(rig: Rig) -> None:
    async with rig.lease() as lease:
        writing = "while :; do echo x >> f; sleep 0.01; done"
        running = asyncio.create_task(rig.client.exec(lease, writing, timeout_s=30))
        while not names((await rig.client.collect_changes(lease, "/app")).archive):
            await asyncio.sleep(0.05)
        changes = await rig.client.collect_changes(lease, "/app", kill_processes=True)
        assert (await running).exit_code == 137
        again = await rig.client.collect_changes(lease, "/app")
        assert again.archive == changes.archive and names(again.archive) == ["f"]


@pytest.mark.parametrize("num_bytes", [3, 700_000], ids=["one_chunk", "chunks"])
async def test_changes_can_be_the_last_that_is_asked_of_a_sandbox(rig: Rig, num_bytes: int) -> None:
    lease = await rig.client.acquire("host")
    await rig.client.upload_files(lease, {"a": b"x" * num_bytes}, "/app")
    for refused in ("/app/a", "relative"):
        with pytest.raises(InvalidRequestError):
            await rig.client.collect_changes(lease, refused, release=True)
    with pytest.raises(TooLargeError):
        await rig.client.collect_changes(lease, "/app", max_bytes=2, release=True)
    assert (await rig.client.status()).num_active == 1
    kept = await rig.client.collect_changes(lease, "/app")
    changes = await rig.client.collect_changes(lease, "/app", kill_processes=True, release=True)
    assert changes == kept and names(changes.archive) == ["a"]
    status = await rig.client.status()
    assert (status.num_active, status.counters["num_released"]) == (0, 1)
    assert not await rig.client.release(lease)
    with pytest.raises(UnknownLeaseError):
        await rig.client.collect_changes(lease, "/app")
