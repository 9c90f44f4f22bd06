"""Output caps, deadlines, memory and process limits, many at once. Needs root."""

from __future__ import annotations

import asyncio
import time

import pytest

from sandbox.client import CapacityError, StaleEpochError, UnknownLeaseError
from sandbox.conftest import Rig, RunRig


async def test_a_flood_is_cut_to_head_and_tail(rig: Rig) -> None:
    async with rig.lease() as lease:
        command = "echo first; head -c 300000000 /dev/zero; echo; echo last"
        started = time.monotonic()
        result = await rig.client.exec(lease, command, output_cap_bytes=1000, timeout_s=60)
        assert result.exit_code == 0 and time.monotonic() - started < 30
        assert result.stdout.startswith(b"first\n") and result.stdout.endswith(b"last\n")
        assert len(result.stdout) == 1000
        assert result.stdout_dropped_bytes == 6 + 300_000_000 + 1 + 5 - 1000


async def test_both_streams_are_drained_and_merged_in_order(rig: Rig) -> None:
    async with rig.lease() as lease:
        command = "for i in 1 2 3; do echo o$i; echo e$i >&2; done; head -c 3000000 /dev/zero >&2"
        result = await rig.client.exec(lease, command)
        assert result.stdout == b"o1\no2\no3\n" and result.stderr.startswith(b"e1\ne2\ne3\n")
        assert result.stderr_dropped_bytes == 3_000_009 - 2**16
        assert (await rig.text(lease, command)).startswith("o1\ne1\no2\ne2\no3\ne3")


async def test_a_timeout_kills_everything_daemons_too(rig: Rig) -> None:
    async with rig.lease() as lease:
        command = (
            "(setsid sh -c 'while :; do date +%N > /app/alive; sleep 0.05; done' &) ;"
            "trap '' TERM INT; sleep 100 & echo begun; sleep 100"
        )
        started = time.monotonic()
        result = await rig.client.exec(lease, command, timeout_s=0.5)
        assert result.timed_out and result.exit_code == 137 and result.stdout == b"begun\n"
        assert time.monotonic() - started < 3
        first = await rig.text(
            lease, "cat alive; sleep 0.3; cat alive; ls /proc | grep -c '^[0-9]'"
        )
        stamps = first.split()
        assert stamps[0] == stamps[1] and int(stamps[2]) <= 4
    assert (await rig.client.status()).counters["num_exec_timeouts"] == 1


async def test_a_cancelled_call_kills_its_command(rig: Rig) -> None:
    async with rig.lease() as lease:
        call = asyncio.create_task(rig.client.exec(lease, "sleep 100; echo no"))
        await asyncio.sleep(0.3)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await rig.text(lease, "ls /proc | grep -c '^[0-9]'") in ("3", "4")


async def test_background_processes_live_on_and_do_not_hold_the_reply(rig: Rig) -> None:
    async with rig.lease() as lease:
        started = time.monotonic()
        result = await rig.client.exec(lease, "sleep 1000 & echo done")
        assert result.stdout == b"done\n" and time.monotonic() - started < 2
        assert await rig.text(lease, "pgrep -c sleep") == "1"
        assert await rig.client.kill_processes(lease) == 1
        assert await rig.text(lease, "pgrep -c sleep") == "0"
        assert await rig.client.kill_processes(lease) == 0


async def test_kill_processes_ends_a_running_command(rig: Rig) -> None:
    async with rig.lease() as lease:
        call = asyncio.create_task(rig.client.exec(lease, "sleep 100 & sleep 100"))
        await asyncio.sleep(0.3)
        assert await rig.client.kill_processes(lease) == 3
        result = await call
        assert result.exit_code == 137 and not result.timed_out


async def test_zombies_are_reaped_and_orphans_do_not_hang(rig: Rig) -> None:
    async with rig.lease() as lease:
        await rig.client.exec(lease, "for i in $(seq 50); do (setsid true &) ; done")
        await asyncio.sleep(0.2)
        assert await rig.text(lease, "ls /proc | grep -c '^[0-9]'") in ("3", "4")


async def test_memory_beyond_the_limit_is_reported_as_oom(rig: Rig) -> None:
    async with rig.lease(memory_bytes=64 * 2**20) as lease:
        result = await rig.client.exec(lease, "python3 -c 'x = bytearray(400_000_000); print(1)'")
        assert result.oom_killed and result.exit_code == 137
        result = await rig.client.exec(lease, "echo fine")
        assert not result.oom_killed and result.stdout == b"fine\n"
    assert (await rig.client.status()).counters["num_oom_kills"] == 1


async def test_files_are_bounded(rig_factory: RunRig) -> None:
    async with rig_factory(disk_bytes=8 * 2**20) as rig, rig.lease() as lease:
        result = await rig.client.exec(lease, "head -c 20000000 /dev/zero > /tmp/big")
        assert result.exit_code != 0 and b"No space" in result.stderr
        assert await rig.text(lease, "rm /tmp/big; echo ok") == "ok"


async def test_a_fork_bomb_is_contained(rig: Rig) -> None:
    async with rig.lease(max_pids=40) as lease:
        result = await rig.client.exec(lease, ":(){ :|:& };:; sleep 30", timeout_s=2)
        assert result.timed_out or result.exit_code != 0
        await rig.client.kill_processes(lease)
        assert await rig.text(lease, "echo alive; ls /proc | grep -c '^[0-9]'") in (
            "alive\n3",
            "alive\n4",
        )


async def test_a_share_of_cpu_is_enforced(rig: Rig) -> None:
    async with rig.lease(cpu_cores=0.2) as lease:
        burn = "import time; e=time.time()+1\nwhile time.time()<e: pass\nprint(time.process_time())"
        assert float(await rig.text(lease, f"python3 -c '{burn}'")) < 0.5


async def test_forty_sandboxes_at_once(rig: Rig) -> None:
    async def one(index: int) -> str:
        async with rig.lease(holder=f"h{index}") as lease:
            await rig.client.exec(lease, f"echo {index} > id; sleep 0.2")
            return await rig.text(lease, "cat id")

    assert await asyncio.gather(*(one(i) for i in range(40))) == [str(i) for i in range(40)]
    status = await rig.client.status()
    assert status.num_active == 0 and status.counters["num_execs"] == 80
    assert status.counters["num_released"] == 40


async def test_an_unrenewed_lease_is_reaped_even_in_mid_command(rig_factory: RunRig) -> None:
    async with rig_factory(reap_interval_s=0.05) as rig:
        lease = await rig.client.acquire("host", ttl_s=0.5)
        with pytest.raises(UnknownLeaseError, match=lease.lease_id):
            await rig.client.exec(lease, "sleep 60")
        status = await rig.client.status(include_leases=True)
        assert status.counters["num_expired"] == 1 and status.leases == ()
        assert not await rig.client.release(lease)


async def test_a_renewed_lease_lives_and_a_stale_one_is_fenced(rig_factory: RunRig) -> None:
    async with rig_factory(reap_interval_s=0.05) as rig:
        lease = await rig.client.acquire("host", ttl_s=0.6)
        assert await rig.client.renew(lease, 60) > time.time() + 50
        await asyncio.sleep(0.9)
        assert await rig.text(lease, "echo still") == "still"
        stale = type(lease)(**{**vars(lease), "epoch": lease.epoch + 1})
        with pytest.raises(StaleEpochError):
            await rig.client.exec(stale, "true")
        with pytest.raises(StaleEpochError):
            await rig.client.release(stale)
        assert await rig.client.release(lease)


async def test_capacity_is_refused_at_the_callers_deadline(rig_factory: RunRig) -> None:
    async with rig_factory(capacity=1) as rig, rig.lease():
        with pytest.raises(CapacityError, match="capacity"):
            await rig.client.acquire("host", timeout_s=0.8)


async def test_commands_of_one_sandbox_wait_their_turn(rig: Rig) -> None:
    async with rig.lease() as lease:
        command = "mkdir lock && sleep 0.1 && rmdir lock"
        results = await asyncio.gather(*(rig.client.exec(lease, command) for _ in range(5)))
        assert [result.exit_code for result in results] == [0] * 5
