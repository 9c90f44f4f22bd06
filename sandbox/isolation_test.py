"""What a command in a sandbox can see and do. Needs root: namespaces, overlay, cgroups."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest

from sandbox.client import InvalidRequestError, SandboxDiedError
from sandbox.config import ImageConfig
from sandbox.conftest import Rig, RunRig


async def test_commands_run_exactly_as_given(rig: Rig) -> None:
    async with rig.lease() as lease:
        result = await rig.client.exec(
            lease, "echo \"$A\" 'b  c'\necho err >&2; exit 7", env={"A": "x y"}
        )
        assert (result.stdout, result.stderr, result.exit_code) == (b"x y b  c\n", b"err\n", 7)
        assert (await rig.client.exec(lease, "kill -9 $$")).exit_code == 137
        assert await rig.text(lease, "pwd; id -u; python -c 'print(1)'; python3 -c 'print(2)'") == (
            "/app\n0\n1\n2"
        )
        assert await rig.text(lease, "pwd", cwd="/tmp") == "/tmp"
        assert (await rig.client.exec(lease, "true", cwd="/nowhere")).exit_code == 126


async def test_the_hosts_files_are_not_visible(rig: Rig, tmp_path: Path) -> None:
    (tmp_path / "host-file").write_text("x")
    async with rig.lease() as lease:
        for path in (
            tmp_path,
            Path(__file__).parent,
            Path.home() / ".cache",
            Path("/usr/local/lib"),
        ):
            assert await rig.text(lease, f"ls {path} 2>/dev/null") == "", path
        assert await rig.text(lease, "ls /root /home /tmp /srv /mnt -A | grep -v :") == ""
        mounts = await rig.text(lease, "awk '{print $2}' /proc/mounts")
        assert sorted(mounts.split()) == ["/", "/dev/pts", "/proc", "/usr"]
        assert "PYTHONPATH" not in await rig.text(lease, "env")


async def test_usr_and_proc_are_read_only(rig: Rig) -> None:
    async with rig.lease() as lease:
        for command in (
            "touch /usr/bin/x",
            "echo 1 > /proc/sys/kernel/panic",
            "echo b > /proc/sysrq-trigger",
            "mount -t tmpfs none /tmp",
            "mount -o remount,rw /proc",
            "umount /usr",
            "mknod /tmp/disk b 8 0",
            "unshare -Ur true",
            "chroot / unshare -m true",
        ):
            assert (await rig.client.exec(lease, command)).exit_code != 0, command


async def test_host_processes_and_init_are_out_of_reach(rig: Rig) -> None:
    async with rig.lease() as lease:
        pids = (await rig.text(lease, "ls /proc | grep -E '^[0-9]+$'")).split()
        assert len(pids) <= 4 and "1" in pids
        assert await rig.text(lease, "cat /proc/1/environ /proc/1/root/etc/hosts 2>/dev/null") == ""
        await rig.client.exec(lease, "kill -9 1; kill -TERM 1; kill -STOP 1")
        assert await rig.text(lease, "echo alive") == "alive"
        assert (await rig.client.exec(lease, f"kill -9 {os.getpid()}")).exit_code != 0


async def test_there_is_no_network_but_loopback(rig: Rig) -> None:
    with socket.create_server(("127.0.0.1", 0)) as host_server:
        port = host_server.getsockname()[1]
        async with rig.lease() as lease, rig.lease() as other:
            probe = f"timeout 2 bash -c '</dev/tcp/127.0.0.1/{port}'"
            assert (await rig.client.exec(lease, probe)).exit_code != 0
            probe = "timeout 2 bash -c '</dev/tcp/1.1.1.1/53'"
            assert (await rig.client.exec(lease, probe)).exit_code != 0
            assert await rig.text(lease, "tail -n +3 /proc/net/dev | wc -l") == "1"
            serve = (
                'python3 -c \'import socket as s; l=s.create_server(("127.0.0.1",8000));'
                'print(1,flush=True); l.accept()[0].send(b"hi")\' >/tmp/log & '
                "until grep -q 1 /tmp/log; do sleep 0.05; done"
            )
            assert (await rig.client.exec(lease, serve)).exit_code == 0
            assert (await rig.client.exec(other, serve)).exit_code == 0  # its own port 8000
            fetch = "timeout 5 bash -c 'cat </dev/tcp/127.0.0.1/8000'"
            assert await rig.text(lease, fetch) == "hi"


async def test_devices_shm_and_terminals_work(rig: Rig) -> None:
    async with rig.lease() as lease:
        assert await rig.text(
            lease, "head -c 4 /dev/urandom | wc -c; echo x > /dev/null; echo ok"
        ) == ("4\nok")
        assert await rig.text(lease, "echo a | cat /dev/stdin; cat <(echo b)") == "a\nb"
        assert await rig.text(lease, "python3 -c 'import pty,os; print(len(pty.openpty()))'") == "2"
        shm = (
            "from multiprocessing import shared_memory as m; b=m.SharedMemory(create=True,size=9);"
        )
        assert await rig.text(lease, f"python3 -c '{shm} print(b.size); b.unlink()'") == "9"


async def test_sandboxes_share_nothing(rig: Rig) -> None:
    async with rig.lease() as one, rig.lease() as two:
        await rig.client.exec(
            one, "echo secret > /tmp/f; echo secret > /app/f; echo s > /dev/shm/f"
        )
        assert await rig.text(two, "cat /tmp/f /app/f /dev/shm/f 2>/dev/null") == ""


async def test_layers_and_image_environment_apply(rig_factory: RunRig, tmp_path: Path) -> None:
    layer = tmp_path / "layer"
    (layer / "usr/local/bin").mkdir(parents=True)
    (layer / "usr/local/bin/submit").write_text("#!/bin/sh\necho submitted $V\n")
    (layer / "usr/local/bin/submit").chmod(0o755)
    (layer / "app").mkdir()
    (layer / "app/data").write_text("from the layer")
    images = {"toy": ImageConfig(layers=(layer,), env={"V": "1"})}
    async with rig_factory(images=images) as rig, rig.lease("toy") as lease:
        assert await rig.text(lease, "submit; cat data; python -c 'print(3)'") == (
            "submitted 1\nfrom the layer3"
        )
        await rig.client.exec(lease, "echo changed > data")
        assert (layer / "app/data").read_text() == "from the layer"


async def test_a_root_file_system_is_a_base_too(rig_factory: RunRig, tmp_path: Path) -> None:
    root = tmp_path / "images" / "root"
    for source in Path("/bin/bash"), Path("/bin/ls"):
        copy_with_libraries(source, root)
    (root / "marker").write_text("own root")
    images = {"own": ImageConfig(base=str(root))}
    config = {"images": images, "rootfs_parents": [str(tmp_path / "images")]}
    async with rig_factory(**config) as rig:
        for image in ("own", f"rootfs:{root}"):
            async with rig.lease(image) as lease:
                assert await rig.text(lease, "echo $(</marker); echo x >/new; ls /usr") != ""
                assert "own root" in await rig.text(lease, "echo $(</marker)")
        assert not (root / "new").exists()
        for image in ("rootfs:/", f"rootfs:{root}/../../..", "rootfs:/usr"):
            with pytest.raises(InvalidRequestError, match="rootfs_parents"):
                await rig.client.acquire(image)


def copy_with_libraries(binary: Path, root: Path) -> None:
    """Copies a program and what ldd names into a root file system."""
    import re
    import shutil
    import subprocess

    listing = subprocess.run(["ldd", binary], capture_output=True, text=True, check=True).stdout
    for path in [str(binary), *re.findall(r"(/\S+)", listing)]:
        target = root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)


async def test_bad_acquires_are_named(rig: Rig) -> None:
    with pytest.raises(InvalidRequestError, match="unknown"):
        await rig.client.acquire("nope")
    with pytest.raises(InvalidRequestError, match="network"):
        await rig.client.acquire("host", network=True)
    with pytest.raises(InvalidRequestError, match="absolute"):
        await rig.client.acquire("host", workdir="app")
    assert (await rig.client.status()).num_active == 0


async def test_users_and_bad_commands(rig: Rig) -> None:
    async with rig.lease() as lease:
        assert await rig.text(lease, "id -u; echo $HOME", user="nobody") == "65534\n/nonexistent"
        assert await rig.text(lease, "id -u; id -g", user="1000:1001") == "1000\n1001"
        assert (await rig.client.exec(lease, "true", user="ghost")).exit_code == 126
        assert (await rig.client.exec(lease, "cat /etc/shadow; touch /x", user="nobody")).exit_code
        with pytest.raises(InvalidRequestError, match="131071"):
            await rig.client.exec(lease, "#" * 140_000)
        with pytest.raises(InvalidRequestError, match="NUL"):
            await rig.client.exec(lease, "a\0b")
        assert await rig.text(lease, "echo " + "x" * 100_000 + " | wc -c") == "100001"


async def test_a_dead_init_is_unavailable(rig: Rig) -> None:
    lease = await rig.client.acquire("host")
    sandbox = rig.broker.lease(lease.lease_id, lease.epoch).sandbox
    running = asyncio.create_task(rig.client.exec(lease, "sleep 60"))
    await asyncio.sleep(0.2)
    await sandbox._handle.kill(5)  # type: ignore[attr-defined]
    with pytest.raises(SandboxDiedError, match="init died"):
        await running
    with pytest.raises(SandboxDiedError, match="acquire a new one"):
        await rig.client.exec(lease, "true")
    assert await rig.client.release(lease)
