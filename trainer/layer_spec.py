"""Layers of the model that run on any device: norm, packed attention, rotary table, experts.

megatron-core's own layers for packed sequences need Transformer Engine. These need torch alone
and keep megatron's parameter names, so that checkpoints and conversion do not depend on which
were used. Shapes: T tokens of a pack, N heads, D head size, H hidden size.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.router_replay import RouterReplayAction
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

# Longest over shortest sequence that are padded to one length: wastes at most this much.
_MAX_PADDING = 1.25


@dataclasses.dataclass
class PackedRows(PackedSeqParams):
    """megatron's description of a pack, with the indices that our layers need.

    Computed once a micro-batch, not once a layer.
    """

    position_ids: torch.Tensor | None = None  # int64[T], restarts at each sequence
    blocks: list[RowBlock] = dataclasses.field(default_factory=list)
    experts: torch.Tensor | None = None  # integer[T, MoE layers, top k]: replayed, if given
    chosen_experts: dict[int, torch.Tensor] | None = None  # takes [T, top k] by layer, if given


@dataclasses.dataclass(frozen=True)
class RowBlock:
    """Neighbouring sequences of similar length, padded to the longest of them."""

    num_rows: int
    longest: int
    row_index: torch.Tensor  # int64[rows * longest]: token of each padded slot
    token_index: torch.Tensor  # int64[tokens of the block]: padded slot of each token


def pack_rows(lengths: list[int], device: torch.device) -> PackedRows:
    """Describes a pack of sequences of `lengths` laid end to end."""
    lens = torch.tensor(lengths, dtype=torch.int64)
    starts = torch.cumsum(lens, 0) - lens
    cu_seqlens = torch.cat([starts, lens.sum()[None]]).to(torch.int32).to(device)
    positions = torch.cat([torch.arange(n) for n in lengths])
    blocks, first = [], 0
    for i in range(1, len(lengths) + 1):
        span = lengths[first : i + 1]
        if i == len(lengths) or max(span) > _MAX_PADDING * min(span):
            blocks.append(_row_block(starts[first:i], lens[first:i], device))
            first = i
    return PackedRows(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        position_ids=positions.to(device),
        blocks=blocks,
    )


def _row_block(starts: torch.Tensor, lens: torch.Tensor, device: torch.device) -> RowBlock:
    longest = int(lens.max())
    column = torch.arange(longest)
    valid = column[None] < lens[:, None]
    # A padded slot repeats its row's first token; what is computed there is never read.
    row_index = torch.where(valid, starts[:, None] + column[None], starts[:, None])
    token_index = valid.flatten().nonzero()[:, 0]
    return RowBlock(
        num_rows=len(lens),
        longest=longest,
        row_index=row_index.flatten().to(device),
        token_index=token_index.to(device),
    )


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm, computed in float32, with a plain scale (Qwen3's form)."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Tells megatron to sum this gradient over tensor-parallel ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalises the last dimension of `x`; same shape and dtype."""
        normed = F.rms_norm(x.float(), (x.size(-1),), None, self.eps)
        return normed.to(x.dtype) * self.weight


class PackedAttention(MegatronModule):
    """Causal attention over a pack, in a few padded calls.

    One call a sequence is mostly overhead when a pack holds dozens of short ones. Neighbours of
    similar length (packs are sorted by length) share a call instead. Rows are padded on the
    right, and a causal row never looks right, so no mask is needed.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: Any,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config)
        del layer_number, attn_mask_type, attention_type
        if config.context_parallel_size != 1:
            raise ValueError("PackedAttention knows no context parallelism; use size 1")
        self.scale = softmax_scale if softmax_scale is not None else config.kv_channels**-0.5

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        packed_seq_params: PackedRows,
        **_: Any,
    ) -> torch.Tensor:
        """Attends. query, key, value: [T, N or its KV heads, D]. Returns [T, N*D]."""
        del attention_mask
        groups = query.size(1) // key.size(1)
        outputs = []
        for block in packed_seq_params.blocks:

            def padded(x: torch.Tensor, block: RowBlock = block) -> torch.Tensor:
                x = x.index_select(0, block.row_index)
                return x.view(block.num_rows, block.longest, x.size(1), x.size(2)).transpose(1, 2)

            q, k, v = padded(query), padded(key), padded(value)
            if groups > 1:
                k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
            flat = out.transpose(1, 2).reshape(block.num_rows * block.longest, -1)
            outputs.append(flat.index_select(0, block.token_index))
        return torch.cat(outputs)


class PackedRotary(RotaryEmbedding):
    """Rotary angles looked up for every token of a pack at once.

    megatron rotates a packed batch sequence by sequence unless it is handed one angle a token.
    megatron asks `get_rotary_seq_len` first and passes the answer to `forward`: we pass the
    pack itself through.
    """

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the pack when there is one, else megatron's length."""
        packed = args[4] if len(args) > 4 else kwargs.get("packed_seq_params")
        if isinstance(packed, PackedRows):
            return packed
        return super().get_rotary_seq_len(*args, **kwargs)

    def forward(self, max_seq_len: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Returns angles: [T, 1, 1, D] for a pack, [length, 1, 1, D] for a length."""
        if not isinstance(max_seq_len, PackedRows):
            return super().forward(max_seq_len, *args, **kwargs)
        table = super().forward(max_seq_len.max_seqlen_q, packed_seq=True)
        return table.index_select(0, max_seq_len.position_ids)


class RoutedLayer(TransformerLayer):
    """A layer that replays the experts of its pack, or notes those that it chose.

    Only the choice is replayed: weights of the chosen experts come from the router's own scores, so
    that it is trained (R3, arXiv 2510.11370). Each pass brings its pack along, a recomputed one
    too, so that it does not matter which packs are under way.
    """

    def forward(self, *args: Any, packed_seq_params: PackedRows, **kwargs: Any) -> Any:
        """As megatron's."""
        replay = self.mlp.router.router_replay
        replay.clear_router_replay_action()
        if packed_seq_params.experts is not None:
            chosen = packed_seq_params.experts[:, self.layer_number - 1]
            replay.target_topk_idx = _own_tokens(chosen, self.config).long()
            replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        elif packed_seq_params.chosen_experts is not None:
            replay.set_router_replay_action(RouterReplayAction.RECORD)
        output = super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)
        if packed_seq_params.chosen_experts is not None:
            packed_seq_params.chosen_experts[self.layer_number - 1] = replay.recorded_topk_idx
        replay.clear_indices()
        return output


def _own_tokens(rows: torch.Tensor, config: TransformerConfig) -> torch.Tensor:
    """Of all tokens those that this rank's router sees: a share, with sequence parallelism."""
    if not config.sequence_parallel:
        return rows
    rank = parallel_state.get_tensor_model_parallel_rank()
    return rows.chunk(config.tensor_model_parallel_size)[rank]


def layer_spec(
    config: TransformerConfig, layers: Literal["torch", "transformer_engine"] = "torch"
) -> TransformerBlockSubmodules:
    """Returns the decoder's layers for this rank's pipeline stage: ours, or Transformer Engine's."""
    if layers == "transformer_engine":
        return _transformer_engine_spec(config)
    spec: ModuleSpec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        normalization="RMSNorm",
    )
    if config.moe_enable_routing_replay:
        spec.module = RoutedLayer
    parts = spec.submodules
    parts.input_layernorm = RMSNorm
    parts.pre_mlp_layernorm = RMSNorm
    attention = parts.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = RMSNorm
        attention.k_layernorm = RMSNorm
    return TransformerBlockSubmodules(
        layer_specs=[spec] * get_num_layers_to_build(config), layer_norm=RMSNorm
    )


def _transformer_engine_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """megatron's own layers. Untested: the library wants a GPU."""
    from megatron.core.extensions.transformer_engine import TENorm
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_with_transformer_engine_spec,
    )

    spec: ModuleSpec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
    )
    if config.moe_enable_routing_replay:
        spec.module = RoutedLayer
    return TransformerBlockSubmodules(
        layer_specs=[spec] * get_num_layers_to_build(config), layer_norm=TENorm
    )
