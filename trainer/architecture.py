"""The Hugging Face architectures that the trainer knows: their settings, and their weights by name.

Owner of what config.json may say. A setting that our layers do not compute is refused here, since
weights would load all the same and the model would be another one. Pure; imports no torch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.errors import BadRequestError


@dataclass(frozen=True)
class Family:
    """What sets the decoders of one architecture apart."""

    model_type: str  # transformers' name of the configuration
    has_experts: bool
    has_qk_norm: bool


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family("llama", has_experts=False, has_qk_norm=False),
    "Qwen3ForCausalLM": Family("qwen3", has_experts=False, has_qk_norm=True),
    "Qwen3MoeForCausalLM": Family("qwen3_moe", has_experts=True, has_qk_norm=True),
}
"""By the name that stands in config.json's `architectures`."""

# Setting: (what transformers takes where config.json lacks it, the values that our layers compute).
_FIXED: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "hidden_act": ("silu", ("silu",)),
    "attention_bias": (False, (False,)),
    "attention_dropout": (0.0, (0, None)),
    "mlp_bias": (False, (False,)),
    "rope_scaling": (None, (None,)),
    "use_sliding_window": (False, (False,)),
    "partial_rotary_factor": (1.0, (1, None)),
    "quantization_config": (None, (None,)),
}
_FIXED_WITH_EXPERTS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "norm_topk_prob": (False, (True,)),
    "decoder_sparse_step": (1, (1,)),
    "mlp_only_layers": (None, ([], None)),
}
_DEFAULT_ROPE_THETA = 10000.0
_SIZES = (
    "hidden_size",
    "vocab_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)


def read_config(model_dir: Path) -> dict[str, Any]:
    """Reads `model_dir`/config.json and checks it.

    `rope_theta` of the result is always set: newer versions of transformers write it inside
    `rope_parameters`, where older ones do not look for it.

    Raises:
      BadRequestError: the file is missing or no JSON object, or `check` refuses it.
    """
    path = model_dir / "config.json"
    try:
        config = json.loads(path.read_text())
        if not isinstance(config, dict):
            raise TypeError(f"holds a {type(config).__name__}, want an object")
    except (OSError, ValueError, TypeError) as error:
        raise BadRequestError(f"cannot read {path}: {error}") from error
    check(config, str(path))
    rope = config.get("rope_parameters") or {}
    theta = rope.get("rope_theta", config.get("rope_theta"))
    return {**config, "rope_theta": _DEFAULT_ROPE_THETA if theta is None else float(theta)}


def family_of(config: dict[str, Any]) -> Family:
    """The family of a config that `check` let pass."""
    return FAMILIES[config["architectures"][0]]


def check(config: dict[str, Any], path: str) -> None:
    """Raises BadRequestError, which names `path`, where the trainer would compute another model."""
    architectures = config.get("architectures")
    known = ", ".join(FAMILIES)
    if not isinstance(architectures, list) or len(architectures) != 1:
        raise BadRequestError(f"{path} names architectures {architectures}, want one of {known}")
    if architectures[0] not in FAMILIES:
        raise BadRequestError(
            f"{path} names architecture {architectures[0]}: this trainer knows {known}"
        )
    family = family_of(config)
    if config.get("model_type") != family.model_type:
        raise BadRequestError(
            f"{path}: model_type is {config.get('model_type')!r}, but {architectures[0]} is a "
            f"{family.model_type!r}"
        )
    fixed = _FIXED | (_FIXED_WITH_EXPERTS if family.has_experts else {})
    for name, (default, computed) in fixed.items():
        value = config.get(name, default)
        if value not in computed:
            raise BadRequestError(
                f"{path}: {name} is {value!r}{'' if name in config else ' where it is not set'}, "
                f"and this trainer computes {architectures[0]} with {name}={computed[0]!r} only"
            )
    kind = (config.get("rope_parameters") or {}).get("rope_type", "default")
    layers = set(config.get("layer_types") or ()) - {"full_attention"}
    if kind != "default" or layers:
        what = f"layer types {sorted(layers)}" if layers else f"rope_type {kind!r}"
        raise BadRequestError(
            f"{path} asks for {what}: this trainer computes full attention with plain rotary angles"
        )
    sizes: tuple[str, ...] = _SIZES
    if family.has_experts:
        sizes += ("moe_intermediate_size", "num_experts", "num_experts_per_tok")
    else:
        sizes += ("intermediate_size",)
    for name in sizes:
        value = config.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise BadRequestError(f"{path}: {name} is {value!r}, want a whole number above 0")


def head_size(config: dict[str, Any]) -> int:
    """Numbers in one attention head; transformers' default where config.json does not say."""
    if config.get("head_dim"):
        return int(config["head_dim"])
    if family_of(config).has_qk_norm:
        return 128
    return int(config["hidden_size"]) // int(config["num_attention_heads"])


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of every weight of a model, in file order."""
    family, head = family_of(config), head_size(config)
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.self_attn.q_proj.weight": (q, hidden),
            f"{layer}.self_attn.k_proj.weight": (kv, hidden),
            f"{layer}.self_attn.v_proj.weight": (kv, hidden),
            f"{layer}.self_attn.o_proj.weight": (hidden, q),
        }
        if family.has_qk_norm:
            shapes |= {
                f"{layer}.self_attn.q_norm.weight": (head,),
                f"{layer}.self_attn.k_norm.weight": (head,),
            }
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        if family.has_experts:
            shapes[f"{layer}.mlp.gate.weight"] = (config["num_experts"], hidden)
            for e in range(config["num_experts"]):
                width = config["moe_intermediate_size"]
                shapes |= _mlp(f"{layer}.mlp.experts.{e}", hidden, width)
        else:
            shapes |= _mlp(f"{layer}.mlp", hidden, config["intermediate_size"])
    shapes["model.norm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def _mlp(name: str, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{name}.gate_proj.weight": (width, hidden),
        f"{name}.up_proj.weight": (width, hidden),
        f"{name}.down_proj.weight": (hidden, width),
    }
