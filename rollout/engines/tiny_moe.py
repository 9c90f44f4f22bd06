"""A tiny Qwen3-MoE that real engines serve in tests: its configuration, weights and references.

Owner: tests of engines and updates. The references are Transformers' forward pass in float32 and
SGLang's fused layout built by hand; neither knows of our code.
"""

from __future__ import annotations

import hashlib

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

VOCAB = 300  # SGLang pads it to 320: a loader must not count those rows

CONFIG = Qwen3MoeConfig(
    vocab_size=VOCAB,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=128,
    moe_intermediate_size=64,  # 32 for each of 2 ranks: SGLang pads less on CPU
    num_experts=8,
    num_experts_per_tok=2,
    norm_topk_prob=True,
    decoder_sparse_step=1,
    max_position_embeddings=4096,
    tie_word_embeddings=True,
    eos_token_id=2,
    pad_token_id=0,
    bos_token_id=None,
    initializer_range=0.08,
    architectures=["Qwen3MoeForCausalLM"],
)


def make_weights(seed: int) -> dict[str, torch.Tensor]:
    """Weights by Hugging Face name, without the tied head; equal for equal seeds."""
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(CONFIG).float()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.7, 1.3)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    weights.pop("lm_head.weight", None)
    return weights


def reference_model(weights: dict[str, torch.Tensor]) -> Qwen3MoeForCausalLM:
    """Transformers' model with these weights."""
    model = Qwen3MoeForCausalLM(CONFIG).float().eval()
    model.load_state_dict(weights, strict=False)
    model.tie_weights()
    return model


def reference_logprobs(
    weights: dict[str, torch.Tensor], token_ids: list[int], temperature: float, banned: list[int]
) -> torch.Tensor:
    """float32[T, V] log-probs of Transformers' model: row t predicts token t + 1."""
    with torch.no_grad():
        logits = reference_model(weights)(torch.tensor([token_ids])).logits[0].float()
    logits[:, banned] = float("-inf")
    return torch.log_softmax(logits / temperature, dim=-1)


def expected_checksums(
    weights: dict[str, torch.Tensor], config: Qwen3MoeConfig = CONFIG
) -> dict[str, str]:
    """SHA-256 prefixes of SGLang's fused layout, from unfused weights."""

    def digest(tensor: torch.Tensor) -> str:
        return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()[:16]

    def expert(layer: str, index: int, part: str) -> torch.Tensor:
        return weights[f"{layer}.mlp.experts.{index}.{part}_proj.weight"]

    result = {}
    for name, tensor in weights.items():
        if "q_proj" in name:
            parts = [weights[name.replace("q_proj", f"{c}_proj")] for c in "qkv"]
            result[name.replace("q_proj", "qkv_proj")] = digest(torch.cat(parts))
        elif not any(part in name for part in ("k_proj", "v_proj", ".experts.", "embed_tokens")):
            result[name] = digest(tensor)
    for index in range(config.num_hidden_layers):
        layer = f"model.layers.{index}"
        experts = range(config.num_experts)
        w13 = [torch.cat([expert(layer, i, "gate"), expert(layer, i, "up")]) for i in experts]
        result[f"{layer}.mlp.experts.w13_weight"] = digest(torch.stack(w13))
        down = [expert(layer, i, "down") for i in experts]
        result[f"{layer}.mlp.experts.w2_weight"] = digest(torch.stack(down))
    return result
