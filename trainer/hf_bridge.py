"""Converts weights between Hugging Face's names and layout and megatron's, exactly.

`mbridge` knows the mapping of each family (architecture.py) under Transformer Engine's parameter
names; our layers use megatron's local names, so it is shown the model through a view that renames.
Values are moved, never computed with: load then export returns every bit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

import torch
from mbridge.core import LLMBridge
from mbridge.core.util import unwrap_model
from mbridge.models.llama import LLaMABridge
from mbridge.models.qwen3 import Qwen3Bridge
from mbridge.models.qwen3moe import Qwen3MoEBridge
from megatron.core import parallel_state
from megatron.core.transformer.moe.router_replay import RouterReplay

from trainer import layer_spec

_EXPERT = re.compile(r"\.mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight$")
_INPUT_NORM = re.compile(r"(layers\.\d+)\.input_layernorm\.weight$")
_DENSE_NORM = re.compile(r"(layers\.\d+)\.pre_mlp_layernorm\.weight$")
_HEAD, _EMBEDDING = "output_layer.weight", "model.embed_tokens.weight"


def transformer_engine_name(name: str, has_experts: bool) -> str:
    """Renames a parameter of our layers to what Transformer Engine would call it."""
    name = _EXPERT.sub(r".mlp.experts.\2.weight\1", name)
    if not has_experts:
        name = _DENSE_NORM.sub(r"\1.mlp.linear_fc1.layer_norm_weight", name)
    return _INPUT_NORM.sub(r"\1.self_attention.linear_qkv.layer_norm_weight", name)


class _RenamedView:
    """A model as mbridge expects it: Transformer Engine's names over our parameters."""

    def __init__(self, model: Any, has_experts: bool) -> None:
        self._model = unwrap_model(model)
        self._has_experts = has_experts
        # mbridge asks for the whole dictionary once a parameter.
        self._state = {self._name(k): v for k, v in self._model.state_dict().items()}
        if hasattr(self._model, "decoder"):
            self.decoder = self._model.decoder

    def _name(self, name: str) -> str:
        return transformer_engine_name(name, self._has_experts)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self._state

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        expert_tp = parallel_state.get_expert_tensor_parallel_world_size()
        for name, parameter in self._model.named_parameters():
            # mbridge would gather experts over tensor-parallel ranks by an attribute of the
            # parameter even where experts are not split: a detached tensor lacks it.
            whole = ".experts." in name and expert_tp == 1
            yield self._name(name), parameter.detach() if whole else parameter


class HfBridge(LLMBridge):
    """What the bridges of all families share: our layers instead of Transformer Engine's."""

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

    _DIRECT_MAPPING: dict[str, str]
    _layers: Literal["torch", "transformer_engine"] = "torch"

    def _adjust_mapping_for_shared_weights(self) -> None:
        # mbridge's own versions change the mapping of the class, for all models to come.
        if self.hf_config.tie_word_embeddings:
            # The last of several pipeline stages has a copy of the embedding, under the head's name.
            self._DIRECT_MAPPING = {**self._DIRECT_MAPPING, _HEAD: _EMBEDDING}

    def _get_gptmodel_args(self) -> dict[str, object]:
        # LLaMABridge would take any kind of scaled rotary angles for linear ones.
        return dict(LLMBridge._get_gptmodel_args(self))

    def _build_base_config(self, *args: Any, **kwargs: Any) -> Any:
        kwargs.update(self._CONFIG)
        kwargs["moe_enable_routing_replay"] = kwargs.get("num_moe_experts") is not None
        return super()._build_base_config(*args, **kwargs)

    def _get_transformer_layer_spec(self, vp_stage: int | None = None) -> Any:
        del vp_stage
        return layer_spec.layer_spec(self.config, self._layers)

    def build(self, layers: Literal["torch", "transformer_engine"] = "torch") -> Any:
        """Makes this rank's GPTModel; its weights are not meaningful until `load`.

        Args: layers are those of TrainerConfig.layers.
        """
        self._layers = layers
        model = self._model_provider([])(
            parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
        )
        # Each layer knows its own (RoutedLayer); the list would keep models alive.
        RouterReplay.clear_global_router_replay_instances()
        if layers == "torch" and hasattr(model, "rotary_pos_emb"):
            model.rotary_pos_emb.__class__ = layer_spec.PackedRotary
        return model

    def _view(self, model: Any) -> _RenamedView:
        return _RenamedView(model, has_experts=self.config.num_moe_experts is not None)

    def load(self, model: Any, path: str) -> None:
        """Reads a Hugging Face safetensors folder into the model."""
        with torch.no_grad():
            self.load_weights([self._view(model)], path)

    def export_named_tensors(self, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields every weight as (Hugging Face name, tensor).

        All ranks must iterate it to the end; all get every tensor. A yielded tensor may share
        memory with the live parameter: copy it before the next optimizer step.
        """
        has_embedding = False
        with torch.no_grad():
            for name, tensor in self.export_weights([self._view(model)]):
                if name == _EMBEDDING and has_embedding:
                    continue  # the last stage's copy
                has_embedding |= name == _EMBEDDING
                yield name, tensor.detach()


class _LlamaBridge(HfBridge, LLaMABridge):
    pass


class _Qwen3Bridge(HfBridge, Qwen3Bridge):
    pass


class _Qwen3MoeBridge(HfBridge, Qwen3MoEBridge):
    pass


BRIDGES: dict[str, type[HfBridge]] = {
    "LlamaForCausalLM": _LlamaBridge,
    "Qwen3ForCausalLM": _Qwen3Bridge,
    "Qwen3MoeForCausalLM": _Qwen3MoeBridge,
}
"""One for each of architecture.FAMILIES."""
