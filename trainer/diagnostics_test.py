from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest

from trainer.config import LossConfig
from trainer.diagnostics import (
    ActiveTokens,
    effective_sample_size,
    off_policy_metrics,
    reference_metrics,
    staleness_histogram,
)

CASES = json.loads((Path(__file__).parent / "testdata" / "loss_cases.json").read_text())
FIXTURE = CASES["fixture"]
WANTED = CASES["diagnostics_old_vs_rollout"]
MASK = np.array(list(itertools.chain(*FIXTURE["mask"])), bool)
SEQUENCE = np.repeat(np.arange(6), [len(m) for m in FIXTURE["mask"]])


def active(name: str) -> np.ndarray:
    return np.array(list(itertools.chain(*FIXTURE[name])))[MASK]


def tokens(versions: np.ndarray | None = None) -> ActiveTokens:
    advantage = np.array(CASES["advantages"]["grpo_ddof1_eps1e-6"])
    return ActiveTokens(
        new=active("logp_new"),
        old=active("logp_old"),
        rollout=active("logp_rollout"),
        advantage=advantage[SEQUENCE][MASK],
        sequence=SEQUENCE[MASK],
        versions=np.ones(MASK.sum(), np.int64) if versions is None else versions,
    )


@pytest.mark.parametrize(
    ("metric", "case"),
    [
        ("gap_total_mean_nats", "gap_mean_abs_token"),
        ("gap_total_max_nats", "gap_max_abs"),
        ("gap_total_k3_nats", "k3_kl_rollout_train"),
        ("ess_token_raw_rollout_to_trainer", "ess_token_raw"),
        ("ess_token_cap2_rollout_to_trainer", "ess_token_cap2"),
        ("ess_sequence_raw_rollout_to_trainer", "ess_seq_product"),
        ("clip_fraction_active", "clip_frac_active"),
        ("clip_fraction_any_side", "clip_frac_any_side"),
        ("tis_capped_fraction", "tis_cap_frac"),
    ],
)
def test_metric_matches_the_case(metric: str, case: str) -> None:
    got = off_policy_metrics(tokens(), LossConfig(), weight_version=1)
    assert got[metric] == pytest.approx(WANTED[case], abs=1e-12)


def test_figures_by_hand() -> None:
    """Two trajectories of one and two tokens; the second is four times as likely as it was."""
    d = np.log([1.0, 2.0, 2.0])
    zero = np.zeros(3)
    batch = ActiveTokens(
        new=d,
        old=d,
        rollout=zero,
        advantage=zero,
        sequence=np.array([0, 1, 1]),
        versions=np.ones(3, np.int64),
    )
    got = off_policy_metrics(batch, LossConfig(tis_cap=1.5), weight_version=1)
    assert got["ess_sequence_raw_rollout_to_trainer"] == pytest.approx(5**2 / (2 * 17))
    assert got["ess_sequence_cap1.5_rollout_to_trainer"] == pytest.approx(2.5**2 / (2 * 3.25))
    assert got["ess_token_cap1.5_rollout_to_trainer"] == pytest.approx(4**2 / (3 * 5.5))
    assert got["gap_engine_p99_nats"] == pytest.approx(math.log(2))
    held = reference_metrics(d, zero, LossConfig(kl="k3", kl_k3_cap=0.15))
    assert held["kl_reference_k1_nats"] == pytest.approx(2 * math.log(2) / 3)
    assert held["kl_reference_k2_nats"] == pytest.approx(math.log(2) ** 2 / 3)
    assert held["kl_reference_k3_nats"] == pytest.approx(2 * (math.log(2) - 0.5) / 3)
    assert held["kl_k3_capped_fraction"] == pytest.approx(2 / 3)


def test_engine_gap_counts_only_tokens_of_the_current_version() -> None:
    versions = np.array([2] + [1] * (MASK.sum() - 1))
    got = off_policy_metrics(tokens(versions), LossConfig(), weight_version=2)
    first = abs(active("logp_old")[0] - active("logp_rollout")[0])
    assert got["gap_engine_mean_nats"] == pytest.approx(first)
    assert "gap_engine_mean_nats" not in off_policy_metrics(tokens(), LossConfig(), 3)


def test_ess_survives_long_products() -> None:
    assert effective_sample_size(np.array([2000.0, 2000.0])) == pytest.approx(1.0)
    assert effective_sample_size(np.array([5000.0, 0.0])) == pytest.approx(0.5)


def test_nothing_active_gives_no_metrics() -> None:
    empty = np.zeros(0)
    none = ActiveTokens(empty, empty, empty, empty, empty.astype(int), empty.astype(int))
    assert off_policy_metrics(none, LossConfig(), 1) == {}


def test_staleness_counts_versions() -> None:
    assert staleness_histogram([5, 5, 3], weight_version=6) == {1: 2, 3: 1}
