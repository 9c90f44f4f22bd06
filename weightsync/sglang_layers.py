"""The map of an SGLang model: which layer keeps which Hugging Face tensors, and how it divides them.

Purpose: `layout_of` walks a model's modules and asks each layer for its settings. Owner:
sglang_loader. The rules follow SGLang 0.5.23 (srt/layers/linear.py, vocab_parallel_embedding.py,
moe/fused_moe_triton/layer.py). Layers are known by class name, their subclasses included: nothing of
SGLang is imported. A parameter of any other module counts as one tensor that is held whole; if that is
wrong, its shape is not the tensor's, and the update is refused by name.
Shapes come from a layer's settings, not from its memory, so that names can be checked where memory is
laid out otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from weightsync.engine_layout import UNREADABLE, Box, Layout, Slice, whole
from weightsync.errors import LayoutError

Rule = Callable[[Layout, str, Any, str, torch.Tensor], None]
"""Adds one parameter: (layout, the module's name, the module, the parameter's name in it, it)."""

_PADDED = {
    "num_attention_heads": "original_num_attention_heads",
    "num_key_value_heads": "original_total_num_kv_heads",
    "moe_intermediate_size": "original_moe_intermediate_size",
    "intermediate_size": "original_intermediate_size",
}
"""Sizes in a model's configuration, and where SGLang keeps what they were before it widened them."""

_KNOWN = ("weight", "bias", "w13_weight", "w2_weight")
"""Parameters of layers that have a rule; a quantised layer has more."""


def layout_of(model: Any) -> Layout:
    """The map of a model's parameters.

    Raises LayoutError for a layer whose parameters this module cannot map.
    """
    _refuse_padded(getattr(model, "config", None))
    layout = Layout()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for prefix, module in model.named_modules():
        rule = _rule_of(module)
        for attribute, parameter in module.named_parameters(recurse=False):
            # A parameter that two modules share is listed once.
            if names.get(id(parameter)) != _join(prefix, attribute):
                continue
            if rule is not _replicated and attribute not in _KNOWN:
                raise LayoutError(
                    f"{_join(prefix, attribute)} of {type(module).__name__} has no rule here "
                    f"(known: {', '.join(_KNOWN)}); {UNREADABLE}"
                )
            rule(layout, prefix, module, attribute, parameter)
    return layout


def _refuse_padded(config: Any) -> None:
    """On CPU, SGLang widens what cannot be divided among ranks, and zeroes the rest."""
    for name, original in _PADDED.items():
        size, was = getattr(config, name, None), getattr(config, original, None)
        if was is not None and size != was:
            raise LayoutError(
                f"SGLang widened {name} from {was} to {size} for tensor parallelism on CPU: choose "
                f"a multiple that it can divide, or fewer ranks; {UNREADABLE}"
            )


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _rank_and_size(group: Any) -> tuple[int, int]:
    """A layer without a group is not divided."""
    return (0, 1) if group is None else (group.rank_in_group, group.world_size)


def _replicated(
    layout: Layout, prefix: str, _module: Any, attribute: str, parameter: torch.Tensor
) -> None:
    name, shape = _join(prefix, attribute), tuple(parameter.shape)
    layout.add(name, shape, Slice(whole(shape), name, whole(shape)))


def _fused_rows(
    layout: Layout,
    prefix: str,
    attribute: str,
    rest: tuple[int, ...],
    parts: Iterable[tuple[str, int, int, int]],
) -> None:
    """Parts below one another: (name, rows of the whole, rows here, which share)."""
    parent, parameter = prefix.rpartition(".")[0], _join(prefix, attribute)
    at = 0
    for part, all_rows, rows, share in parts:
        layout.add(
            _join(parent, f"{part}.{attribute}"),
            (all_rows, *rest),
            Slice(
                ((share * rows, (share + 1) * rows), *whole(rest)),
                parameter,
                ((at, at + rows), *whole(rest)),
            ),
        )
        at += rows


def _row_width(module: Any, parameter: torch.Tensor) -> tuple[int, ...]:
    """The shape of one row: a bias has none."""
    return () if parameter.dim() == 1 else (module.input_size,)


def _qkv(layout: Layout, prefix: str, module: Any, attribute: str, parameter: torch.Tensor) -> None:
    _expect_leaf(prefix, "qkv_proj", module)
    rank, _ = _rank_and_size(module.tp_group)
    kv_rank, _ = _rank_and_size(module.kv_tp_group)
    kv_share = kv_rank // module.num_kv_head_replicas
    size, v_size = module.head_size, module.v_head_size
    kv_heads = module.num_kv_heads
    parts = [
        ("q_proj", module.total_num_heads * size, module.num_heads * size, rank),
        ("k_proj", module.total_num_kv_heads * size, kv_heads * size, kv_share),
        ("v_proj", module.total_num_kv_heads * v_size, kv_heads * v_size, kv_share),
    ]
    _fused_rows(layout, prefix, attribute, _row_width(module, parameter), parts)


def _gate_up(
    layout: Layout, prefix: str, module: Any, attribute: str, parameter: torch.Tensor
) -> None:
    _expect_leaf(prefix, "gate_up_proj", module)
    rank, size = _rank_and_size(module.tp_group)
    parts = [
        (name, rows, rows // size, rank)
        for name, rows in zip(("gate_proj", "up_proj"), module.output_sizes, strict=True)
    ]
    _fused_rows(layout, prefix, attribute, _row_width(module, parameter), parts)


def _divided_rows(
    layout: Layout, prefix: str, module: Any, attribute: str, parameter: torch.Tensor
) -> None:
    rank, size = _rank_and_size(module.tp_group)
    leaf, rows = prefix.rpartition(".")[2], module.output_size
    parts = [(leaf, rows, rows // size, rank)]
    _fused_rows(layout, prefix, attribute, _row_width(module, parameter), parts)


def _divided_columns(
    layout: Layout, prefix: str, module: Any, attribute: str, parameter: torch.Tensor
) -> None:
    if attribute != "weight":  # a bias is added once, by the first rank, from a whole copy
        _replicated(layout, prefix, module, attribute, parameter)
        return
    rank, size = _rank_and_size(module.tp_group)
    rows, columns = module.output_size, module.input_size // size
    name = _join(prefix, attribute)
    source = ((0, rows), (rank * columns, (rank + 1) * columns))
    target = whole((rows, columns))
    layout.add(name, (rows, module.input_size), Slice(source, name, target))


def _vocabulary(
    layout: Layout, prefix: str, module: Any, attribute: str, parameter: torch.Tensor
) -> None:
    name = _join(prefix, attribute)
    rest = () if parameter.dim() == 1 else (module.embedding_dim,)
    first, end = (
        module.shard_indices.org_vocab_start_index,
        module.shard_indices.org_vocab_end_index,
    )
    rows, all_rows = end - first, module.num_embeddings_per_partition
    slices = [Slice(((first, end), *whole(rest)), name, ((0, rows), *whole(rest)))] if rows else []
    layout.add(name, (module.org_vocab_size, *rest), *slices)
    if rows < all_rows:
        layout.padding[name] = [((rows, all_rows), *whole(rest))]


def _experts(
    layout: Layout, prefix: str, module: Any, attribute: str, _parameter: torch.Tensor
) -> None:
    if module.num_fused_shared_experts:
        raise LayoutError(f"{prefix} has shared experts among its own; {UNREADABLE}")
    config = module.moe_runner_config
    hidden, share = config.hidden_size, module.moe_tp_rank
    width = module.intermediate_size_per_partition
    total = width * module.moe_tp_size
    columns = (share * width, (share + 1) * width)
    up_first = getattr(module.quant_method, "load_up_proj_weight_first", False)
    gate_at, up_at = (width, 0) if up_first else (0, width)
    name = _join(prefix, attribute)
    for expert in range(config.num_experts):
        local = module._map_global_expert_id_to_local_expert_id(expert)
        here = local >= 0  # else another rank of the expert-parallel group has it
        at = (local, local + 1)
        own = f"{prefix}.{expert}"
        if attribute == "w2_weight":
            target: Box = (at, *whole((hidden, width)))
            row = Slice(((0, hidden), columns), name, target)
            layout.add(f"{own}.down_proj.weight", (hidden, total), *([row] if here else []))
            continue
        for part, start in (("gate_proj", gate_at), ("up_proj", up_at)):
            target = (at, (start, start + width), (0, hidden))
            row = Slice((columns, (0, hidden)), name, target)
            layout.add(f"{own}.{part}.weight", (total, hidden), *([row] if here else []))


def _expect_leaf(prefix: str, leaf: str, module: Any) -> None:
    if prefix.rpartition(".")[2] != leaf:
        raise LayoutError(
            f"{prefix} is a {type(module).__name__} of parts that have no rule here (known: "
            f"{leaf}); {UNREADABLE}"
        )


_RULES: dict[str, Rule] = {
    "QKVParallelLinear": _qkv,
    "MergedColumnParallelLinear": _gate_up,
    "ColumnParallelLinear": _divided_rows,
    "RowParallelLinear": _divided_columns,
    "VocabParallelEmbedding": _vocabulary,
    "FusedMoE": _experts,
}


def _rule_of(module: Any) -> Rule:
    for base in type(module).__mro__:
        if base.__name__ in _RULES:
            return _RULES[base.__name__]
    return _replicated
