"""Bands by exact values: what counts, what resets, what trips and what it says."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from trainer.config import GuardsConfig, RlConfig
from trainer.guards import BANDS, Guards

HEALTHY = {
    "gap_total_mean_nats": 0.003,
    "gap_total_p99_nats": 0.02,
    "ess_token_raw_rollout_to_trainer": 0.999,
    "entropy_mean_nats": 0.06,
    "grad_norm": 0.1,
}


def observe(guards: Guards, *steps: dict[str, float]) -> list[str]:
    """Reasons, one a step."""
    return [guards.observe(n, HEALTHY | step).reason for n, step in enumerate(steps, 1)]


def test_a_healthy_step_says_nothing() -> None:
    guards = Guards(GuardsConfig(patience_steps=1))
    verdict = guards.observe(1, HEALTHY)
    assert (verdict.left, verdict.reason, verdict.scalars) == ((), "", {})
    assert guards.observe(2, {"reward_mean": 0.5}).left == (), "a step without an update"


@pytest.mark.parametrize(
    ("setting", "metric", "inside", "outside", "told"),
    [
        ("max_gap_mean_nats", "gap_total_mean_nats", 0.2, 0.2001, "above"),
        ("max_gap_p99_nats", "gap_total_p99_nats", 2.0, 2.001, "above"),
        ("min_ess_token", "ess_token_raw_rollout_to_trainer", 0.3, 0.2999, "below"),
        ("min_entropy_nats", "entropy_mean_nats", 0.001, 0.0009, "below"),
        ("max_entropy_nats", "entropy_mean_nats", 2.5, 2.501, "above"),
        ("max_grad_norm", "grad_norm", 50.0, 50.01, "above"),
    ],
)
def test_each_band_ends_where_its_default_says(
    setting: str, metric: str, inside: float, outside: float, told: str
) -> None:
    guards = Guards(GuardsConfig(patience_steps=1))
    first, second = observe(guards, {metric: inside}, {metric: outside})
    assert first == ""
    limit = getattr(GuardsConfig(), setting)
    assert second == (
        f"{metric} is {outside:.4g}, {told} trainer.rl.guards.{setting} = {limit:g} (step 2)"
    )
    off = Guards(GuardsConfig.model_validate({"patience_steps": 1, setting: "off"}))
    assert observe(off, {metric: outside}) == [""]


def test_every_band_is_a_setting_and_every_limit_a_band() -> None:
    limits = {n for n in GuardsConfig.model_fields if n.startswith(("max_", "min_"))}
    assert {band.setting for band in BANDS} == limits


def test_only_steps_in_a_row_trip_and_a_trip_begins_a_new_count() -> None:
    guards = Guards(GuardsConfig(patience_steps=3))
    bad = {"grad_norm": 60.0}
    reasons = observe(guards, bad, bad, {}, bad, bad, bad, bad, bad, bad)
    assert [n for n, reason in enumerate(reasons, 1) if reason] == [6, 9]
    assert reasons[5] == (
        "grad_norm is 60, above trainer.rl.guards.max_grad_norm = 50 (step 6, for 3 steps in a row)"
    )


def test_bands_are_counted_apart_and_a_step_without_the_value_holds_the_count() -> None:
    guards = Guards(GuardsConfig(patience_steps=2))
    assert observe(guards, {"grad_norm": 60.0}, {"entropy_mean_nats": 3.0}) == ["", ""]
    verdict = guards.observe(3, {"step_skipped": 1.0})
    assert verdict.left == ()
    verdict = guards.observe(4, HEALTHY | {"entropy_mean_nats": 3.0, "gap_total_mean_nats": 0.9})
    assert verdict.reason.startswith("entropy_mean_nats is 3, above")
    assert verdict.scalars == {
        "guard_left_max_entropy_nats": 1.0,
        "guard_left_max_gap_mean_nats": 1.0,
        "guard_tripped": 1.0,
    }


def test_a_value_that_is_not_finite_leaves_every_band_of_its_metric() -> None:
    nan, inf = float("nan"), float("inf")
    for value in (nan, inf, -inf):
        verdict = Guards(GuardsConfig(patience_steps=1)).observe(
            1, HEALTHY | {"entropy_mean_nats": value}
        )
        assert {b.setting for b in verdict.left} == {"min_entropy_nats", "max_entropy_nats"}
        assert "not within trainer.rl.guards.min_entropy_nats" in verdict.reason


def test_earlier_records_count_on_in_a_new_process() -> None:
    one = Guards(GuardsConfig(patience_steps=3))
    bad = {"grad_norm": 60.0}
    observe(one, bad, bad)
    other = Guards(GuardsConfig(patience_steps=3))
    observe(other, bad, bad)
    assert one.observe(3, HEALTHY | bad) == other.observe(3, HEALTHY | bad)


def test_settings_survive_the_file_between_launch_and_trainer() -> None:
    settings = {"guards": {"max_grad_norm": "off", "min_ess_token": 0.1, "action": "warn"}}
    config = RlConfig.model_validate(settings)
    again = RlConfig.model_validate(json.loads(config.model_dump_json()))
    assert again == config
    assert again.guards.max_grad_norm is None
    with pytest.raises(ValidationError):
        GuardsConfig.model_validate({"max_grad_norm": "never"})
