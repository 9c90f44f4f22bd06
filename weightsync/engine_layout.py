"""Where each Hugging Face tensor lies in an SGLang model's parameters, for one rank of it.

Purpose: an engine keeps q, k and v in one parameter, all experts of a layer in two, and under tensor
parallelism only its share of each. This map says which box of which tensor fills which box of which
parameter, so that the loader can tell a missing or unknown tensor by name and read back what it
loaded. Owner: sglang_loader builds one an update; it holds names and numbers, no tensors.

    tensor          source box              parameter                     target box
    q_proj.weight   this rank's heads       qkv_proj.weight               first rows
    experts.3.up    this rank's rows        experts.w13_weight            [3], second half
    o_proj.weight   this rank's columns     o_proj.weight                 all
    embed_tokens    this rank's rows        embed_tokens.weight           all but the padding

`sglang_layers.layout_of` makes it. Invariant: `check_readable` passes only if every element of every
parameter is filled once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from weightsync.errors import LayoutError, PlanMismatchError
from weightsync.plan import TensorSpec

Range = tuple[int, int]
"""First index and the one past the last."""
Box = tuple[Range, ...]
"""A range for each axis."""

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
_PADDING = "padding"
_NUM_NAMED = 5
UNREADABLE = (
    "this engine's weights cannot be read back; set weight_sync.verify_engine=false to publish "
    "to it on the strength of the transfer's checksums alone"
)


@dataclass(frozen=True, slots=True)
class Slice:
    """A box of a tensor, and the box of a parameter that it fills in the same order."""

    source: Box
    parameter: str
    target: Box


@dataclass(frozen=True, slots=True)
class Layout:
    """One rank's map."""

    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Each tensor that the model knows, whole; also those of which this rank holds nothing."""
    slices: dict[str, list[Slice]] = field(default_factory=dict)
    """What this rank holds, by tensor."""
    padding: dict[str, list[Box]] = field(default_factory=dict)
    """Boxes of parameters that no tensor fills."""

    def add(self, tensor: str, shape: tuple[int, ...], *slices: Slice) -> None:
        """Notes a tensor and what of it this rank holds."""
        self.shapes[tensor] = shape
        self.slices.setdefault(tensor, []).extend(slices)

    def with_head_from_embedding(self) -> Layout:
        """The same, where one tensor fills the embedding and the output head."""
        shapes = {name: shape for name, shape in self.shapes.items() if name != HEAD}
        slices = {name: rows for name, rows in self.slices.items() if name != HEAD}
        slices[EMBEDDING] = self.slices[EMBEDDING] + self.slices[HEAD]
        return dataclasses.replace(self, shapes=shapes, slices=slices)


def whole(shape: Iterable[int]) -> Box:
    """All of a tensor."""
    return tuple((0, size) for size in shape)


def view(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """The box of a tensor, in place."""
    for axis, (start, stop) in enumerate(box):
        if (start, stop) != (0, tensor.shape[axis]):
            tensor = tensor.narrow(axis, start, stop - start)
    return tensor


def check_plan(layout: Layout, tensors: Iterable[TensorSpec]) -> None:
    """Raises PlanMismatchError unless the tensors are those of the model, by name and shape.

    SGLang skips unknown names and keeps old values for missing ones without a word.
    """
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    wrong = [
        f"{word} {_some(names)}"
        for word, names in (
            ("lacks", sorted(layout.shapes.keys() - shapes.keys())),
            ("has unknown", sorted(shapes.keys() - layout.shapes.keys())),
        )
        if names
    ]
    if wrong:
        raise PlanMismatchError(
            f"the update's {len(shapes)} tensors are not the model's {len(layout.shapes)}: it "
            + " and ".join(wrong)
            + "; compare the trainer's model with the engine's config.json"
        )
    for name, shape in shapes.items():
        if shape != layout.shapes[name]:
            raise PlanMismatchError(
                f"tensor {name} has shape {list(shape)}, the engine wants "
                f"{list(layout.shapes[name])}: compare the trainer's model with the engine's "
                "config.json"
            )


def check_readable(
    layout: Layout, parameters: Mapping[str, torch.Tensor], tensors: Iterable[TensorSpec]
) -> None:
    """Raises LayoutError unless the map fills every element of every parameter exactly once, and
    PlanMismatchError unless tensors and the parameters that they fill have one dtype.
    """
    boxes: dict[str, list[tuple[Box, str]]] = {name: [] for name in parameters}
    for tensor, slices in layout.slices.items():
        for row in slices:
            boxes[row.parameter].append((row.target, tensor))
    for name, pads in layout.padding.items():
        boxes[name] += [(box, _PADDING) for box in pads]
    for name, parameter in parameters.items():
        if problem := _tiling_problem(boxes[name], tuple(parameter.shape), 0):
            raise LayoutError(f"parameter {name} {list(parameter.shape)}: {problem}; {UNREADABLE}")
    for spec in tensors:
        for row in layout.slices[spec.name]:
            dtype = str(parameters[row.parameter].dtype).removeprefix("torch.")
            if dtype != spec.dtype:
                raise PlanMismatchError(
                    f"tensor {spec.name} is {spec.dtype}, the engine's {row.parameter} {dtype}: "
                    "set engines.dtype to what the trainer sends"
                )


def _some(names: list[str]) -> str:
    more = len(names) - _NUM_NAMED
    return ", ".join(names[:_NUM_NAMED]) + (f" and {more} more" if more > 0 else "")


def _tiling_problem(boxes: list[tuple[Box, str]], shape: tuple[int, ...], axis: int) -> str:
    """What keeps the boxes from filling the shape once, cut axis by axis; empty: nothing."""
    if axis == len(shape):
        return "" if len(boxes) == 1 else f"{boxes[0][1]} and {boxes[1][1]} lie in one place"
    by_range: dict[Range, list[tuple[Box, str]]] = {}
    for box in boxes:
        if len(box[0]) != len(shape):
            return f"{box[1]} fills {len(box[0])} axes"
        by_range.setdefault(box[0][axis], []).append(box)
    filled, last = 0, "its start"
    for (start, stop), rows in sorted(by_range.items()):
        name = rows[0][1]
        if start < filled:
            return f"{name} begins at {start} of axis {axis}, before the end of {last} at {filled}"
        if start > filled:
            return f"nothing fills {filled} to {start} of axis {axis}, between {last} and {name}"
        if problem := _tiling_problem(rows, shape, axis + 1):
            return problem
        filled, last = stop, name
    if filled != shape[axis]:
        return f"tensors fill {filled} of {shape[axis]} of axis {axis}, the last of them {last}"
    return ""
