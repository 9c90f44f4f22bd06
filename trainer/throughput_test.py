"""FLOPs by hand and against torch's own counter; shares of a known speed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from trainer import device as devices
from trainer import testbed
from trainer.throughput import Throughput


def test_a_model_by_hand() -> None:
    config = (
        testbed.TINY
        | testbed.FAMILIES["llama"]
        | {
            "vocab_size": 10,
            "hidden_size": 4,
            "intermediate_size": 6,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 2,
        }
    )
    attention, mlp, head = 4 * 4 + 2 * (2 * 4) + 4 * 4, 3 * 4 * 6, 10 * 4
    pairs = 2 * (2 * 2) * (3**2 + 5**2)
    forward = 2 * (attention + mlp) * 8 + pairs + 2 * head * 3
    assert Throughput(config, 1.0).step_flops(8, 3**2 + 5**2, num_trained=3) == 3 * forward


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_products_of_a_forward_pass_are_those_that_torch_counts(
    tmp_path: Path, family: str
) -> None:
    """transformers projects every position, and computes whole squares of attention."""
    from transformers import AutoModelForCausalLM

    folder = testbed.write_model(tmp_path, **testbed.FAMILIES[family])
    config = json.loads((folder / "config.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    length = 24
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.arange(length)[None] % testbed.VOCAB)
    ours = Throughput(config, 1.0)
    halves = 2 * length**2  # both halves of the square
    whole = ours.step_flops(length, halves, length) / 3
    assert counter.get_total_flops() == pytest.approx(whole, rel=0.01)


def test_shares_are_of_the_ranks_speed() -> None:
    config = testbed.TINY
    one, two = Throughput(config, 1e9), Throughput(config, 1e9, num_ranks=2)
    sizes = {"num_tokens": 40.0, "num_token_pairs": 1000.0, "num_trained_tokens": 5.0}
    step = sizes | {"time_step_s": 4.0, "time_update_s": 2.0}
    flops = one.step_flops(40, 1000, 5)
    figures = one.scalars(step)
    assert figures["tokens_per_s"] == 10
    assert figures["step_model_tflop"] == flops / 1e12
    assert figures["mfu_step_estimate"] == pytest.approx(flops / 4e9)
    assert figures["mfu_update_estimate"] == pytest.approx(flops / 2e9)
    assert two.scalars(step)["mfu_step_estimate"] == pytest.approx(flops / 8e9)
    assert one.scalars(step | dict.fromkeys(sizes, 0.0)) == {}


def test_a_device_tells_a_speed() -> None:
    """Any machine multiplies faster than ten million a second, and slower than 10^18."""
    speed = devices.Device("cpu", "gloo").matmul_flops_per_s(torch.float32)
    assert 1e7 < speed < 1e18
