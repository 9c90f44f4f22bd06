from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainer.advantage import group_advantages

CASES = json.loads((Path(__file__).parent / "testdata" / "loss_cases.json").read_text())
ADVANTAGES = CASES["advantages"]
REWARDS = ADVANTAGES["rewards"]


def advantages(*args: Any, **kwargs: Any) -> np.ndarray:
    got = group_advantages(*args, **kwargs)
    assert got is not None
    return got


@pytest.mark.parametrize(
    ("kind", "case"),
    [("grpo", "grpo_ddof1_eps1e-6"), ("dr_grpo", "dr_grpo"), ("rloo", "rloo")],
)
def test_both_groups_match_the_cases(kind: Any, case: str) -> None:
    got = [*advantages(REWARDS[:3], kind), *advantages(REWARDS[3:], kind)]
    np.testing.assert_allclose(got, ADVANTAGES[case], rtol=0, atol=1e-14)


def test_failed_member_left_out_is_not_a_zero_reward() -> None:
    got = advantages([1.0, 0.0])
    wanted = ADVANTAGES["failed_member_excluded_[1,x,0]"]
    np.testing.assert_allclose(got, [wanted[0], wanted[2]], atol=1e-14)


@pytest.mark.parametrize("rewards", [[1.0, 1.0, 1.0], [0.1] * 7, [1.0], []])
def test_a_group_that_says_nothing_is_dropped(rewards: list[float]) -> None:
    assert group_advantages(rewards) is None


def test_negative_scale_touches_negative_advantages_only() -> None:
    plain = advantages([1.0, 0.0, 0.25])
    scaled = advantages([1.0, 0.0, 0.25], negative_scale=0.2)
    np.testing.assert_allclose(scaled, np.where(plain < 0, plain * 0.2, plain))


def test_nonfinite_reward_is_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        group_advantages([1.0, float("nan")])
