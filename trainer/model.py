"""The policy: a megatron GPT model on this rank's part of the grid, and its forward pass.

Owns the process groups of the grid and the module; `step.py` owns its optimizer. The output
layer is not megatron's: `logprobs` takes the hidden states before it, so that only trained
tokens are projected onto the vocabulary (`logprob.linear_logprobs`).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from transformers import AutoConfig

from trainer import architecture, hf_import
from trainer.batch import ExpertLayout, MicroBatch
from trainer.config import GridConfig
from trainer.device import Device
from trainer.errors import BadRequestError
from trainer.hf_bridge import BRIDGES
from trainer.logprob import VocabShard, linear_logprobs

_BUCKET_PARAMETERS = 40_000_000


def _hidden_and_weight(
    *, hidden_states: torch.Tensor, output_layer: Any, output_weight: Any, **_: Any
) -> torch.Tensor:
    """megatron's hook in place of the output layer; leaves the hidden states [T, 1, H] as they are."""
    del output_layer, output_weight
    return hidden_states


class Policy:
    """The model of this rank, wrapped for gradient reduction over data-parallel ranks."""

    def __init__(
        self,
        model_dir: Path,
        grid: GridConfig,
        device: Device,
        seed: int,
        dtype: Literal["float32", "bfloat16"] = "float32",
        layers: Literal["torch", "transformer_engine"] = "torch",
    ) -> None:
        """Builds the model of `model_dir`/config.json; `load_hf` or a checkpoint fills it.

        Raises:
          BadRequestError: config.json is missing, `architecture.check` refuses it, the grid has
            expert-parallel ranks and the model no experts, or `layers` are not installed.
        """
        if importlib.util.find_spec(layers) is None:
            raise BadRequestError(
                f"trainer.layers is {layers!r}, which is not installed here: install it, or set it "
                "to 'torch'"
            )
        self.device = device
        self.model_dir = model_dir
        self._config = architecture.read_config(model_dir)
        self.hf_config = _transformers_config(model_dir, self._config)
        if grid.expert_parallel > 1 and not architecture.family_of(self._config).has_experts:
            raise BadRequestError(
                f"the grid has expert_parallel={grid.expert_parallel}, but the model in {model_dir} "
                "has no experts; set it to 1"
            )
        _check_divides(self._config, grid)
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=grid.tensor_parallel,
                pipeline_model_parallel_size=grid.pipeline_parallel,
                expert_model_parallel_size=grid.expert_parallel,
                expert_tensor_parallel_size=1,
                distributed_timeout_minutes=device.collective_timeout_s / 60,
            )
        model_parallel_cuda_manual_seed(seed)
        bridge = BRIDGES[self._config["architectures"][0]]
        self._bridge = bridge(self.hf_config, dtype=getattr(torch, dtype))
        self.config = self._bridge.config
        self.module = self._bridge.build(layers)
        self.ddp = DistributedDataParallel(
            self.config,
            DistributedDataParallelConfig(
                use_distributed_optimizer=True,
                grad_reduce_in_fp32=True,
                check_for_nan_in_grad=False,  # step.py checks log-probs and the norm itself
                bucket_size=_BUCKET_PARAMETERS,
            ),
            self.module,
        )
        self.config.finalize_model_grads_func = finalize_model_grads

    @property
    def vocab_size(self) -> int:
        """Ids are below this."""
        return int(self.hf_config.vocab_size)

    @property
    def dtype(self) -> torch.dtype:
        """Type of weights and activations."""
        dtype: torch.dtype = self.config.params_dtype
        return dtype

    @property
    def experts(self) -> ExpertLayout | None:
        """What routers choose from; None: the model has no experts."""
        if self.config.num_moe_experts is None:
            return None
        return ExpertLayout(
            self.config.num_layers, self.config.moe_router_topk, self.config.num_moe_experts
        )

    @property
    def num_parameters(self) -> int:
        """Parameters on this rank."""
        return sum(p.numel() for p in self.module.parameters())

    def load_hf(self, model_dir: Path | None = None) -> None:
        """Reads the weights of the policy's model_dir, or of another with the same shapes.

        Raises:
          BadRequestError: there are none, or they are not exactly those of its config.json.
        """
        folder = model_dir or self.model_dir
        hf_import.check_weights(folder, architecture.tensor_shapes(self._config))
        self._bridge.load(self.module, str(folder))

    def export_named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (Hugging Face name, tensor); see HfBridge.export_named_tensors."""
        return self._bridge.export_named_tensors(self.module)

    def set_router_aux_loss(self, coefficient: float) -> None:
        """Sets the load-balancing coefficient from the next forward pass on."""
        self.config.moe_aux_loss_coeff = coefficient

    def set_recompute(self, on: bool) -> None:
        """Whether layers keep their input only, and are computed again in the backward pass."""
        self.config.recompute_granularity = "full" if on else None
        self.config.recompute_method = "uniform" if on else None
        self.config.recompute_num_layers = 1 if on else None

    @property
    def output_weight(self) -> torch.Tensor:
        """The output embedding [V, H]; the input embedding itself where they are tied."""
        if self.module.share_embeddings_and_output_weights:
            weight: torch.Tensor = self.module.shared_embedding_or_output_weight()
            return weight
        weight = self.module.output_layer.weight
        return weight

    def hidden(self, micro: MicroBatch) -> torch.Tensor:
        """Runs this rank's layers. Returns [T, H] after the final norm, whole on each tensor-parallel
        rank; on an earlier pipeline stage what goes to the next.
        """
        hidden: torch.Tensor = self.ddp(
            micro.tokens[None],
            micro.rows.position_ids[None],  # type: ignore[index]
            None,
            packed_seq_params=micro.rows,
            output_processor=_hidden_and_weight,
        )
        if not parallel_state.is_pipeline_last_stage():
            return hidden
        if self.config.sequence_parallel:  # each rank holds some of the tokens
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        return hidden[:, 0]

    def logprobs(
        self, hidden_TH: torch.Tensor, micro: MicroBatch, chunk: int, with_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs and entropies [M] of a micro-batch's trained tokens, from `hidden`."""
        weight = self.output_weight
        shard, banned = self._vocab_shard(weight.size(0), micro.banned)
        return linear_logprobs(
            hidden_TH.index_select(0, micro.slots),
            weight,
            micro.targets,
            temperature=micro.temperature,
            banned_V=banned,
            chunk=chunk,
            with_entropy=with_entropy,
            shard=shard,
        )

    def _vocab_shard(
        self, num_rows: int, banned_V: torch.Tensor | None
    ) -> tuple[VocabShard | None, torch.Tensor | None]:
        """Which ids this rank's rows are, and which of those cannot be sampled."""
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        if ranks == 1:
            return None, banned_V
        first = parallel_state.get_tensor_model_parallel_rank() * num_rows
        ids = torch.arange(first, first + num_rows, device=self.device.torch_device)
        banned = ids >= self.vocab_size  # rows that only fill up the last shard
        if banned_V is not None:
            banned |= banned_V[ids.clamp(max=self.vocab_size - 1)]
        return VocabShard(parallel_state.get_tensor_model_parallel_group(), first), banned


def _check_divides(config: dict[str, Any], grid: GridConfig) -> None:
    """Raises BadRequestError for a grid that cannot share the model out evenly."""
    shared = [
        ("tensor_parallel", grid.tensor_parallel, name)
        for name in ("vocab_size", "num_attention_heads", "num_key_value_heads", "hidden_size")
    ]
    shared.append(("pipeline_parallel", grid.pipeline_parallel, "num_hidden_layers"))
    shared.append(("expert_parallel", grid.expert_parallel, "num_experts"))
    for axis, size, name in shared:
        if size > 1 and config.get(name, 0) % size:
            raise BadRequestError(
                f"grid.{axis} is {size}, which does not divide the model's {name} {config[name]}: "
                "set it to a divisor"
            )


def _transformers_config(model_dir: Path, config: dict[str, Any]) -> Any:
    result = AutoConfig.from_pretrained(str(model_dir))
    # What transformers finds depends on its version and on the one that wrote the file.
    result.rope_theta = config["rope_theta"]
    return result
