"""What config.json may say: families are told apart, and nothing that would be another model passes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainer import architecture
from trainer.errors import BadRequestError

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "intermediate_size": 64,
    **SIZES,
}
MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    **SIZES,
}


def read(folder: Path, config: Any) -> dict[str, Any]:
    (folder / "config.json").write_text(json.dumps(config))
    return architecture.read_config(folder)


@pytest.mark.parametrize(
    ("said", "theta"),
    [
        ({}, 10000.0),
        ({"rope_theta": 5e5}, 5e5),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}, 1e5),
        ({"rope_theta": None, "rope_scaling": None}, 10000.0),
    ],
    ids=["nothing", "transformers 4", "transformers 5", "null"],
)
def test_the_rope_base_is_found_where_it_stands(
    tmp_path: Path, said: dict[str, Any], theta: float
) -> None:
    assert read(tmp_path, LLAMA | said)["rope_theta"] == theta


@pytest.mark.parametrize(
    ("config", "said", "message"),
    [
        (LLAMA, {"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM: this trainer"),
        (LLAMA, {"architectures": []}, r"architectures \[\], want one of LlamaForCausalLM, Qwen3"),
        (LLAMA, {"architectures": None}, "want one of"),
        (LLAMA, {"model_type": "mistral"}, "model_type is 'mistral', but LlamaForCausalLM"),
        (LLAMA, {"hidden_act": "gelu"}, "hidden_act is 'gelu'.*hidden_act='silu' only"),
        (LLAMA, {"attention_bias": True}, "attention_bias is True"),
        (LLAMA, {"mlp_bias": True}, "mlp_bias is True"),
        (LLAMA, {"attention_dropout": 0.1}, "attention_dropout is 0.1"),
        (LLAMA, {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling is {'rope"),
        (LLAMA, {"rope_parameters": {"rope_type": "yarn"}}, "rope_type 'yarn'"),
        (LLAMA, {"use_sliding_window": True}, "use_sliding_window is True"),
        (LLAMA, {"layer_types": ["full_attention", "sliding_attention"]}, "'sliding_attention'"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        (LLAMA, {"quantization_config": {"bits": 4}}, "quantization_config"),
        (LLAMA, {"num_key_value_heads": None}, "num_key_value_heads is None, want a whole"),
        (LLAMA, {"intermediate_size": "64"}, "intermediate_size is '64'"),
        (MOE, {"norm_topk_prob": False}, "norm_topk_prob is False, and"),
        (MOE, {"decoder_sparse_step": 2}, "decoder_sparse_step is 2"),
        (MOE, {"mlp_only_layers": [0]}, r"mlp_only_layers is \[0\]"),
        (MOE, {"num_experts": 0}, "num_experts is 0"),
    ],
)
def test_what_would_be_another_model_is_refused(
    tmp_path: Path, config: dict[str, Any], said: dict[str, Any], message: str
) -> None:
    assert read(tmp_path, config)
    with pytest.raises(BadRequestError, match=message):
        read(tmp_path, config | said)


def test_a_setting_that_is_missing_has_transformers_default(tmp_path: Path) -> None:
    without = {k: v for k, v in MOE.items() if k != "norm_topk_prob"}
    with pytest.raises(BadRequestError, match="norm_topk_prob is False where it is not set"):
        read(tmp_path, without)


@pytest.mark.parametrize("content", ["{", "[1]", '"text"'])
def test_a_file_that_is_no_config_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(BadRequestError, match=r"cannot read .*config\.json"):
        architecture.read_config(tmp_path)
