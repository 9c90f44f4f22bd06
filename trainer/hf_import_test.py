"""A folder is loaded only if it holds exactly the weights of its config.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from trainer import architecture, hf_import, testbed
from trainer.config import GridConfig
from trainer.device import Device
from trainer.errors import BadRequestError
from trainer.model import Policy

NORM = "model.norm.weight"


def rewrite(folder: Path, **changed: torch.Tensor | None) -> None:
    """Replaces tensors; None removes. `__` in a name stands for a dot."""
    weights = load_file(folder / "model.safetensors")
    for key, tensor in changed.items():
        weights.pop(name := key.replace("__", "."), None)
        if tensor is not None:
            weights[name] = tensor
    save_file(weights, folder / "model.safetensors")


def check(folder: Path) -> None:
    hf_import.check_weights(folder, architecture.tensor_shapes(architecture.read_config(folder)))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({NORM: None}, "missing model.norm.weight, not part of the model none"),
        (
            {"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)},
            "missing none, not part of the model model.layers.0.self_attn.q_proj.bias",
        ),
        ({NORM: torch.ones(31)}, r"model.norm.weight has shape \[31\], want \[32\]"),
        ({NORM: torch.ones(32, dtype=torch.int8)}, "model.norm.weight is of dtype I8, want one of"),
    ],
    ids=["missing", "unknown", "shape", "dtype"],
)
def test_other_weights_than_the_configs_are_refused(
    tmp_path: Path, changed: dict[str, torch.Tensor | None], message: str
) -> None:
    folder = testbed.write_model(tmp_path / "m")
    check(folder)
    rewrite(folder, **{name.replace(".", "__"): tensor for name, tensor in changed.items()})
    with pytest.raises(BadRequestError, match=message):
        check(folder)


def test_what_transformers_passes_over_may_be_there(tmp_path: Path) -> None:
    folder = testbed.write_model(tmp_path / "m", tie_word_embeddings=True)
    rewrite(folder, lm_head__weight=torch.zeros(testbed.VOCAB, 32))
    name = "model__layers__0__self_attn__rotary_emb__inv_freq"
    rewrite(folder, **{name: torch.zeros(4)})
    check(folder)


def test_a_torn_file_is_named(tmp_path: Path) -> None:
    folder = testbed.write_model(tmp_path / "m")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(BadRequestError, match=r"cannot read .*model\.safetensors"):
        check(folder)


def shard(folder: Path) -> None:
    """Splits the weights over three files with an index, as large models come."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    where: dict[str, str] = {}
    for i in range(3):
        part = dict(list(weights.items())[i::3])
        file = f"model-{i + 1:05d}-of-00003.safetensors"
        save_file(part, folder / file)
        where |= dict.fromkeys(part, file)
    (folder / hf_import.INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": where}))


def test_a_sharded_folder_is_read(tmp_path: Path, device: Device) -> None:
    folder = testbed.write_model(tmp_path / "m", scale=5.0)
    weights = load_file(folder / "model.safetensors")
    shard(folder)
    policy = Policy(folder, GridConfig(), device, seed=0)
    policy.load_hf()
    exported = dict(policy.export_named_tensors())
    assert exported.keys() == weights.keys()
    assert all(torch.equal(exported[name], weights[name]) for name in weights)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(BadRequestError, match=r"cannot read .*model-00002-of-00003"):
        policy.load_hf()
