"""What SGLang needs before it runs on a machine without an accelerator.

Purpose: stand-ins for native packages that exist only for GPUs, and hooks through SGLang's
own plugin interface. Owner: rollout/engines/cpu_launcher.py, which calls `install` in the
server and in every child that the server spawns.

Invariants: nothing is replaced that the environment really has; a stand-in that is called
raises; imports of torch and sglang happen inside functions only.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import logging
import os
import platform
import secrets
import sys
import tempfile
import types
from collections.abc import Callable, Iterable
from typing import Any

logger = logging.getLogger(__name__)

_libraries: list[Any] = []  # torch.library.Library objects undo themselves when collected


class _SglKernel(types.ModuleType):
    """A `sgl_kernel` whose functions exist and raise when called."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*_args: Any, **_kwargs: Any) -> Any:
            raise NotImplementedError(
                f"sgl_kernel.{name} was called, which has no stand-in on CPU; "
                "choose torch_native / pytorch backends in the engine's flags"
            )

        return missing


class _PluginDistribution(importlib.metadata.Distribution):
    """An in-memory distribution that offers `plugin` to SGLang's entry-point group."""

    def read_text(self, filename: str) -> str | None:
        return {
            "METADATA": "Metadata-Version: 2.1\nName: swe-rl-cpu-shim\nVersion: 0\n",
            "entry_points.txt": f"[sglang.srt.plugins]\nswe_rl_cpu = {__name__}:plugin\n",
        }.get(filename)

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(path)


class _PluginFinder(importlib.metadata.DistributionFinder):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        return None

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterable[importlib.metadata.Distribution]:
        name = context.name if context else None
        return [_PluginDistribution()] if name in (None, "swe-rl-cpu-shim") else []


def install() -> None:
    """Puts every stand-in in place. Call once, before the first import of sglang."""
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    sys.meta_path.append(_PluginFinder())
    _install_triton()
    _install_sgl_kernel()
    _declare_torchvision_ops()


def plugin() -> None:
    """Hooks that SGLang applies early in each of its processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    # Load figures otherwise stay behind in /dev/shm when an engine is killed; the pool
    # removes the engine's temporary folder whole.
    HookRegistry.register(
        "sglang.srt.managers.load_snapshot.shm_path_for", _load_figures_path, HookType.REPLACE
    )
    # So do the queues between tensor-parallel ranks: the pool knows its own by their name.
    HookRegistry.register(
        "sglang.srt.distributed.device_communicators.shm_broadcast.make_shm_name",
        _shared_memory_name,
        HookType.REPLACE,
    )
    # SGLang's Qwen3-MoE model has an output head of its own even where the configuration ties
    # it to the embedding, and a file of tied weights has none: it would stay zero.
    HookRegistry.register(
        "sglang.srt.model_loader.loader.DefaultModelLoader.load_weights_and_postprocess",
        _with_tied_head,
        HookType.AROUND,
    )
    # Routed experts are kept in host memory that is registered with an accelerator.
    HookRegistry.register(
        "sglang.srt.mem_cache.pool_host.common.alloc_with_host_register",
        _plain_host_memory,
        HookType.REPLACE,
    )
    # A payload that cannot be read must fail the call, not the scheduler.
    HookRegistry.register(
        "sglang.srt.managers.scheduler_components.weight_updater."
        "SchedulerWeightUpdaterManager.update_weights_from_tensor",
        _refuse_instead_of_dying,
        HookType.AROUND,
    )


def _load_figures_path(ipc_name: str) -> str:
    name = "".join(c if c.isalnum() else "_" for c in os.path.basename(ipc_name))
    return os.path.join(tempfile.gettempdir(), f"loads_{name}")


def _shared_memory_name(kind: str) -> str:
    folder = os.path.basename(tempfile.gettempdir())
    return f"sgl_shm_{folder}-{kind}-{secrets.token_hex(4)}"


def _plain_host_memory(
    dims: Any, dtype: Any, device: str, pin_memory: bool, allocator: Any, *_: Any
) -> Any:
    import torch

    del device, pin_memory, allocator
    return torch.empty(dims, dtype=dtype)


def _with_tied_head(
    original: Callable[..., Any], model: Any, weights: Iterable[tuple[str, Any]], device: Any
) -> Any:
    def filled() -> Iterable[tuple[str, Any]]:
        for name, tensor in weights:
            yield name, tensor
            if name == "model.embed_tokens.weight":
                yield "lm_head.weight", tensor

    is_tied = getattr(getattr(model, "config", None), "tie_word_embeddings", False)
    return original(model, filled() if is_tied and hasattr(model, "lm_head") else weights, device)


def _refuse_instead_of_dying(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqOutput

    try:
        return original(*args, **kwargs)
    except Exception as error:  # any loader or payload error: the window decides what follows
        logger.exception("weight update call failed")
        return UpdateWeightsFromTensorReqOutput(
            success=False, message=f"{type(error).__name__}: {error}"
        )


def _install_triton() -> None:
    """Uses the triton stub that SGLang ships for another platform without triton."""
    if importlib.util.find_spec("triton") is not None:
        return
    import torch

    package = importlib.util.find_spec("sglang")
    if package is None or not package.submodule_search_locations:
        raise RuntimeError("sglang is not installed: run this with the engine interpreter")
    path = os.path.join(package.submodule_search_locations[0], "_platform_stubs.py")
    spec = importlib.util.spec_from_file_location("_sglang_platform_stubs", path)
    if spec is None or spec.loader is None:
        raise RuntimeError(f"cannot load {path}: is this sglang 0.5.23?")
    stubs = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = stubs
    spec.loader.exec_module(stubs)
    stubs._patch_non_blocking = lambda: None  # type: ignore[attr-defined]
    # install_platform_stubs acts on one platform only; it believes to be there for one call.
    saved = sys.platform, platform.machine, torch.backends.mps.is_available
    sys.platform = "darwin"
    platform.machine = lambda: "arm64"
    torch.backends.mps.is_available = lambda: True
    try:
        stubs.install_platform_stubs()
    finally:
        sys.platform, platform.machine, torch.backends.mps.is_available = saved


def _install_sgl_kernel() -> None:
    if importlib.util.find_spec("sgl_kernel") is not None:
        return
    module = _SglKernel("sgl_kernel")
    module.__spec__ = importlib.machinery.ModuleSpec("sgl_kernel", None, is_package=True)
    module.__path__ = []
    sys.modules["sgl_kernel"] = module


def _declare_torchvision_ops() -> None:
    """Declares ops of torchvision's native library, which does not load beside CPU torch."""
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for op in ("nms", "qnms"):
        try:
            library.define(f"{op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        except RuntimeError:  # the real library did load
            return
    _libraries.append(library)
