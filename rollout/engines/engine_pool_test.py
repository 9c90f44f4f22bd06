"""The pool over fake engines in real processes: starts, crashes, hangs, the bound, the end."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from pydantic import ValidationError

from rollout.engines.config import EngineConfig
from rollout.engines.cpu_launcher import share_cpus
from rollout.engines.engine_process import (
    TemporaryFolder,
    engine_environment,
    left_shared_memory,
    sweep_folders,
)
from rollout.engines.sglang_client import parse_metrics
from rollout.errors import NotFoundError


def children() -> list[int]:
    found = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    return [int(pid) for pid in found]


async def test_engines_start_and_report_their_load(make_fleet):
    fleet = await make_fleet()
    await fleet.wait_for("stale")
    engine = fleet.pool.engines["engine1"]
    await fleet.wait(lambda: engine.num_requests == 3)
    assert (engine.kv_usage, engine.num_running, engine.num_generated_tokens) == (0.25, 2, 40)
    assert (engine.weight_version, engine.num_restarts, engine.detail) == (0, 0, "")
    assert ("engine1", "starting") in fleet.history


async def test_a_crash_restarts_the_engine_and_keeps_its_counters_and_reason(make_fleet):
    fleet = await make_fleet()
    await fleet.wait_for("stale")
    engine = fleet.pool.engines["engine0"]
    await fleet.wait(lambda: engine.num_requests == 3)
    fleet.pool.set_state("engine0", "serving", engine.incarnation, 7)
    old_url = engine.url
    await fleet.fail("engine0", "/flush_cache", "die")
    with pytest.raises(Exception, match="engine engine0: /"):
        await fleet.pool.flush_cache()
    await fleet.wait(lambda: engine.num_restarts == 1)
    await fleet.wait_for("stale", "engine0")
    assert "exit code 3" in engine.detail
    assert "fake engine dies in /flush_cache" in engine.detail
    assert (engine.weight_version, engine.incarnation) == (0, 2)
    assert engine.url != old_url
    await fleet.wait(lambda: engine.num_requests == 6)
    assert fleet.pool.engines["engine1"].num_restarts == 0


async def test_a_decision_about_an_older_process_is_ignored(make_fleet):
    fleet = await make_fleet(num_engines=1)
    await fleet.wait_for("stale")
    fleet.pool.set_state("engine0", "serving", 0, 7)
    assert fleet.pool.engines["engine0"].state == "stale"


async def test_restarts_are_bounded(make_fleet):
    fleet = await make_fleet(num_engines=1, max_restarts=1, extra_flags=("--die-at-start",))
    await fleet.wait_for("failed")
    engine = fleet.pool.engines["engine0"]
    assert engine.num_restarts == 1
    assert "told to die at start" in engine.detail
    assert "engines.max_restarts" in engine.detail
    with pytest.raises(NotFoundError):
        fleet.pool.client("engine0")


async def test_an_interpreter_that_does_not_exist_fails_with_its_path(make_fleet):
    fleet = await make_fleet(num_engines=1, max_restarts=0, python=Path("/no/such/python"))
    await fleet.wait_for("failed")
    assert "/no/such/python" in fleet.pool.engines["engine0"].detail


async def test_a_silent_engine_is_restarted(make_fleet):
    fleet = await make_fleet(num_engines=1, health_timeout_s=0.3)
    await fleet.wait_for("stale")
    engine = fleet.pool.engines["engine0"]
    await fleet.fail("engine0", "/metrics", "hang")
    await fleet.wait(lambda: engine.num_restarts == 1)
    assert "answered no load poll" in engine.detail
    await fleet.wait_for("stale")


async def test_a_reported_failure_is_checked_first(make_fleet):
    fleet = await make_fleet(num_engines=1)
    await fleet.wait_for("stale")
    await fleet.pool.report_failure("engine0", "a gateway saw a reset connection")
    assert fleet.pool.engines["engine0"].state == "stale"


async def test_each_started_engine_is_frozen_once(make_fleet):
    fleet = await make_fleet(num_engines=1)
    await fleet.wait_for("stale")
    assert (await fleet.state("engine0"))["num_freezes"] == 1


async def test_flush_pauses_and_resumes(make_fleet):
    fleet = await make_fleet(num_engines=1)
    await fleet.wait_for("stale")
    await fleet.pool.flush_cache()
    state = await fleet.state("engine0")
    assert state["calls"] == ["/pause_generation", "/flush_cache", "/continue_generation"]
    await fleet.fail("engine0", "/flush_cache", "error")
    with pytest.raises(Exception, match="status 400"):
        await fleet.pool.flush_cache()
    assert not (await fleet.state("engine0"))["is_paused"]


async def test_close_leaves_no_process_and_no_folder(make_fleet):
    fleet = await make_fleet()
    await fleet.wait_for("stale")
    assert len(children()) >= 2
    # Ours are those whose lock we hold; other runs on this machine have folders of their own.
    open_files = [
        os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()
    ]
    folders = [Path(name).parent for name in open_files if name.startswith("/tmp/swe_rl_engine_")]
    assert folders
    await fleet.pool.close()
    assert not children()
    assert not [folder for folder in folders if folder.exists()]


def test_folders_of_killed_owners_are_swept():
    mine = TemporaryFolder()
    script = """
        import os, signal
        from rollout.engines.engine_process import TemporaryFolder
        folder = TemporaryFolder()
        semaphore = f"/dev/shm/sem.{folder.path.name}-abc"  # as multiprocessing makes them
        open(semaphore, "w").close()
        queue = f"/dev/shm/sgl_shm_{folder.path.name}-mq-1"  # as cpu_shim names them
        open(queue, "w").close()
        print(folder.path, semaphore, queue, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    command = [sys.executable, "-P", "-c", textwrap.dedent(script)]
    told = subprocess.run(command, capture_output=True, text=True).stdout.split()
    left, semaphore, queue = map(Path, told)
    assert left.is_dir()
    foreign = Path(f"/dev/shm/sem.mp-foreign{os.getpid()}")  # another program's; none maps it here
    foreign.touch()
    assert sweep_folders() >= 1
    assert not left.exists()
    assert not semaphore.exists()
    assert not queue.exists()
    assert foreign.exists()
    foreign.unlink()
    assert mine.path.is_dir()
    mine.close()
    assert not mine.path.exists()


def test_semaphores_tell_whose_they_are():
    folder = TemporaryFolder()
    script = """
        import multiprocessing
        from rollout.engines.cpu_launcher import name_semaphores
        from rollout.engines.engine_process import left_shared_memory
        from pathlib import Path
        def child(lock, folder):
            name_semaphores()
            more = multiprocessing.get_context("spawn").Lock()
            assert len(left_shared_memory(Path(folder))) == 2, left_shared_memory(Path(folder))
        if __name__ == "__main__":
            import sys
            name_semaphores()
            context = multiprocessing.get_context("spawn")
            lock = context.Lock()
            process = context.Process(target=child, args=(lock, sys.argv[1]))
            process.start()
            process.join()
            sys.exit(process.exitcode)
    """
    program = folder.path / "program.py"
    program.write_text(textwrap.dedent(script))
    config = EngineConfig(python=Path(sys.executable), model_path=Path("/m"))
    environment = engine_environment(config, os.environ | {"PYTHONPATH": os.getcwd()}, folder.path)
    command = [sys.executable, str(program), str(folder.path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not left_shared_memory(folder.path)
    folder.close()


def test_the_launcher_explains_itself_without_torch():
    script = (
        "import sys, runpy; sys.argv = ['x', '--help']\n"
        "try: runpy.run_module('rollout.engines.cpu_launcher', run_name='__main__')\n"
        "except SystemExit as e: assert e.code == 0, e.code\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "SGLang" in done.stdout


@pytest.mark.parametrize(
    ("num_ranks", "cpus", "shares"),
    [
        (2, [0, 1], "0|1"),
        (2, [0, 1, 4, 5], "0,4|1,5"),
        (3, [2, 7], "2|7|2"),
        (1, [0, 1], "0,1"),
    ],
)
def test_ranks_share_the_cpus(num_ranks, cpus, shares):
    assert share_cpus(num_ranks, cpus) == shares


def test_metrics_that_are_missing_count_as_zero():
    assert parse_metrics("# nothing\nother_metric 5\n").num_requests == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_policy": "none"}, "'flush' or 'keep'"),
        ({"num_engines": 2, "ports": (1,)}, "1 entries"),
        ({"num_engines": 2, "ports": (9, 9)}, "twice"),
        ({"max_total_tokens": 10}, "context_length"),
        ({"python": Path("python3")}, "absolute"),
        ({"colour": "red"}, "colour"),
    ],
    ids=[
        "kv_policy",
        "too_few_ports",
        "same_port",
        "small_budget",
        "relative_python",
        "unknown_key",
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        EngineConfig(**{"python": Path("/p"), "model_path": Path("/m"), **settings})
