"""Cgroup planning for both versions, as pure functions, and sweeping."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sandbox.backends.base import SandboxLimits
from sandbox.backends.cgroup import (
    broker_name,
    limit_writes,
    oom_kills_in,
    owner_is_dead,
    plan_cgroups,
    process_start_ticks,
)
from sandbox.errors import BackendSetupError

_HYBRID = """\
tmpfs /sys/fs/cgroup tmpfs rw 0 0
cgroup /sys/fs/cgroup/memory cgroup rw,relatime,memory 0 0
cgroup /sys/fs/cgroup/pids cgroup rw,relatime,pids 0 0
cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,relatime,cpu,cpuacct 0 0
cgroup2 /sys/fs/cgroup/unified cgroup2 rw,relatime 0 0
"""
_UNIFIED = "cgroup2 /sys/fs/cgroup cgroup2 rw,relatime 0 0\n"
_OWN = "5:cpu,cpuacct:/svc\n4:memory:/jobs/a\n3:pids:/\n0::/\n"


def test_hybrid_hosts_use_version_1_below_the_brokers_own_cgroups() -> None:
    plan = plan_cgroups(_HYBRID, _OWN, lambda _: "hugetlb", "", "swe_rl-1-2-x")
    assert plan.version == 1 and plan.enable == ()
    assert plan.directories == {
        "memory": Path("/sys/fs/cgroup/memory/jobs/a/swe_rl-1-2-x"),
        "pids": Path("/sys/fs/cgroup/pids/swe_rl-1-2-x"),
        "cpu": Path("/sys/fs/cgroup/cpu,cpuacct/svc/swe_rl-1-2-x"),
    }


def test_version_1_takes_a_given_parent_in_each_hierarchy() -> None:
    plan = plan_cgroups(_HYBRID, _OWN, lambda _: "", "/batch", "n")
    assert plan.directories["memory"] == Path("/sys/fs/cgroup/memory/batch/n")
    assert plan.directories["pids"] == Path("/sys/fs/cgroup/pids/batch/n")


def test_unified_hosts_use_one_directory_and_enable_controllers_down_to_it() -> None:
    plan = plan_cgroups(_UNIFIED, "0::/\n", lambda _: "cpu memory pids io", "/a/b", "n")
    root = Path("/sys/fs/cgroup")
    assert plan.version == 2
    assert set(plan.directories.values()) == {root / "a/b/n"}
    assert set(plan.directories) == {"memory", "pids", "cpu"}
    assert plan.enable == (root, root / "a", root / "a/b", root / "a/b/n")


def test_a_host_without_controllers_is_told_what_to_do() -> None:
    with pytest.raises(BackendSetupError, match="cgroups=false"):
        plan_cgroups(_UNIFIED, "0::/\n", lambda _: "cpu", "", "n")


@pytest.mark.parametrize(
    ("version", "cores", "want"),
    [
        (1, 0.0, {"memory.limit_in_bytes": "1000", "pids.max": "11", "cpu.cfs_quota_us": "-1"}),
        (1, 1.5, {"cpu.cfs_quota_us": "150000", "memory.memsw.limit_in_bytes?": "1000"}),
        (2, 0.0, {"memory.max": "1000", "pids.max": "11", "cpu.max": "max 100000"}),
        (2, 0.5, {"cpu.max": "50000 100000", "memory.swap.max?": "0"}),
    ],
    ids=["v1", "v1-cpu", "v2", "v2-cpu"],
)
def test_limits_become_writes(version: int, cores: float, want: dict[str, str]) -> None:
    writes = limit_writes(version, SandboxLimits(1000, 10, cores))
    assert want.items() <= {name: value for _, name, value in writes}.items()


@pytest.mark.parametrize(
    "events",
    ["oom_kill_disable 0\nunder_oom 0\noom_kill 3\n", "low 0\nmax 9\noom 4\noom_kill 3\n"],
    ids=["v1", "v2"],
)
def test_the_oom_counter_is_read_from_either_version(events: str) -> None:
    assert oom_kills_in(events) == 3
    assert oom_kills_in("low 0\n") == 0


def test_only_names_of_dead_brokers_are_swept() -> None:
    pid = os.getpid()
    ticks = process_start_ticks(pid)
    assert ticks is not None
    assert not owner_is_dead(broker_name(pid, ticks, "x"), process_start_ticks)
    assert owner_is_dead(broker_name(pid, ticks + 1, "x"), process_start_ticks)  # pid used again
    assert owner_is_dead(broker_name(2**22 + 1, 5, "x"), process_start_ticks)
    assert not owner_is_dead("swe_rl-data", process_start_ticks)
