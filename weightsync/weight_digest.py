"""Sums of tensors, and one sum of a whole model, for trainer and engine to compare.

Purpose: equal numbers on both sides mean equal bytes. Owner: WeightPublisher sums what the trainer
has, each engine's loader what its parameters hold. Invariant: the sum of a model does not depend on
the order of its tensors, on buckets or on where an engine keeps them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightsync import _core

if TYPE_CHECKING:
    import torch

_MODULUS = 2**64


def tensor_checksum(tensor: torch.Tensor) -> int:
    """XXH64 of a tensor's elements in row-major order; copies one that does not lie so."""
    import torch

    flat = tensor.detach().contiguous().reshape(-1).cpu()
    return _core.checksum(memoryview(flat.view(torch.uint8).numpy()))


class WeightDigest:
    """64 bits that stand for a set of named tensors."""

    def __init__(self) -> None:
        """Of no tensors."""
        self._value = 0

    @property
    def value(self) -> int:
        """The sum over all that was added, modulo 2**64."""
        return self._value

    def add(self, name: str, checksum: int) -> None:
        """Takes in a tensor by its Hugging Face name and `tensor_checksum`."""
        mixed = _core.checksum(name.encode() + checksum.to_bytes(8, "little"))
        self._value = (self._value + mixed) % _MODULUS
