"""Writes weights as a Hugging Face folder, whole or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file

# What makes a folder of weights a model that tokenizers and servers can load.
_COMPANIONS = ("*.json", "*.jinja", "*.txt", "*.model")


def write(
    named_tensors: Iterable[tuple[str, torch.Tensor]], model_dir: Path, path: Path
) -> tuple[int, int]:
    """Writes tensors and model_dir's companion files to the folder `path`, replacing it whole.

    Args:
      named_tensors: (Hugging Face name, tensor); they are copied.
      model_dir: where config.json and the tokenizer come from.
      path: absolute; its parent is made if needed.

    Returns:
      (number of tensors, bytes of the weights).
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    for pattern in _COMPANIONS:
        for file in model_dir.glob(pattern):
            if not file.name.endswith(".index.json"):
                shutil.copyfile(file, partial / file.name)
    tensors = {name: t.detach().cpu().contiguous().clone() for name, t in named_tensors}
    save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
    (partial / "model.safetensors").chmod(0o644)  # safetensors makes it private
    replaced = path.with_name(f".{path.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if path.exists():
        path.rename(replaced)
    partial.rename(path)
    shutil.rmtree(replaced, ignore_errors=True)
    return len(tensors), sum(t.nbytes for t in tensors.values())
