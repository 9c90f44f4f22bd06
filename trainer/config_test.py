from __future__ import annotations

import pytest
from pydantic import ValidationError

from trainer.config import TrainerConfig

BASE = {"model_dir": "/m", "run_dir": "/r"}


def test_a_setting_of_a_stage_keeps_its_other_defaults() -> None:
    stages = {
        "pretrain": {"batch_rows": 8},
        "sft": {"optim": {"lr": 1.0}},
        "rl": {"optim": {"lr": 1e-3}},
    }
    config = TrainerConfig.model_validate(BASE | stages)
    assert (config.pretrain.optim.lr, config.pretrain.router_aux_loss) == (3e-3, 0.001)
    assert (config.sft.batch_rows, config.sft.optim.weight_decay) == (16, 0.01)
    assert (config.rl.optim.final_lr_fraction, config.rl.router_aux_loss) == (1.0, 0.0)
    assert config.rl.negative_advantage_scale == 1.0


def test_json_round_trip() -> None:
    config = TrainerConfig.model_validate(BASE)
    assert TrainerConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"grid": {"expert_parallel": 4}}, "grid.expert_parallel is 4"),
        ({"grid": {"context_parallel": 2}}, "trainer.recompute"),
        ({"rl": {"loss": {"norm": "constant"}}}, "set loss.constant_length"),
        ({"rl": {"loss": {"objective": "recompute_only"}}}, "wrong for stale data"),
        ({"rl": {"loss": {"kl_coef": 0.1}}}, "set loss.kl to 'k2' or 'k3'"),
        ({"dtype": "float16"}, "float32"),
        ({"weight_sync": {"transport": "rdma"}}, "'shm', 'tcp', 'distributed' or 'disk'"),
        ({"weight_sync": {"bucket_byte": 10}}, "weight_sync.bucket_byte"),
        ({"weight_sync": {"tcp": {"fan_out": 0}}}, "weight_sync.tcp.fan_out"),
    ],
    ids=[
        "grid",
        "context",
        "constant",
        "recompute_only",
        "kl",
        "dtype",
        "transport",
        "unknown",
        "fan_out",
    ],
)
def test_bad_settings_say_what_to_do(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TrainerConfig.model_validate(BASE | settings)
