"""Proof that an engine's parameters hold what the trainer sent.

Purpose: bucket checksums prove the transfer, not what a model's own loader made of it, and SGLang
drops what it does not know without a word. Owner: sglang_loader, one of these an update. Each tensor
comes with the XXH64 that the trainer made of it before packing. A tensor that this rank holds whole
and in order is read back and compared with that sum; of one that is divided, each slice is compared
with the same slice as received, and the whole as received with the trainer's sum.

Invariant: `check` reads every parameter back, after the last bucket: a tensor that a later one
overwrote is found too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from weightsync.engine_layout import Layout, Slice, view, whole
from weightsync.errors import ArrivalError
from weightsync.weight_digest import WeightDigest, tensor_checksum

_NUM_NAMED = 3


class ArrivalProof:
    """The sums of one update."""

    def __init__(self, layout: Layout) -> None:
        """`layout` must have passed engine_layout.check_readable."""
        self._layout = layout
        self._expected: list[tuple[str, Slice, int]] = []
        self._digest = WeightDigest()

    def received(self, tensors: Iterable[tuple[str, torch.Tensor]], sums: Iterable[int]) -> None:
        """Notes tensors before they are loaded, and the trainer's sum of each.

        Raises ArrivalError when a divided tensor as received is not the trainer's.
        """
        for (name, tensor), wanted in zip(tensors, sums, strict=True):
            slices = self._layout.slices[name]
            everything = whole(tensor.shape)
            if any(row.source != everything for row in slices):
                got = tensor_checksum(tensor)
                if got != wanted:
                    raise ArrivalError(
                        f"tensor {name} has checksum {got} as received, {wanted} at the trainer: "
                        "it changed while it was packed, or was packed wrongly"
                    )
            for row in slices:
                is_whole = row.source == everything
                part = wanted if is_whole else tensor_checksum(view(tensor, row.source))
                self._expected.append((name, row, part))
            self._digest.add(name, wanted)

    def check(self, parameters: Mapping[str, torch.Tensor]) -> int:
        """The digest of the model, once every slice of `parameters` was found equal.

        Raises ArrivalError that names the tensors which differ.
        """
        wrong = [
            f"{name} in {row.parameter}{_show(row, parameters[row.parameter])}"
            for name, row, wanted in self._expected
            if tensor_checksum(view(parameters[row.parameter], row.target)) != wanted
        ]
        if wrong:
            more = len(wrong) - _NUM_NAMED
            raise ArrivalError(
                f"{len(wrong)} of {len(self._expected)} tensors are not in the engine as the trainer "
                f"has them: {', '.join(wrong[:_NUM_NAMED])}"
                + (f" and {more} more" if more > 0 else "")
                + "; the engine loaded them wrongly, or they changed while they were packed"
            )
        return self._digest.value


def _show(row: Slice, parameter: torch.Tensor) -> str:
    """[3, 32:64, :]; empty for all of it."""
    if row.target == whole(parameter.shape):
        return ""
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in row.target) + "]"
