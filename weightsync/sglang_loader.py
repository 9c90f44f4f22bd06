"""SGLang custom weight loader: takes one update from its sender, inside the engine.

Runs in the scheduler process, on its only thread, while the manager holds generation paused.
Started by name: `--custom-weight-loader=weightsync.sglang_loader.load`. Owner: the engine.

Invariants: `load` never raises, because an exception that leaves a loader kills the scheduler:
what went wrong goes to the sender through the receiver, and to the engine's log. Every wait has a
deadline. Nothing here sets weight_version: the manager does, once the sender has reported.
An update counts as verified only when every tensor of the plan was loaded, its names and shapes are
those of the model, each bucket's checksum was right, and (verify_engine) the parameters, read back,
have the trainer's sums. All of it holds for each tensor-parallel rank by itself.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from weightsync.arrival import ArrivalProof
from weightsync.descriptor import TENSOR_NAME, Descriptor, unpack_plan
from weightsync.engine_layout import EMBEDDING, HEAD, Layout, check_plan, check_readable
from weightsync.errors import EpochFencedError, LayoutError, PlanMismatchError
from weightsync.plan import TensorSpec
from weightsync.sglang_layers import layout_of
from weightsync.transports import Receiver, open_receiver, sums_of, tensors_of

logger = logging.getLogger(__name__)


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
        receiver.verified(_receive(model, descriptor, receiver))
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


def _receive(model: Any, descriptor: Descriptor, receiver: Receiver) -> int:
    """Loads every bucket; returns the digest of the model, or 0 if it is not to be verified."""
    if descriptor.epoch < _Fence.epoch:
        raise EpochFencedError(
            f"window {descriptor.epoch} is older than {_Fence.epoch}, which this engine saw"
        )
    _Fence.epoch = descriptor.epoch
    plan = unpack_plan(descriptor.plan, descriptor.plan_digest)
    is_tied = needs_head(model, plan.tensors)
    layout = _checked_layout(model, plan.tensors, is_tied, descriptor.verify_engine)
    proof = ArrivalProof(layout) if layout and descriptor.verify_engine else None
    num_loaded = 0
    for index in range(len(plan.buckets)):
        data = receiver.next(plan.label(index), descriptor.bucket_timeout_s)
        tensors = tensors_of(plan, index, data, with_sums=descriptor.verify_engine)
        if proof:
            proof.received(tensors, sums_of(plan, index, data))
        num_loaded += len(tensors)
        if is_tied:
            tensors += [(HEAD, tensor) for name, tensor in tensors if name == EMBEDDING]
        _load_bucket(model, tensors, f"bucket {index} ({plan.label(index)})")
        receiver.release()
    if num_loaded != len(plan.tensors):
        raise PlanMismatchError(f"loaded {num_loaded} tensors, wanted {len(plan.tensors)}")
    digest = proof.check(dict(model.named_parameters())) if proof else 0
    logger.info(
        "window %d: loaded %d tensors, %d bytes, for weight_version %d, digest %016x",
        descriptor.epoch,
        num_loaded,
        plan.total_bytes,
        descriptor.weight_version,
        digest,
    )
    return digest


def _checked_layout(
    model: Any, tensors: tuple[TensorSpec, ...], is_tied: bool, verify: bool
) -> Layout | None:
    """Where the tensors lie in the model, which they are found to fill; None: that is not known."""
    try:
        layout = layout_of(model)
    except LayoutError as error:
        if verify:
            raise
        logger.warning("names of the update are not checked: %s", error)
        return None
    if is_tied:
        layout = layout.with_head_from_embedding()
    check_plan(layout, tensors)
    if verify:
        check_readable(layout, dict(model.named_parameters()), tensors)
    return layout


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
    and a tied sender has only the embedding to send. Its dense models share one parameter, which
    goes by the embedding's name alone.
    """
    is_tied = bool(getattr(getattr(model, "config", None), "tie_word_embeddings", False))
    names = {tensor.name for tensor in tensors}
    if not is_tied or HEAD in names or EMBEDDING not in names:
        return False
    return any(name == HEAD for name, _ in model.named_parameters())
