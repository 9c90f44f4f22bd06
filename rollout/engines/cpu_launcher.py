"""Starts the real SGLang server on a machine without an accelerator.

Purpose: `ENGINE_PY -P -m rollout.engines.cpu_launcher SGLANG_FLAGS...`; flags are those of
`sglang serve`, with the CPU's own added here. Owner: EnginePool starts and ends it.

Invariants: SGLang spawns its workers, and multiprocessing runs this module again in each of
them under the name `__mp_main__`, so that the stand-ins of cpu_shim are there as well. Each
process dies with the one that started it.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
from typing import Any

CPU_FLAGS = (
    "--device=cpu",
    "--attention-backend=torch_native",
    "--sampling-backend=pytorch",
    "--disable-overlap-schedule",
    "--disable-cuda-graph",
    "--skip-server-warmup",
    "--sleep-on-idle",
)

_RANK_CPUS = "SGLANG_CPU_OMP_THREADS_BIND"

SEMAPHORE_PREFIX = "SWE_RL_SEMAPHORE_PREFIX"
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Asks the kernel to kill this process when the one that started it ends."""
    parent = os.getppid()
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it ended before the call above
        os._exit(1)


def name_semaphores() -> None:
    """Begins the names of multiprocessing's semaphores as the engine pool asks, so that it knows
    whose they are should this process be killed before it removes them.
    """
    from multiprocessing import process

    if prefix := os.environ.get(SEMAPHORE_PREFIX):
        current: Any = process.current_process()
        current._config["semprefix"] = prefix  # there is no public setting


def share_cpus(num_ranks: int, cpus: list[int]) -> str:
    """CPUs of each tensor-parallel rank as SGLang reads them, `0,2|1,3`; ranks beyond the number of
    CPUs share them.
    """
    shares = [cpus[rank::num_ranks] or [cpus[rank % len(cpus)]] for rank in range(num_ranks)]
    return "|".join(",".join(map(str, share)) for share in shares)


def _num_ranks(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--tp-size", type=int, default=1)
    return int(parser.parse_known_args(arguments)[0].tp_size)


def main(arguments: list[str]) -> None:
    """Runs the server until it is ended; `arguments` are SGLang's flags."""
    import runpy

    # SGLang gives each rank a NUMA node by itself, and stops where there are fewer.
    if (num_ranks := _num_ranks(arguments)) > 1:
        os.environ.setdefault(_RANK_CPUS, share_cpus(num_ranks, sorted(os.sched_getaffinity(0))))
    sys.argv = ["sglang.launch_server", *CPU_FLAGS, *arguments]
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=False)


if __name__ == "__main__" and {"-h", "--help"} & set(sys.argv[1:]):
    print(__doc__)
    sys.exit(0)
if __name__ in ("__main__", "__mp_main__"):
    # The one place where an import does work: spawned children have no other entry.
    die_with_parent()
    from rollout.engines import cpu_shim

    cpu_shim.install()
    name_semaphores()
if __name__ == "__main__":
    main(sys.argv[1:])
