"""SGLang's own Qwen3 models, with experts and without, for any tensor-parallel rank, in one process and without its server.

Owner: tests here. Layers take their rank from SGLang's parallel context, so a model of rank 1 of 2
can be built beside one of rank 0; its weights load, but it cannot run, for there is nobody to talk
to. Runs in the engine environment.
"""

from __future__ import annotations

import itertools
import tempfile
import types
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3MoeConfig

VOCAB = 300  # SGLang pads it to a multiple of 64 for each rank
CONFIG = Qwen3MoeConfig(
    vocab_size=VOCAB,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=64,
    moe_intermediate_size=8,
    num_experts=6,
    num_experts_per_tok=2,
    decoder_sparse_step=1,
    max_position_embeddings=256,
    architectures=["Qwen3MoeForCausalLM"],
)
DENSE_CONFIG = Qwen3Config(
    vocab_size=VOCAB,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=64,
    max_position_embeddings=256,
    tie_word_embeddings=False,
    architectures=["Qwen3ForCausalLM"],
)


def publish_settings(tensor_parallel: int) -> None:
    """Makes this process one of an engine of so many ranks. Call before the first model."""
    from sglang.srt.runtime_context import get_context
    from sglang.srt.server_args import ServerArgs

    with tempfile.TemporaryDirectory() as folder:
        CONFIG.save_pretrained(folder)
        arguments = ServerArgs(
            model_path=folder,
            device="cpu",
            dtype="float32",
            tp_size=tensor_parallel,
            attention_backend="torch_native",
            sampling_backend="pytorch",
            load_format="dummy",
            skip_tokenizer_init=True,
        )
        arguments.resolve_once()
        get_context().set_server_args(arguments)


def make_model(rank: int = 0, size: int = 1, expert_parallel: int = 1, config: Any = CONFIG) -> Any:
    """Rank `rank` of `size`, filled with a value that no test sends. `expert_parallel`: 1, or `size`."""
    from sglang.srt.models.qwen3 import Qwen3ForCausalLM
    from sglang.srt.models.qwen3_moe import Qwen3MoeForCausalLM
    from sglang.srt.runtime_context import get_parallel

    experts_divided = expert_parallel > 1
    group = types.SimpleNamespace(
        is_first_rank=rank == 0,
        is_last_rank=rank == size - 1,
        rank_in_group=rank,
        world_size=size,
        cpu_group=None,
        device_group=None,
    )
    alone = types.SimpleNamespace(
        is_first_rank=True, is_last_rank=True, rank_in_group=0, world_size=1
    )
    ranks = {
        "tp": (rank, size),
        "attn_tp": (rank, size),
        "attn_cp": (0, 1),
        "attn_dp": (0, 1),
        "moe_tp": (0, 1) if experts_divided else (rank, size),
        "moe_ep": (rank, size) if experts_divided else (0, 1),
        "moe_dp": (0, 1),
        "pp": (0, 1),
    }
    values: dict[str, Any] = {
        "pp_group": alone,
        "tp_group": group,
        "attn_tp_group": group,
        "moe_tp_group": alone if experts_divided else group,
        "moe_ep_group": group if experts_divided else alone,
    }
    for name, (own, width) in ranks.items():
        values |= {f"{name}_rank": own, f"{name}_size": width}
    torch.set_default_dtype(torch.float32)
    with get_parallel().override(**values), torch.no_grad():
        has_experts = isinstance(config, Qwen3MoeConfig)
        model = (Qwen3MoeForCausalLM if has_experts else Qwen3ForCausalLM)(config)
        for parameter in model.parameters():
            parameter.fill_(-7.0)
    return model


def make_weights(seed: int = 0, config: Any = CONFIG) -> dict[str, torch.Tensor]:
    """Every tensor of the model by Hugging Face name, each element of all unlike every other's."""
    hidden, heads, kv_heads, size = 32, 4, 2, 16
    shapes = {
        "model.embed_tokens.weight": (VOCAB, hidden),
        "lm_head.weight": (VOCAB, hidden),
        "model.norm.weight": (hidden,),
    }
    mlps: dict[str, int] = {}
    for index in range(config.num_hidden_layers):
        layer = f"model.layers.{index}."
        shapes |= {
            layer + "self_attn.q_proj.weight": (heads * size, hidden),
            layer + "self_attn.k_proj.weight": (kv_heads * size, hidden),
            layer + "self_attn.v_proj.weight": (kv_heads * size, hidden),
            layer + "self_attn.o_proj.weight": (hidden, heads * size),
            layer + "self_attn.q_norm.weight": (size,),
            layer + "self_attn.k_norm.weight": (size,),
            layer + "input_layernorm.weight": (hidden,),
            layer + "post_attention_layernorm.weight": (hidden,),
        }
        if isinstance(config, Qwen3MoeConfig):
            shapes[layer + "mlp.gate.weight"] = (CONFIG.num_experts, hidden)
            mlps |= {f"{layer}mlp.experts.{e}.": 8 for e in range(CONFIG.num_experts)}
        else:
            mlps[layer + "mlp."] = config.intermediate_size
    for prefix, width in mlps.items():
        shapes |= {
            prefix + "gate_proj.weight": (width, hidden),
            prefix + "up_proj.weight": (width, hidden),
            prefix + "down_proj.weight": (hidden, width),
        }
    count = itertools.count(seed * 1_000_000)
    weights = {}
    for name, shape in shapes.items():
        elements = torch.Size(shape).numel()
        values = torch.tensor(list(itertools.islice(count, elements)), dtype=torch.float32)
        weights[name] = values.reshape(shape)
    return weights
