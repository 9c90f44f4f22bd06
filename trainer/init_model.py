"""Fills a Hugging Face folder with random weights.

    python -P -m trainer.init_model --model-dir DIR --seed 0

DIR holds config.json (Qwen3MoeForCausalLM). Adds model.safetensors: float32, Hugging Face
names; matrices N(0, 0.02^2), norms 1. The same seed gives the same bytes.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_STD = 0.02


def tensor_shapes(config: dict[str, object]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of every weight of a Qwen3-MoE config, in file order. Pure."""

    def size(name: str) -> int:
        value = config[name]
        assert isinstance(value, int), name
        return value

    hidden, vocab, head = size("hidden_size"), size("vocab_size"), size("head_dim")
    width, experts = size("moe_intermediate_size"), size("num_experts")
    q, kv = size("num_attention_heads") * head, size("num_key_value_heads") * head
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for i in range(size("num_hidden_layers")):
        layer = f"model.layers.{i}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.self_attn.q_proj.weight": (q, hidden),
            f"{layer}.self_attn.k_proj.weight": (kv, hidden),
            f"{layer}.self_attn.v_proj.weight": (kv, hidden),
            f"{layer}.self_attn.o_proj.weight": (hidden, q),
            f"{layer}.self_attn.q_norm.weight": (head,),
            f"{layer}.self_attn.k_norm.weight": (head,),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
            f"{layer}.mlp.gate.weight": (experts, hidden),
        }
        for e in range(experts):
            shapes |= {
                f"{layer}.mlp.experts.{e}.gate_proj.weight": (width, hidden),
                f"{layer}.mlp.experts.{e}.up_proj.weight": (width, hidden),
                f"{layer}.mlp.experts.{e}.down_proj.weight": (hidden, width),
            }
    shapes["model.norm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def random_weights(config: dict[str, object], seed: int) -> dict[str, torch.Tensor]:
    """Draws the weights. Norms (one-dimensional) are 1."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.ones(shape)
        if len(shape) == 1
        else torch.randn(shape, generator=generator) * _STD
        for name, shape in tensor_shapes(config).items()
    }


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(description="Fill a model folder with random weights.")
    parser.add_argument("--model-dir", type=Path, required=True, help="folder with config.json")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights")
    args = parser.parse_args(argv)
    try:
        config = json.loads((args.model_dir / "config.json").read_text())
        architectures = config.get("architectures")
        if architectures != ["Qwen3MoeForCausalLM"]:
            raise ValueError(f"config.json names {architectures}, want Qwen3MoeForCausalLM")
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    from safetensors.torch import save_file

    weights = random_weights(config, args.seed)
    partial = args.model_dir / ".model.safetensors.partial"
    save_file(weights, partial, metadata={"format": "pt"})
    partial.chmod(0o644)  # safetensors writes files that only their owner may read
    partial.replace(args.model_dir / "model.safetensors")
    count = sum(t.numel() for t in weights.values())
    print(f"{args.model_dir}/model.safetensors: {len(weights)} tensors, {count} parameters")
    return 0


if __name__ == "__main__":
    sys.exit(main())
