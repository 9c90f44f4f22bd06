"""host_access = True leaves Bazel's sandbox: the host's cgroups and network are seen."""

import os
import pathlib


def test_process_namespace_is_the_hosts() -> None:
    # In linux-sandbox the test's own tree starts at a small process id.
    assert pathlib.Path("/proc/1/cmdline").read_bytes().find(b"linux-sandbox") < 0


def test_cgroup_files_are_not_mounted_read_only() -> None:
    assert not os.statvfs("/sys/fs/cgroup").f_flag & os.ST_RDONLY
