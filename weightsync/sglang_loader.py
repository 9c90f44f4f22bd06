"""SGLang custom weight loader: takes one update from its sender, inside the engine.

Runs in the scheduler process, on its only thread, while the manager holds generation paused.
Started by name: `--custom-weight-loader=weightsync.sglang_loader.load`. Owner: the engine.

Invariants: `load` never raises, because an exception that leaves a loader kills the scheduler:
what went wrong goes to the sender through the receiver, and to the engine's log. Every wait has a
deadline. Nothing here sets weight_version: the manager does, once the sender has reported.
An update counts as verified only when every tensor of the plan was loaded, the plan covers
the model's parameters exactly, and each bucket's checksum was right.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from weightsync.descriptor import TENSOR_NAME, Descriptor
from weightsync.errors import EpochFencedError, PlanMismatchError
from weightsync.plan import Plan, TensorSpec
from weightsync.transports import Receiver, open_receiver, tensors_of

logger = logging.getLogger(__name__)

_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"


class _Fence:
    """The newest window that this engine took weights in."""

    epoch = 0


def load(model: Any, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Receives one update. `named_tensors` holds one uint8 tensor: a Descriptor."""
    receiver: Receiver | None = None
    try:
        descriptor = _read(named_tensors)
        receiver = open_receiver(
            descriptor.endpoint,
            descriptor.epoch,
            descriptor.receiver,
            descriptor.bucket_timeout_s,
        )
        _receive(model, descriptor, receiver)
        receiver.verified()
    except Exception as error:  # leaving it would kill the engine; the sender decides
        logger.exception("weight update failed")
        if receiver is not None:
            receiver.fail(f"{type(error).__name__}: {error}")


def _read(named_tensors: Iterable[tuple[str, torch.Tensor]]) -> Descriptor:
    tensors = dict(named_tensors)
    if set(tensors) != {TENSOR_NAME}:
        raise PlanMismatchError(
            f"got tensors {sorted(tensors)[:5]}, wanted {TENSOR_NAME} alone: "
            "this loader takes updates of weightsync.publisher only"
        )
    return Descriptor.decode(tensors[TENSOR_NAME].cpu().numpy().tobytes())


def _receive(model: Any, descriptor: Descriptor, receiver: Receiver) -> None:
    if descriptor.epoch < _Fence.epoch:
        raise EpochFencedError(
            f"window {descriptor.epoch} is older than {_Fence.epoch}, which this engine saw"
        )
    _Fence.epoch = descriptor.epoch
    plan = Plan.from_json(descriptor.plan, descriptor.plan_digest)
    is_tied = needs_head(model, plan.tensors)
    check_covers(model, plan.tensors, is_tied)
    num_loaded = 0
    for index in range(len(plan.buckets)):
        data = receiver.next(plan.label(index), descriptor.bucket_timeout_s)
        tensors = tensors_of(plan, index, data)
        num_loaded += len(tensors)
        if is_tied:
            tensors += [(_HEAD, tensor) for name, tensor in tensors if name == _EMBEDDING]
        _load_bucket(model, tensors, f"bucket {index} ({plan.label(index)})")
        receiver.release()
    if num_loaded != len(plan.tensors):
        raise PlanMismatchError(f"loaded {num_loaded} tensors, wanted {len(plan.tensors)}")
    logger.info(
        "window %d: loaded %d tensors, %d bytes, for weight_version %d",
        descriptor.epoch,
        num_loaded,
        plan.total_bytes,
        descriptor.weight_version,
    )


def _load_bucket(model: Any, tensors: list[tuple[str, torch.Tensor]], bucket: str) -> None:
    at = tensors[0][0]

    def tracked() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal at
        for name, tensor in tensors:
            at = name
            yield name, tensor

    try:
        model.load_weights(tracked())
    except Exception as error:  # a model's loader may raise anything; the sender must know where
        raise PlanMismatchError(
            f"tensor {at} of {bucket} does not fit the model: {error!r}"
        ) from error


def needs_head(model: Any, tensors: Iterable[TensorSpec]) -> bool:
    """Whether the output head must be filled from the embedding.

    SGLang's Qwen3-MoE model has a head of its own even where the configuration ties the two,
    and a tied sender has only the embedding to send.
    """
    is_tied = bool(getattr(getattr(model, "config", None), "tie_word_embeddings", False))
    names = {tensor.name for tensor in tensors}
    return is_tied and hasattr(model, "lm_head") and _HEAD not in names and _EMBEDDING in names


def check_covers(model: Any, tensors: Iterable[TensorSpec], is_tied: bool) -> None:
    """Raises PlanMismatchError unless the plan fills the model's parameters exactly.

    SGLang skips unknown names and keeps old values for missing ones without a word. Names differ
    between the two (q, k and v are one parameter), but the numbers of elements must agree.
    Holds for one tensor-parallel rank.
    """
    specs = tuple(tensors)
    head_elements = sum(t.num_elements for t in specs if t.name == _EMBEDDING) if is_tied else 0
    sent = sum(t.num_elements for t in specs) + head_elements
    wanted = _num_elements(model)
    if sent != wanted:
        raise PlanMismatchError(
            f"the update has {sent} elements in {len(specs)} tensors, and the model has room for "
            f"{wanted}: names are missing or unknown; compare the trainer's model with the "
            "engine's config.json"
        )
    have = {str(p.dtype).removeprefix("torch.") for _, p in model.named_parameters()}
    if unknown := sorted({t.dtype for t in specs} - have):
        raise PlanMismatchError(
            f"the update has dtypes {unknown}, the model's parameters are {sorted(have)}: "
            "set engines.dtype to what the trainer sends"
        )


def _num_elements(model: Any) -> int:
    """Elements that a checkpoint fills; rows that pad a vocabulary do not count."""
    total = sum(parameter.numel() for _, parameter in model.named_parameters())
    seen: set[int] = set()
    for module in model.modules():
        rows, padded = (
            getattr(module, "org_vocab_size", None),
            getattr(module, "num_embeddings_padded", None),
        )
        weight = getattr(module, "weight", None)
        if rows is None or padded is None or weight is None or id(weight) in seen:
            continue
        seen.add(id(weight))
        total -= (weight.shape[0] - rows) * weight.shape[1]
    return total
