"""The map against SGLang's own layers: built for each rank, loaded by SGLang, read back through it."""

from __future__ import annotations

import pytest
import torch

from rollout.engines import cpu_shim

cpu_shim.install()

from weightsync import sglang_models  # noqa: E402 (after the stand-ins)
from weightsync.engine_layout import (  # noqa: E402
    Layout,
    Slice,
    check_plan,
    check_readable,
    view,
    whole,
)
from weightsync.errors import LayoutError, PlanMismatchError  # noqa: E402
from weightsync.plan import TensorSpec  # noqa: E402
from weightsync.sglang_layers import layout_of  # noqa: E402
from weightsync.sglang_models import CONFIG, DENSE_CONFIG, make_model, make_weights  # noqa: E402

TENSOR_PARALLEL = [1, 2, 4]
"""4 has more ranks than KV heads."""


@pytest.fixture(scope="module", autouse=True)
def settings() -> None:
    sglang_models.publish_settings(4)


def specs(weights: dict[str, torch.Tensor]) -> list[TensorSpec]:
    return [
        TensorSpec(n, tuple(t.shape), str(t.dtype).removeprefix("torch."))
        for n, t in weights.items()
    ]


def parameters_of(model) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("size", TENSOR_PARALLEL)
@pytest.mark.parametrize("config", [CONFIG, DENSE_CONFIG], ids=["experts", "dense"])
def test_what_sglang_loads_lies_where_the_map_says(size, config):
    weights = make_weights(config=config)
    for rank in range(size):
        model = make_model(rank, size, config=config)
        model.load_weights(weights.items())
        layout, parameters = layout_of(model), parameters_of(model)
        check_plan(layout, specs(weights))
        check_readable(layout, parameters, specs(weights))
        num_read = 0
        for name, slices in layout.slices.items():
            for row in slices:
                live = view(parameters[row.parameter], row.target)
                assert torch.equal(live.flatten(), view(weights[name], row.source).flatten())
                num_read += live.numel()
        # Nothing that SGLang loaded lies outside the map: the rest is padding, which it zeroes.
        padding = sum(
            view(parameters[name], box).numel()
            for name, boxes in layout.padding.items()
            for box in boxes
        )
        assert num_read + padding == sum(p.numel() for p in parameters.values())
        for name, boxes in layout.padding.items():
            assert all(view(parameters[name], box).eq(0).all() for box in boxes)


@pytest.mark.parametrize("size", TENSOR_PARALLEL)
@pytest.mark.parametrize("divided", ["tensors", "experts"])
def test_the_ranks_together_hold_every_element(size, divided):
    if divided == "experts" and CONFIG.num_experts % size:
        pytest.skip("experts are divided evenly only")
    weights = make_weights()
    held = {name: torch.zeros(tensor.shape, dtype=torch.int) for name, tensor in weights.items()}
    for rank in range(size):
        layout = layout_of(make_model(rank, size, size if divided == "experts" else 1))
        check_plan(layout, specs(weights))
        for name, slices in layout.slices.items():
            for row in slices:
                view(held[name], row.source).add_(1)
    for name, count in held.items():
        assert count.min() >= 1, name
        # A rank alone, or a divided tensor, holds nothing twice; KV heads may be repeated.
        if size == 1 or ("proj" in name and "k_proj" not in name and "v_proj" not in name):
            assert count.max() == 1, name


def test_experts_of_another_rank_are_known_and_not_held():
    model = make_model(1, 2, expert_parallel=2)
    weights = make_weights()
    model.load_weights(weights.items())
    layout, parameters = layout_of(model), parameters_of(model)
    check_readable(layout, parameters, specs(weights))
    first, last = (f"model.layers.0.mlp.experts.{e}.up_proj.weight" for e in (0, 5))
    assert layout.slices[first] == []
    (row,) = layout.slices[last]
    assert torch.equal(view(parameters[row.parameter], row.target)[0], weights[last])


def test_where_some_tensors_lie_on_rank_1_of_2():
    layout = layout_of(make_model(1, 2))
    layer = "model.layers.0."
    assert layout.slices[layer + "self_attn.k_proj.weight"] == [
        Slice(((16, 32), (0, 32)), layer + "self_attn.qkv_proj.weight", ((32, 48), (0, 32)))
    ]
    assert layout.slices[layer + "self_attn.o_proj.weight"] == [
        Slice(((0, 32), (32, 64)), layer + "self_attn.o_proj.weight", ((0, 32), (0, 32)))
    ]
    assert layout.slices[layer + "mlp.experts.3.up_proj.weight"] == [
        Slice(((4, 8), (0, 32)), layer + "mlp.experts.w13_weight", ((3, 4), (4, 8), (0, 32)))
    ]
    assert layout.slices["lm_head.weight"] == [
        Slice(((160, 300), (0, 32)), "lm_head.weight", ((0, 140), (0, 32)))
    ]
    assert layout.padding["lm_head.weight"] == [((140, 160), (0, 32))]


def test_a_tied_head_is_filled_from_the_embedding():
    model = make_model()
    layout = layout_of(model).with_head_from_embedding()
    weights = make_weights()
    del weights["lm_head.weight"]
    check_plan(layout, specs(weights))
    check_readable(layout, parameters_of(model), specs(weights))
    rows = layout.slices["model.embed_tokens.weight"]
    assert [row.parameter for row in rows] == ["model.embed_tokens.weight", "lm_head.weight"]


def test_many_missing_tensors_are_counted():
    layout = Layout()
    for index in range(9):
        layout.add(f"t{index}", (1,))
    with pytest.raises(PlanMismatchError, match="lacks t1, t2, t3, t4, t5 and 3 more;"):
        check_plan(layout, [TensorSpec("t0", (1,), "float32")])


SQUARE = {"p": torch.zeros(4, 4)}


@pytest.mark.parametrize(
    ("boxes", "said"),
    [
        ({"a": ((0, 2), (0, 4))}, "tensors fill 2 of 4 of axis 0, the last of them a"),
        ({"a": ((0, 4), (0, 4)), "b": ((0, 4), (0, 4))}, "a and b lie in one place"),
        (
            {"a": ((0, 3), (0, 4)), "b": ((2, 4), (0, 4))},
            "b begins at 2 of axis 0, before the end of a at 3",
        ),
        (
            {"a": ((0, 1), (0, 4)), "b": ((2, 4), (0, 4))},
            "nothing fills 1 to 2 of axis 0, between a and b",
        ),
        (
            {"a": ((0, 2), (0, 4)), "b": ((2, 4), (0, 3))},
            "tensors fill 3 of 4 of axis 1, the last of them b",
        ),
        ({"a": ((0, 5), (0, 4))}, "tensors fill 5 of 4 of axis 0"),
        ({"a": ((0, 4),)}, "a fills 1 axes"),
        ({}, "tensors fill 0 of 4 of axis 0"),
    ],
    ids=["short", "twice", "overlap", "gap", "second_axis", "long", "axes", "none"],
)
def test_maps_that_do_not_fill_a_parameter_once_are_refused(boxes, said):
    layout = Layout()
    for name, box in boxes.items():
        layout.add(name, (1,), Slice(whole((1,)), "p", box))
    with pytest.raises(LayoutError, match=f"parameter p .*{said}.*verify_engine=false"):
        check_readable(layout, SQUARE, [])


def test_memory_that_is_laid_out_otherwise_is_refused():
    """As kernels do that want experts transposed."""
    model = make_model()
    experts = model.model.layers[0].mlp.experts
    turned = experts.w13_weight.detach().transpose(1, 2).contiguous()
    experts.w13_weight = torch.nn.Parameter(turned, requires_grad=False)
    with pytest.raises(LayoutError, match="w13_weight .*verify_engine=false"):
        check_readable(layout_of(model), parameters_of(model), specs(make_weights()))


def test_a_layer_with_scales_has_no_map():
    model = make_model()
    scale = torch.nn.Parameter(torch.ones(1), requires_grad=False)
    model.model.layers[0].self_attn.o_proj.weight_scale = scale
    with pytest.raises(LayoutError, match="o_proj.weight_scale of RowParallelLinear"):
        layout_of(model)


def test_sizes_that_sglang_widened_have_no_map(monkeypatch):
    model = make_model()
    monkeypatch.setattr(model.config, "original_moe_intermediate_size", 8, raising=False)
    layout_of(model)
    monkeypatch.setattr(model.config, "original_moe_intermediate_size", 6)
    with pytest.raises(LayoutError, match="moe_intermediate_size from 6 to 8"):
        layout_of(model)


def test_another_dtype_is_named():
    model = make_model()
    weights = make_weights()
    weights["model.norm.weight"] = weights["model.norm.weight"].to(torch.bfloat16)
    with pytest.raises(PlanMismatchError, match="tensor model.norm.weight is bfloat16"):
        check_readable(layout_of(model), parameters_of(model), specs(weights))
