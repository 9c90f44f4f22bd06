"""Checks that a Hugging Face folder holds exactly the weights that its config.json speaks of.

A loader takes what it asks for and passes over the rest: biases that no layer of ours has, a head
of another vocabulary, half of a sharded download. Only headers are read here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open

from trainer.errors import BadRequestError

INDEX_NAME = "model.safetensors.index.json"
_DTYPES = ("F32", "BF16", "F16")
_HEAD = "lm_head.weight"
# A buffer that old versions of transformers saved; it follows from config.json.
_IGNORED_SUFFIX = ".rotary_emb.inv_freq"
_MAX_NAMED = 4


def check_weights(model_dir: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Compares the safetensors files of a folder with the names and shapes that are wanted.

    A folder with tied embeddings may hold a head, which is not read, as in transformers.

    Raises:
      BadRequestError: a file is missing or unreadable; or a tensor is missing, unknown, of another
        shape, or neither float32, bfloat16 nor float16.
    """
    found: dict[str, tuple[int, ...]] = {}
    for path in _files(model_dir):
        for name, shape, dtype in _headers(path):
            found[name] = shape
            if dtype not in _DTYPES:
                raise BadRequestError(
                    f"{path}: {name} is of dtype {dtype}, want one of {', '.join(_DTYPES)}"
                )
    missing = [name for name in shapes if name not in found]
    unknown = [
        name
        for name in found
        if name not in shapes and name != _HEAD and not name.endswith(_IGNORED_SUFFIX)
    ]
    if missing or unknown:
        raise BadRequestError(
            f"the weights in {model_dir} are not those of its config.json: "
            f"missing {_some(missing)}, not part of the model {_some(unknown)}"
        )
    for name, shape in shapes.items():
        if found[name] != shape:
            raise BadRequestError(
                f"{model_dir}: {name} has shape {list(found[name])}, want {list(shape)} by config.json"
            )


def _files(model_dir: Path) -> list[Path]:
    index = model_dir / INDEX_NAME
    if index.exists():
        try:
            names = set(json.loads(index.read_text())["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise BadRequestError(f"cannot read {index}: {error!r}") from error
        return [model_dir / name for name in sorted(names)]
    files = sorted(model_dir.glob("*.safetensors"))
    if not files:
        raise BadRequestError(
            f"{model_dir} holds no *.safetensors; make some with trainer.init_model"
        )
    return files


def _headers(path: Path) -> Iterator[tuple[str, tuple[int, ...], str]]:
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                part = file.get_slice(name)
                yield name, tuple(part.get_shape()), part.get_dtype()
    except (OSError, SafetensorError) as error:
        raise BadRequestError(f"cannot read {path}: {error}") from error


def _some(names: list[str]) -> str:
    if not names:
        return "none"
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more
