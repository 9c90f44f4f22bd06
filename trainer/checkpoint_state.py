"""What a checkpoint holds: model, optimizer and random state, in megatron's sharded form.

Another grid can load it. Owner: the trainer's main thread; of several ranks all take part.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from trainer.checkpoint import Checkpoint
from trainer.step import Learner

SHARDING = "fully_reshardable"
"""megatron's name for optimizer state that any grid can load."""


def load_model(learner: Learner, checkpoint: Checkpoint) -> None:
    """Loads the weights and the random state, not the optimizer."""
    _load(learner, checkpoint, with_optimizer=False)


def load_all(learner: Learner, checkpoint: Checkpoint) -> None:
    """Loads weights, random state and optimizer; `begin_stage` of the same stage comes first."""
    _load(learner, checkpoint, with_optimizer=checkpoint.has_optimizer)


def has_optimizer(learner: Learner) -> bool:
    """megatron cannot save an optimizer that has taken no step yet."""
    if learner.optimizer is None:
        return False
    return all(bool(o.optimizer.state) for o in _optimizers(learner))


def sharded_state(learner: Learner, loading: bool, with_optimizer: bool) -> dict[str, Any]:
    """megatron's sharded state dict. Its tensors are the live ones; what data-parallel ranks share is
    gathered into copies.
    """
    _keep_adam_step()
    metadata = {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "distrib_optim_sharding_type": SHARDING,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }
    model = learner.policy.module.sharded_state_dict(metadata=metadata)
    state: dict[str, Any] = {"model": model, "random": {"torch": torch.get_rng_state()}}
    if with_optimizer:
        with contextlib.nullcontext() if loading else _as_it_lies(learner):
            state["optimizer"] = learner.optimizer.sharded_state_dict(
                model, is_loading=loading, metadata=metadata
            )
    return state


@contextlib.contextmanager
def _as_it_lies(learner: Learner) -> Iterator[None]:
    """Lets megatron name optimizer state where it lies, if no other rank has a part of it.

    megatron copies it four times and collects garbage, which is most of the time that training
    would stand still for a save.
    """
    alone = [o for o in _optimizers(learner) if o.data_parallel_group.size() == 1]
    for optimizer in alone:
        optimizer.get_parameter_state_dp_zero = functools.partial(_live_state, optimizer)
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        for optimizer in alone:
            del optimizer.get_parameter_state_dp_zero


class _Slices:
    """One kind of state of a buffer's parameters, as if it lay in one tensor."""

    def __init__(self) -> None:
        self.by_start: dict[int, torch.Tensor] = {}

    def __getitem__(self, where: slice) -> torch.Tensor:
        return self.by_start[where.start]


def _live_state(optimizer: Any, **_: Any) -> dict[Any, Any]:
    """What get_parameter_state_dp_zero returns, without a copy."""
    state: dict[Any, Any] = {"buckets_coalesced": True}
    for index, ranges in enumerate(optimizer.gbuf_ranges):
        (dtype,) = ranges
        buffer = optimizer.buffers[index]
        kinds = {key: _Slices() for key in ("param", *optimizer.optimizer_state_keys)}
        for param, (start, _end, _bucket) in buffer.param_index_map.items():
            tensors = optimizer._get_main_param_and_optimizer_states(param)
            for key, slices in kinds.items():
                slices.by_start[start] = tensors[key].detach()
        state[index] = {dtype: {**kinds, "numel_unpadded": buffer.numel_unpadded}}
    return state


def _optimizers(learner: Learner) -> list[Any]:
    return list(getattr(learner.optimizer, "chained_optimizers", [learner.optimizer]))


def _load(learner: Learner, checkpoint: Checkpoint, with_optimizer: bool) -> None:
    if with_optimizer:
        for optimizer in _optimizers(learner):
            # megatron loads into existing state only; these values are overwritten.
            optimizer._init_optimizer_states_with_dummy_values()
    loaded = dist_checkpointing.load(
        sharded_state(learner, loading=True, with_optimizer=with_optimizer), str(checkpoint.path)
    )
    learner.policy.module.load_state_dict(loaded["model"])
    torch.set_rng_state(loaded["random"]["torch"])
    if not with_optimizer:
        return
    learner.optimizer.load_state_dict(_fitted(learner, loaded["optimizer"]))
    for optimizer in _optimizers(learner):
        for state in optimizer.optimizer.state.values():
            # Loading makes all parameters share one step tensor, and AdamW would then count a
            # step for each parameter.
            state["step"] = state["step"].clone()


def _fitted(learner: Learner, loaded: dict[Any, Any]) -> dict[Any, Any]:
    """Loaded optimizer state in the nesting that this grid's optimizer wants.

    Tensors are found by parameter on any grid. The rest lies in one dictionary, or, where experts
    have an optimizer of their own, in one for each; another grid may have the other form. What is
    state in it is the count of steps: rates and decays are set anew by the stage.
    """
    optimizers = _optimizers(learner)
    was_one, is_one = "optimizer" in loaded, len(optimizers) == 1
    if was_one == is_one:
        return loaded
    saved = loaded if was_one else loaded[0]
    (step,) = {group["step"] for group in saved["optimizer"]["param_groups"]}
    parts = []
    for index, optimizer in enumerate(optimizers):
        own = optimizer.state_dict()["optimizer"]
        groups = [{**group, "step": step} for group in own["param_groups"]]
        tensors = {
            k: v for k, v in (loaded if is_one else loaded[index]).items() if k not in (0, 1)
        }
        other = {k: v for k, v in saved.items() if isinstance(k, str) and k != "param_state"}
        parts.append({**other, **tensors, "optimizer": {**own, "param_groups": groups}})
    return parts[0] if is_one else dict(enumerate(parts))


def _keep_adam_step() -> None:
    """torch's AdamW keeps a step a parameter, which megatron's format has no place for.

    Without Transformer Engine or Apex megatron uses torch's AdamW; the step count itself is
    stored with the parameter groups.
    """
    original: Any = DistributedOptimizer._set_main_param_and_optimizer_states
    if getattr(original, "_keeps_adam_step", False):
        return

    def patched(self: Any, model_param: Any, tensors: dict[str, Any]) -> Any:
        return original(self, model_param, {"step": None, **tensors})

    patched._keeps_adam_step = True  # type: ignore[attr-defined]
    DistributedOptimizer._set_main_param_and_optimizer_states = patched
