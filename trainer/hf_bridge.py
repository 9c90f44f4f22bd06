"""Converts weights between Hugging Face's names and layout and megatron's, exactly.

`mbridge` knows the Qwen3-MoE mapping under Transformer Engine's parameter names; our layers use
megatron's local names, so it is shown the model through a view that renames. Values are moved,
never computed with: load then export returns every bit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from mbridge.core.util import unwrap_model
from mbridge.models.qwen3moe import Qwen3MoEBridge
from megatron.core import parallel_state

from trainer import layer_spec

_EXPERT = re.compile(r"\.mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight$")
_INPUT_NORM = re.compile(r"(layers\.\d+)\.input_layernorm\.weight$")
_HEAD, _EMBEDDING = "output_layer.weight", "model.embed_tokens.weight"


def transformer_engine_name(name: str) -> str:
    """Renames a parameter of our layers to what Transformer Engine would call it."""
    name = _EXPERT.sub(r".mlp.experts.\2.weight\1", name)
    return _INPUT_NORM.sub(r"\1.self_attention.linear_qkv.layer_norm_weight", name)


class _RenamedView:
    """A model as mbridge expects it: Transformer Engine's names over our parameters."""

    def __init__(self, model: Any) -> None:
        self._model = unwrap_model(model)
        if hasattr(self._model, "decoder"):
            self.decoder = self._model.decoder

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {transformer_engine_name(k): v for k, v in self._model.state_dict().items()}

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        expert_tp = parallel_state.get_expert_tensor_parallel_world_size()
        for name, parameter in self._model.named_parameters():
            # mbridge would gather experts over tensor-parallel ranks by an attribute of the
            # parameter even where experts are not split: a detached tensor lacks it.
            whole = ".experts." in name and expert_tp == 1
            yield transformer_engine_name(name), parameter.detach() if whole else parameter


class QwenBridge(Qwen3MoEBridge):
    """mbridge's Qwen3-MoE bridge over our layers."""

    # What our layers, or a machine without Transformer Engine, need.
    _CONFIG: ClassVar[dict[str, object]] = {
        "use_cpu_initialization": True,
        "moe_grouped_gemm": False,
        "moe_permute_fusion": False,
        "persist_layer_norm": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,
        "attention_softmax_in_fp32": True,
        "moe_router_dtype": "fp32",
        "variable_seq_lengths": True,
        # The loss arrives normalised over the global batch; see step.py.
        "calculate_per_token_loss": False,
        # On, with a coefficient that each stage sets; 0 adds nothing.
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.0,
    }

    def __init__(self, hf_config: Any, **kwargs: Any) -> None:
        super().__init__(hf_config, **kwargs)
        if hf_config.tie_word_embeddings:
            # The last of several pipeline stages has a copy of the embedding, under the head's name.
            names: dict[str, str] = {**Qwen3MoEBridge._DIRECT_MAPPING, _HEAD: _EMBEDDING}
            self._DIRECT_MAPPING = names

    def _build_base_config(self, *args: Any, **kwargs: Any) -> Any:
        kwargs.update(self._CONFIG)
        return super()._build_base_config(*args, **kwargs)

    def _get_transformer_layer_spec(self, vp_stage: int | None = None) -> Any:
        del vp_stage
        return layer_spec.layer_spec(self.config)

    def build(self) -> Any:
        """Makes this rank's GPTModel; its weights are not meaningful until `load`."""
        model = self._model_provider([])(
            parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
        )
        if hasattr(model, "rotary_pos_emb"):
            model.rotary_pos_emb.__class__ = layer_spec.PackedRotary
        return model

    def load(self, model: Any, path: str) -> None:
        """Reads a Hugging Face safetensors folder into the model."""
        with torch.no_grad():
            self.load_weights([_RenamedView(model)], path)

    def export_named_tensors(self, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields every weight as (Hugging Face name, tensor).

        All ranks must iterate it to the end; all get every tensor. A yielded tensor may share
        memory with the live parameter: copy it before the next optimizer step.
        """
        has_embedding = False
        with torch.no_grad():
            for name, tensor in self.export_weights([_RenamedView(model)]):
                if name == _EMBEDDING and has_embedding:
                    continue  # the last stage's copy
                has_embedding |= name == _EMBEDDING
                yield name, tensor.detach()
