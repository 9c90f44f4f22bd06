"""What the ranks of one trainer do in common: one acts for all, or all agree.

Every rank makes the same calls in the same order. With one rank nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from trainer.errors import RankFailedError

_T = TypeVar("_T")


def num_ranks() -> int:
    """Ranks of this trainer."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_first() -> bool:
    """True on the rank that names, seals and deletes."""
    return num_ranks() == 1 or dist.get_rank() == 0


def holds_tokens() -> bool:
    """True on one rank of each data-parallel share: the first of its tensor-parallel group, in the
    last pipeline stage. The others hold the same log-probs, or none.
    """
    return (
        parallel_state.is_pipeline_last_stage()
        and parallel_state.get_tensor_model_parallel_rank() == 0
    )


def from_first(work: Callable[[], _T], group: Any = None) -> _T:
    """What `work` returns on the first rank, on every rank; it runs there alone.

    Raises on every rank what it raises there.
    """
    if num_ranks() == 1:
        return work()
    said: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            said[0] = work()
        except Exception as error:  # noqa: BLE001 - raised again below, on every rank
            said[1] = error
    dist.broadcast_object_list(said, 0, group=group)
    if said[1] is not None:
        raise said[1]
    result: _T = said[0]
    return result


def to_first(part: _T, group: Any = None) -> list[_T]:
    """What every rank gave, in their order, on the first rank; nothing on the others."""
    if num_ranks() == 1:
        return [part]
    parts: list[Any] | None = [None] * num_ranks() if dist.get_rank() == 0 else None
    dist.gather_object(part, parts, 0, group=group)
    return parts or []


def to_all(part: _T) -> list[_T]:
    """What every rank gave, in their order, on every rank."""
    if num_ranks() == 1:
        return [part]
    parts: list[Any] = [None] * num_ranks()
    dist.all_gather_object(parts, part)
    return parts


def in_step(work: Callable[[], _T]) -> _T:
    """What `work` returns on this rank, if it does on every rank.

    Raises what it raises here, or RankFailedError where it raised on others only.
    """
    if num_ranks() == 1:
        return work()
    try:
        result, error = work(), None
    except Exception as raised:  # noqa: BLE001 - raised again below
        result, error = None, raised
    said = to_all("" if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(said) if text]
    if failed:
        raise RankFailedError("; ".join(failed))
    return result  # type: ignore[return-value]


def all_true(mine: bool, device: torch.device) -> bool:
    """Whether every rank says so."""
    if num_ranks() == 1:
        return mine
    said = torch.tensor(int(mine), dtype=torch.int32, device=device)
    dist.all_reduce(said, dist.ReduceOp.MIN)
    return bool(said)
