"""The broker as a process: start, SIGTERM, kill -9, bad configuration; nothing is left. Needs root."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from proto import serving
from sandbox.client import AcquiredLease, SandboxClient
from sandbox.conftest import RunRig

_CGROUPS = Path("/sys/fs/cgroup")


def leftovers(state_dir: Path, pid: int) -> list[str]:
    """Processes, cgroups, directories and mounts that carry a broker's name."""
    found = [str(path) for path in state_dir.glob(f"swe_rl-{pid}-*")]
    for directory, names, _ in os.walk(_CGROUPS):
        found += [f"{directory}/{name}" for name in names if name.startswith(f"swe_rl-{pid}-")]
    found += [
        line for line in Path("/proc/mounts").read_text().splitlines() if str(state_dir) in line
    ]
    for status in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(state_dir).encode() in status.read_bytes():
                found.append(str(status))
        except OSError:
            continue
    return found


def wait_for(condition: Callable[[], bool], timeout_s: float = 10) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "condition not met in time"
        time.sleep(0.02)


class BrokerProcess:
    """`python -m sandbox.server` with its own state directory."""

    def __init__(self, tmp_path: Path, binary: Path, config: str = "") -> None:
        self.state_dir = tmp_path / "state"
        self.state_dir.mkdir(exist_ok=True)
        path = tmp_path / "broker.json"
        path.write_text(config or f'{{"state_dir": "{self.state_dir}", "init_binary": "{binary}"}}')
        self.address_file = tmp_path / "address"
        self.address_file.unlink(missing_ok=True)
        command = [sys.executable, "-P", "-m", "sandbox.server", "--config", str(path)]
        self.process = subprocess.Popen(
            [*command, "--address-file", str(self.address_file)], stderr=subprocess.PIPE, text=True
        )

    @property
    def address(self) -> str:
        wait_for(lambda: self.address_file.exists() or self.process.poll() is not None)
        assert self.process.poll() is None, self.process.stderr and self.process.stderr.read()
        return self.address_file.read_text().strip()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stderr is not None:
            self.process.stderr.close()


@pytest.fixture
def start(tmp_path: Path, sandbox_init: Path) -> Iterator[Callable[..., BrokerProcess]]:
    started: list[BrokerProcess] = []

    def begin(config: str = "") -> BrokerProcess:
        started.append(BrokerProcess(tmp_path, sandbox_init, config))
        return started[-1]

    yield begin
    for broker in started:
        broker.end()


async def occupy(address: str) -> AcquiredLease:
    """Leases two sandboxes, one with daemons and one in mid-command."""
    async with serving.dial(address) as channel:
        client = SandboxClient(channel)
        one, two = [await client.acquire("host", timeout_s=20) for _ in range(2)]
        await client.exec(one, "setsid sleep 4321 & setsid sleep 4321 & true")
        asyncio.get_running_loop().create_task(client.exec(two, "sleep 4321"))
        await asyncio.sleep(0.3)
        return one


def sleepers() -> int:
    count = 0
    for cmdline in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            count += cmdline.read_bytes() == b"sleep\x004321\x00"
        except OSError:
            continue
    return count


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["term", "int"])
def test_a_signal_drains_and_leaves_nothing(
    start: Callable[..., BrokerProcess], number: signal.Signals
) -> None:
    broker = start("")
    asyncio.run(occupy(broker.address))
    assert sleepers() >= 2
    broker.process.send_signal(number)
    assert broker.process.wait(20) == 0
    wait_for(lambda: sleepers() == 0)
    assert leftovers(broker.state_dir, broker.process.pid) == []


def test_after_kill_9_sandboxes_die_and_the_next_broker_sweeps(
    start: Callable[..., BrokerProcess],
) -> None:
    broker = start()
    asyncio.run(occupy(broker.address))
    broker.process.kill()
    broker.process.wait()
    wait_for(lambda: sleepers() == 0)
    assert leftovers(broker.state_dir, broker.process.pid) != []  # directories, empty cgroups
    following = start()
    assert following.address
    assert leftovers(broker.state_dir, broker.process.pid) == [
        entry
        for entry in leftovers(broker.state_dir, broker.process.pid)
        if f"swe_rl-{following.process.pid}-" in entry or "cmdline" in entry
    ]
    following.process.terminate()
    assert following.process.wait(20) == 0
    assert leftovers(broker.state_dir, broker.process.pid) == []


def test_a_sweep_removes_what_a_killed_broker_left(start: Callable[..., BrokerProcess]) -> None:
    broker = start()
    asyncio.run(occupy(broker.address))
    broker.process.kill()
    broker.process.wait()
    wait_for(lambda: sleepers() == 0)
    assert leftovers(broker.state_dir, broker.process.pid) != []
    config = broker.state_dir / "sweep.json"
    config.write_text(f'{{"state_dir": "{broker.state_dir}"}}')
    command = [sys.executable, "-P", "-m", "sandbox.server", "--config", str(config), "--sweep"]
    assert subprocess.run(command, timeout=30, check=False).returncode == 0
    config.unlink()
    assert leftovers(broker.state_dir, broker.process.pid) == []


async def test_release_and_expiry_leave_nothing(rig_factory: RunRig, tmp_path: Path) -> None:
    async with rig_factory(state_dir=tmp_path, reap_interval_s=0.05) as rig:
        released = [await rig.client.acquire("host") for _ in range(3)]
        await rig.client.acquire("host", ttl_s=0.2)
        for lease in released:
            await rig.client.exec(lease, "setsid sleep 4321 & head -c 1000000 /dev/zero > f")
            await rig.client.release(lease)
        await asyncio.sleep(0.5)
        status = await rig.client.status()
        assert status.num_active == 0 and status.counters["num_expired"] == 1
        assert sleepers() == 0
        for directory, _, _ in os.walk(_CGROUPS):
            path = Path(directory)
            assert not (path.name.startswith("sandbox-") and f"-{os.getpid()}-" in path.parent.name)
        fds = len(os.listdir("/proc/self/fd"))
        for _ in range(5):
            lease = await rig.client.acquire("host")
            await rig.client.exec(lease, "true")
            await rig.client.download(lease, "/etc")
            await rig.client.release(lease)
        assert len(os.listdir("/proc/self/fd")) <= fds
    assert leftovers(tmp_path, os.getpid()) == []


async def test_a_dead_zygote_is_replaced(rig_factory: RunRig) -> None:
    async with rig_factory() as rig:
        await rig.client.acquire("host")
        rig.broker.backend._zygote._process.kill()  # type: ignore[attr-defined]
        rig.broker.backend._zygote._process.wait()  # type: ignore[attr-defined]
        lease = await rig.client.acquire("host")
        assert await rig.text(lease, "echo again") == "again"


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ('{"capacityy": 3}', "capacityy"),
        ('{"capacity": "many"}', "capacity"),
        ('{"init_binary": "/nowhere/sandbox_init"}', "/nowhere/sandbox_init"),
        (
            '{"images": {"x": {"layers": ["/nowhere/layer"]}}, "init_binary": "BINARY"}',
            "/nowhere/layer",
        ),
        ('{"images": {"x": {"base": "debian"}}}', "debian"),
    ],
    ids=["unknown-key", "wrong-type", "no-binary", "no-layer", "bad-base"],
)
def test_bad_configuration_is_one_line(
    start: Callable[..., BrokerProcess], sandbox_init: Path, config: str, wanted: str
) -> None:
    broker = start(config.replace("BINARY", str(sandbox_init)))
    assert broker.process.wait(20) == 2
    assert broker.process.stderr is not None
    error = broker.process.stderr.read()
    assert wanted in error and "Traceback" not in error
    assert [line for line in error.splitlines() if line.startswith("error: ")] != []


def test_a_taken_port_is_one_line(start: Callable[..., BrokerProcess], sandbox_init: Path) -> None:
    address = start().address
    command = [sys.executable, "-P", "-m", "sandbox.server", "--listen", address]
    config = start().state_dir.parent / "broker.json"
    done = subprocess.run(
        [*command, "--config", str(config)], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "in use" in done.stderr
