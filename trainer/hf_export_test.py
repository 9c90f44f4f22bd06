"""An exported folder: one file or several, whole or absent, and its config.json names the dtype."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from trainer import architecture, hf_export, hf_import, testbed
from trainer.init_model import random_weights

Named = tuple[str, torch.Tensor]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = testbed.write_model(tmp_path / "source")
    (folder / "tokenizer.json").write_text("{}")
    return folder


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return random_weights(architecture.read_config(folder), 1)


@pytest.mark.parametrize("shard_bytes", [1, 5000, 2**30], ids=["tensor by tensor", "some", "one"])
def test_shards_hold_every_tensor_and_load_in_transformers(
    source: Path, tmp_path: Path, shard_bytes: int
) -> None:
    from transformers import AutoModelForCausalLM

    weights = weights_of(source)
    out = tmp_path / "out"
    count, size = hf_export.write(weights.items(), source, out, shard_bytes)
    assert (count, size) == (len(weights), sum(t.nbytes for t in weights.values()))
    files = sorted(out.glob("*.safetensors"))
    if shard_bytes == 2**30:
        assert [file.name for file in files] == ["model.safetensors"]
        assert not (out / hf_import.INDEX_NAME).exists()
    else:
        num = len(files)
        assert num == len(weights) if shard_bytes == 1 else 1 < num < len(weights)
        assert files[0].name == f"model-00001-of-{num:05d}.safetensors"
    for file in files:
        held = load_file(file)
        assert len(held) == 1 or sum(t.nbytes for t in held.values()) <= shard_bytes
        assert file.stat().st_mode & 0o777 == 0o644
    hf_import.check_weights(out, architecture.tensor_shapes(architecture.read_config(out)))
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    for name, tensor in model.named_parameters():
        assert torch.equal(tensor, weights[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_config_names_the_weights_dtype(
    source: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    named = ((name, tensor.to(dtype)) for name, tensor in weights_of(source).items())
    hf_export.write(named, source, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    name = str(dtype).removeprefix("torch.")
    assert (config.pop("torch_dtype"), config.pop("dtype")) == (name, name)
    assert config == json.loads((source / "config.json").read_text())
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"


def test_an_export_of_a_sharded_model_leaves_no_old_index(source: Path, tmp_path: Path) -> None:
    weights = weights_of(source)
    sharded, out = tmp_path / "sharded", tmp_path / "out"
    hf_export.write(weights.items(), source, sharded, shard_bytes=5000)
    hf_export.write(weights.items(), sharded, out)
    assert not (out / hf_import.INDEX_NAME).exists()
    hf_import.check_weights(out, architecture.tensor_shapes(architecture.read_config(out)))


def test_an_export_that_fails_leaves_the_one_before(source: Path, tmp_path: Path) -> None:
    weights, out = weights_of(source), tmp_path / "exports" / "out"
    hf_export.write(weights.items(), source, out)
    before = {file.name: file.read_bytes() for file in out.iterdir()}

    def ends_early() -> Iterator[Named]:
        yield from list(weights.items())[:3]
        raise RuntimeError("a rank was lost")

    with pytest.raises(RuntimeError, match="a rank was lost"):
        hf_export.write(ends_early(), source, out, shard_bytes=1)
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before
    assert [path.name for path in out.parent.iterdir()] == ["out"]
