"""Bad settings are refused with a reason."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from rollout.config import RolloutConfig

GOOD: dict[str, Any] = {
    "run_dir": "/run",
    "engines": {"python": "/usr/bin/python3", "model_path": "/model"},
}


def test_defaults_are_valid_and_survive_json() -> None:
    config = RolloutConfig.model_validate(GOOD)
    assert RolloutConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        pytest.param({"typo": 1}, "typo", id="unknown_key"),
        pytest.param({"group_size": 2, "min_valid_members": 3}, "min_valid_members", id="members"),
        pytest.param({"scheduler": {"hard_context_cap": 10}}, "hard_context_cap", id="context"),
        pytest.param(
            {"sampling": {"banned_token_ids": [2], "stop_token_ids": [2]}}, "stop", id="banned"
        ),
        pytest.param(
            {"caps": {"max_new_tokens_per_turn": 9, "max_total_tokens": 8}}, "lower", id="caps"
        ),
    ],
)
def test_bad_settings_are_named(settings: dict[str, Any], word: str) -> None:
    with pytest.raises(ValidationError) as caught:
        RolloutConfig.model_validate(GOOD | settings)
    assert word in str(caught.value)
