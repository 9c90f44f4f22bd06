"""Where tensors live and which collective library joins the ranks: the only place that chooses.

Everything else asks `Device`: no other file of this package names "cuda", "cpu", "gloo" or
"nccl". Where no accelerator is visible, `enter()` also installs the CPU compatibility layer.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist


@dataclasses.dataclass(frozen=True)
class Device:
    """An accelerator or the CPU, with its collective backend."""

    type: str  # torch device type; ROCm's torch calls its devices "cuda" too
    backend: str  # torch.distributed backend
    collective_timeout_s: float = 600.0  # how long a collective waits for a rank

    @property
    def is_cpu(self) -> bool:
        """True when there is no accelerator."""
        return self.type == "cpu"

    @property
    def torch_device(self) -> torch.device:
        """The device of this rank's tensors."""
        import torch

        if self.is_cpu:
            return torch.device("cpu")
        return torch.device(self.type, int(os.environ.get("LOCAL_RANK", "0")))

    def host_buffer(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Memory of the host that a tensor of this device is copied to fast."""
        import torch

        return torch.empty(shape, dtype=dtype, pin_memory=not self.is_cpu)

    def synchronize(self) -> None:
        """Returns when all work that was given to the device is done."""
        import torch

        if not self.is_cpu:
            torch.cuda.synchronize(self.torch_device)

    def matmul_flops_per_s(self, dtype: torch.dtype) -> float:
        """What a matrix product reaches here: the best of a few tries; takes milliseconds."""
        import time

        import torch

        size, tries = (512, 5) if self.is_cpu else (8192, 20)
        factor = torch.ones(size, size, dtype=dtype, device=self.torch_device)
        best_s = float("inf")
        for _ in range(tries):
            begun = time.perf_counter()
            factor @ factor
            self.synchronize()
            best_s = min(best_s, time.perf_counter() - begun)
        return 2.0 * size**3 / best_s

    def host_group(self, timeout_s: float) -> dist.ProcessGroup | None:
        """All ranks, for what a thread of its own tells the others; None: there is one rank.

        Every rank calls it at the same time. Args: timeout_s is how long a rank may be waited for.
        """
        import torch.distributed as dist

        if dist.get_world_size() == 1:
            return None
        return dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_s))


def enter(num_threads: int, collective_timeout_s: float) -> Device:
    """Chooses the device of this process and joins the process group. Call once, first of all.

    Args:
      num_threads: torch's intra-op threads; matters on the CPU.
      collective_timeout_s: how long a collective may wait for a missing rank.
    """
    import torch
    import torch.distributed as dist

    if torch.cuda.is_available():
        device = Device("cuda", "nccl", collective_timeout_s)
        torch.cuda.set_device(device.torch_device)
    else:
        from trainer import cpu_compat

        device = Device("cpu", "gloo", collective_timeout_s)
        cpu_compat.install()
    torch.set_num_threads(num_threads)
    if not dist.is_initialized():
        timeout = datetime.timedelta(seconds=collective_timeout_s)
        if "RANK" in os.environ:  # under torchrun
            dist.init_process_group(device.backend, timeout=timeout)
        else:
            store = dist.HashStore()
            dist.init_process_group(
                device.backend, store=store, rank=0, world_size=1, timeout=timeout
            )
    return device


def rank() -> int:
    """This process's place among the ranks."""
    import torch.distributed as dist

    return dist.get_rank()


def team_store() -> dist.Store | None:
    """The process group's store, where ranks leave each other words; None: there is one rank."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_store

    return None if dist.get_world_size() == 1 else _get_default_store()


def leave() -> None:
    """Leaves the process group."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
