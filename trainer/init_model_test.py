from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from trainer import init_model, testbed


def make(folder: Path, **overrides: object) -> dict[str, torch.Tensor]:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(testbed.TINY | overrides))
    assert init_model.main(["--model-dir", str(folder), "--seed", "3"]) == 0
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", testbed.FAMILIES)
def test_names_and_shapes_are_those_of_transformers(
    tmp_path: Path, family: str, tied: bool
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    weights = make(tmp_path / "m", **testbed.FAMILIES[family] | {"tie_word_embeddings": tied})
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "m"))
    wanted = {n: tuple(t.shape) for n, t in model.state_dict().items()}
    if tied:
        del wanted["lm_head.weight"]
    assert {n: tuple(t.shape) for n, t in weights.items()} == wanted


def test_spread_is_right_and_a_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    weights, again = make(tmp_path / "a"), make(tmp_path / "b")
    assert all(torch.equal(weights[n], again[n]) for n in weights)
    assert weights["model.embed_tokens.weight"].std() == pytest.approx(0.02, rel=0.1)
    assert bool((weights["model.norm.weight"] == 1).all())


def test_another_architecture_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    assert init_model.main(["--model-dir", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {tmp_path}/config.json names architecture GPT2LMHeadModel")
    assert "LlamaForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM" in error
