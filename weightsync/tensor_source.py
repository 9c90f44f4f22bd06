"""Where an update's tensors come from, bucket by bucket in order: memory, or an iterator that gathers.

Owner: WeightPublisher makes one an update and closes it. Invariants of `Gathering`: buckets are gathered
in a thread, one ahead of the one that is asked for, so that with a sender that holds none for
long two are in memory; what the iterator yields is held against the plan, tensor by tensor; the
iterator is run to its end on every path, because the trainer's other ranks gather with it. The
parameters behind the tensors must not be written until `close` returned.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from weightsync.errors import PlanMismatchError, TransferTimeoutError
from weightsync.plan import TensorSpec

if TYPE_CHECKING:
    import torch

    from weightsync.plan import Plan

Named = tuple[str, "torch.Tensor"]


class TensorSource(Protocol):
    """An update's tensors: contiguous, on the CPU, in the plan's order."""

    def bucket(self, index: int) -> list[torch.Tensor]:
        """Those of a bucket; ask for each once, in order. Blocks.

        Raises PlanMismatchError for tensors that are not the plan's, TransferTimeoutError, and what
        the iterator raises.
        """

    def whole(self) -> Sequence[torch.Tensor]:
        """All of them in memory. Blocks; instead of `bucket`, and may be repeated."""

    def close(self) -> None:
        """Gathers nothing more. Blocks until the iterator has ended. Safe to repeat."""


class Gathered:
    """Tensors in memory."""

    def __init__(self, plan: Plan, tensors: Sequence[torch.Tensor]) -> None:
        self._plan, self._tensors = plan, tensors

    def bucket(self, index: int) -> list[torch.Tensor]:
        """See TensorSource."""
        bucket = self._plan.buckets[index]
        return list(self._tensors[bucket.first : bucket.first + len(bucket.offsets)])

    def whole(self) -> Sequence[torch.Tensor]:
        """See TensorSource."""
        return self._tensors

    def close(self) -> None:
        """See TensorSource."""


class Gathering:
    """Tensors of an iterator whose plan is known."""

    def __init__(self, plan: Plan, named_tensors: Iterator[Named], timeout_s: float) -> None:
        """Begins with the first bucket. `timeout_s` bounds each wait for a bucket."""
        self._plan, self._timeout_s = plan, timeout_s
        self._whole: list[torch.Tensor] | None = None
        self._ahead = threading.Semaphore(1)
        self._closing = False
        self._ready: queue.SimpleQueue[list[torch.Tensor] | BaseException] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._run, args=(named_tensors,), name="gather", daemon=True
        )
        self._thread.start()

    def bucket(self, index: int) -> list[torch.Tensor]:
        """See TensorSource."""
        try:
            found = self._ready.get(timeout=self._timeout_s)
        except queue.Empty:
            raise TransferTimeoutError(
                f"bucket {index} ({self._plan.label(index)}) was not gathered in "
                f"{self._timeout_s} s (weight_sync.bucket_timeout_s)"
            ) from None
        if isinstance(found, BaseException):
            self._ready.put(found)  # for whoever asks again
            raise found
        self._ahead.release()
        return found

    def whole(self) -> Sequence[torch.Tensor]:
        """See TensorSource."""
        if self._whole is None:
            buckets = range(len(self._plan.buckets))
            self._whole = [tensor for index in buckets for tensor in self.bucket(index)]
        return self._whole

    def close(self) -> None:
        """See TensorSource."""
        self._closing = True
        self._ahead.release()
        self._thread.join()

    def _run(self, named_tensors: Iterator[Named]) -> None:
        try:
            for index in range(len(self._plan.buckets)):
                self._ahead.acquire()
                if self._closing:
                    break
                self._ready.put(self._gather(named_tensors, index))
        except BaseException as error:  # noqa: BLE001 (raised where the bucket is asked for)
            self._ready.put(error)
        for _ in named_tensors:  # the other ranks', which gather with this one, end so too
            pass

    def _gather(self, named_tensors: Iterator[Named], index: int) -> list[torch.Tensor]:
        bucket = self._plan.buckets[index]
        end = bucket.first + len(bucket.offsets)
        found = []
        for spec in self._plan.tensors[bucket.first : end]:
            named = next(named_tensors, None)
            if named is None or spec_of(*named) != spec:
                got = spec_of(*named) if named else "the end"
                raise PlanMismatchError(
                    f"got {got} from the trainer's iterator, wanted {spec} as in the last update: "
                    "publish again, which plans anew"
                )
            found.append(_on_host(*named))
        if end == len(self._plan.tensors) and (more := next(named_tensors, None)) is not None:
            raise PlanMismatchError(
                f"got {spec_of(*more)} from the trainer's iterator after the last tensor of the "
                "last update: publish again, which plans anew"
            )
        return found


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    """How a plan names a tensor."""
    return TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def gather_all(named_tensors: Iterable[Named]) -> dict[str, torch.Tensor]:
    """All tensors by name, contiguous and on the CPU. Blocks; takes the iterator to its end on every
    path.

    Raises ValueError for a name given twice, and a tensor without values.
    """
    tensors: dict[str, torch.Tensor] = {}
    rest = iter(named_tensors)
    try:
        for name, tensor in rest:
            if name in tensors:
                raise ValueError(f"tensor {name} is listed twice")
            tensors[name] = _on_host(name, tensor)
    finally:
        for _ in rest:  # other ranks gather with this one
            pass
    return tensors


def _on_host(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor where senders read it."""
    if tensor.is_meta:
        raise ValueError(f"tensor {name} is on meta: it has no values to publish")
    return tensor.detach().cpu().contiguous()
