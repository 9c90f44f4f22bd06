"""Lets megatron-core run where torch sees no accelerator.

megatron-core asks `torch.cuda` for devices, streams and random states without asking whether
there are any. `install` answers those questions with CPU equivalents. It changes torch for the
whole process, so only the entry of the trainer process (and of its tests) calls it, through
`device.enter`, before megatron is imported. It does nothing where an accelerator is visible.

Invariant: no value changes, only places and formats. A tensor that megatron would have put on
an accelerator is the same tensor on the CPU.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from typing import Any

_installed = False

_FACTORIES = (
    "tensor",
    "zeros",
    "ones",
    "empty",
    "full",
    "arange",
    "rand",
    "randn",
    "zeros_like",
    "ones_like",
    "empty_like",
    "full_like",
    "as_tensor",
)


class _Stream:
    """A stream whose work is done as soon as it is submitted."""

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        pass

    def wait_stream(self, _other: object) -> None:
        """Returns at once: there is nothing to wait for."""

    def wait_event(self, _event: object) -> None:
        """Returns at once."""

    def synchronize(self) -> None:
        """Returns at once."""

    def record_event(self, *_args: object) -> _Event:
        """Returns an event that has happened."""
        return _Event()

    def query(self) -> bool:
        """True: all work is done."""
        return True


class _Event(_Stream):
    """An event that has happened."""

    def record(self, *_args: object) -> None:
        """Does nothing."""

    def wait(self, *_args: object) -> None:
        """Returns at once."""

    def elapsed_time(self, _other: object) -> float:
        """Zero: CPU code is timed by the caller's clock."""
        return 0.0


class _Generators:
    """`torch.cuda.default_generators`: the CPU's generator under every index."""

    def __getitem__(self, _index: int) -> Any:
        import torch

        return torch.default_generator

    def __len__(self) -> int:
        return 1


def install() -> None:
    """Answers megatron-core's questions to torch.cuda on the CPU. Idempotent."""
    global _installed
    import torch

    if _installed or torch.cuda.is_available():
        return
    _installed = True
    # torch.compile of tiny fusions costs more than it saves here, and needs a compiler.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    _install_devices_and_streams()
    _install_random()
    _install_tensor_moves()
    _patch_megatron()


def _install_devices_and_streams() -> None:
    import torch

    cuda: Any = torch.cuda
    # megatron passes current_device() as `device=` everywhere.
    cuda.current_device = lambda: torch.device("cpu")
    cuda.set_device = lambda *_: None
    cuda.device_count = lambda: 1
    cuda.synchronize = lambda *_: None
    cuda.empty_cache = lambda: None
    cuda.Stream = _Stream
    cuda.Event = _Event
    cuda.current_stream = lambda *_: _Stream()
    cuda.default_stream = lambda *_: _Stream()
    cuda.stream = lambda *_: contextlib.nullcontext()
    cuda.nvtx.range_push = lambda *_: None
    cuda.nvtx.range_pop = lambda *_: None


def _install_random() -> None:
    import torch

    cuda: Any = torch.cuda
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda.random.get_rng_state = cuda.get_rng_state
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(int(seed))
    cuda.manual_seed_all = lambda _seed: None
    cuda.default_generators = _Generators()
    cuda._lazy_call = lambda function, **_: function()
    cuda._lazy_init = lambda: None


def _names_cuda(device: object) -> bool:
    import torch

    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
            kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return wrapped


def _install_tensor_moves() -> None:
    import torch

    tensor: Any = torch.Tensor
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    tensor.cuda = lambda self, *_, **__: self
    tensor.record_stream = lambda *_: None
    module: Any = torch.nn.Module
    module.cuda = lambda self, *_, **__: self
    original_to = tensor.to
    original_type = tensor.type

    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args and _names_cuda(args[0]):
            args = ("cpu", *args[1:])
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return original_to(self, *args, **kwargs)

    def type_(self: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        # The optimizers compare this name with 'torch.cuda.FloatTensor'.
        if dtype is None:
            return original_type(self).replace("torch.", "torch.cuda.", 1)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.")
        return original_type(self, dtype, *args, **kwargs)

    tensor.to = to
    tensor.type = type_


def _patch_megatron() -> None:
    """Mends the one place that tests a tensor's `is_cuda` instead of asking torch.cuda."""
    import torch
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def maybe_move_tensor_to_cpu(
        tensor: Any, as_numpy: bool = False, record_stream: bool = False
    ) -> Any:
        del record_stream
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    patched: Any = maybe_move_tensor_to_cpu
    moe_utils.maybe_move_tensor_to_cpu = patched
    token_dispatcher.maybe_move_tensor_to_cpu = patched
