"""Writes weights as a Hugging Face folder, whole or not at all.

Tensors are copied and written as they come, a file at a time, so that a large model needs no more
than one file's worth of memory. The folder is put in place by renaming once all of it is written.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from trainer.errors import BadRequestError
from trainer.hf_import import INDEX_NAME

SHARD_BYTES = 4 * 2**30
# What makes a folder of weights a model that tokenizers and servers can load.
_COMPANIONS = ("*.json", "*.jinja", "*.txt", "*.model")


def write(
    named_tensors: Iterable[tuple[str, torch.Tensor]],
    model_dir: Path,
    path: Path,
    shard_bytes: int = SHARD_BYTES,
) -> tuple[int, int]:
    """Writes tensors and model_dir's companion files to the folder `path`, replacing it whole.

    Args:
      named_tensors: (Hugging Face name, tensor); they are copied.
      model_dir: where config.json and the tokenizer come from. The config.json that is written names
        the dtype of the weights; the rest of it is model_dir's.
      path: absolute; its parent is made if needed.
      shard_bytes: weights in one file. More go into several with an index; a larger tensor has one
        to itself.

    Returns:
      (number of tensors, bytes of the weights).
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        weights = _Weights(partial, shard_bytes)
        for name, tensor in named_tensors:
            weights.add(name, tensor)
        weights.close()
        _copy_companions(model_dir, partial, weights.dtypes)
        replaced = path.with_name(f".{path.name}.replaced")
        shutil.rmtree(replaced, ignore_errors=True)
        if path.exists():
            path.rename(replaced)
        partial.rename(path)
        shutil.rmtree(replaced, ignore_errors=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return len(weights.shard_of), weights.num_bytes


def check_replaceable(path: Path) -> None:
    """Raises BadRequestError unless `path` is free, or holds nothing but a model folder's files."""
    if not path.exists() and not path.is_symlink():
        return
    suffixes = {pattern[1:] for pattern in _COMPANIONS} | {".safetensors"}
    others = [
        child.name
        for child in (sorted(path.iterdir()) if path.is_dir() else [path])
        if child.is_dir() or child.suffix not in suffixes
    ]
    if others:
        raise BadRequestError(
            f"an export would replace {path}, which is no folder of a model (it holds {others[0]}): "
            "name another path, or remove it"
        )


class _Weights:
    """The safetensors files of one folder."""

    def __init__(self, folder: Path, shard_bytes: int) -> None:
        self.shard_of: dict[str, int] = {}  # by tensor
        self.num_bytes = 0
        self.dtypes: set[torch.dtype] = set()
        self._folder = folder
        self._shard_bytes = shard_bytes
        self._held: dict[str, torch.Tensor] = {}
        self._held_bytes = 0
        self._num_shards = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if self._held and self._held_bytes + tensor.nbytes > self._shard_bytes:
            self._write()
        # A copy: save_file refuses tensors that share memory, and the parameter may change.
        self._held[name] = tensor.detach().cpu().contiguous().clone()
        self._held_bytes += tensor.nbytes
        self.num_bytes += tensor.nbytes
        self.dtypes.add(tensor.dtype)
        self.shard_of[name] = self._num_shards

    def close(self) -> None:
        """Writes what is held, and gives the files their names."""
        self._write()
        if self._num_shards == 1:
            self._path(0).rename(self._folder / "model.safetensors")
            return
        names = [
            f"model-{i + 1:05d}-of-{self._num_shards:05d}.safetensors"
            for i in range(self._num_shards)
        ]
        for i, name in enumerate(names):
            self._path(i).rename(self._folder / name)
        index = {
            "metadata": {"total_size": self.num_bytes},
            "weight_map": {name: names[i] for name, i in self.shard_of.items()},
        }
        (self._folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")

    def _write(self) -> None:
        path = self._path(self._num_shards)
        try:
            save_file(self._held, path, metadata={"format": "pt"})
        except SafetensorError as error:  # its own class also for a full disk
            raise OSError(f"{path.parent}: {error}") from error
        path.chmod(0o644)  # safetensors makes it private
        self._held, self._held_bytes = {}, 0
        self._num_shards += 1

    def _path(self, shard: int) -> Path:
        return self._folder / f"shard-{shard}"


def _copy_companions(model_dir: Path, folder: Path, dtypes: set[torch.dtype]) -> None:
    for pattern in _COMPANIONS:
        for file in model_dir.glob(pattern):
            if file.name != INDEX_NAME:
                shutil.copyfile(file, folder / file.name)
    if len(dtypes) != 1:
        return
    (dtype,) = (str(dtype).removeprefix("torch.") for dtype in dtypes)
    path = folder / "config.json"
    config: dict[str, Any] = json.loads(path.read_text())
    # transformers 4 reads the one, 5 the other.
    path.write_text(json.dumps(config | {"torch_dtype": dtype, "dtype": dtype}, indent=2) + "\n")
