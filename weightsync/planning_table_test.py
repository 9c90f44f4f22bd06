"""The planning table's arithmetic, against figures worked out by hand."""

from __future__ import annotations

import pytest

from weightsync.plan import make_plan
from weightsync.planning_table import (
    TRAINER,
    Topology,
    parent,
    qwen3_30b_a3b,
    table,
    traffic,
)

PLAN = make_plan(qwen3_30b_a3b(), 2**30)
NUM_BYTES = sum(bucket.num_bytes for bucket in PLAN.buckets)


def test_the_tensors_are_the_models():
    """30,532,122,624 parameters; 18,432 expert matrices of 3.1 MB."""
    specs = qwen3_30b_a3b()
    assert sum(t.num_elements for t in specs) == 30_532_122_624
    assert sum(".experts." in t.name for t in specs) == 48 * 128 * 3
    assert len(specs) == 3 + 48 * (9 + 384)
    assert len({t.name for t in specs}) == len(specs)


def test_buckets_carry_every_byte_and_little_more():
    assert PLAN.total_bytes == 61_064_245_248
    assert PLAN.total_bytes <= NUM_BYTES < 1.0001 * PLAN.total_bytes
    assert len(PLAN.buckets) == 57, "61.06 GB in buckets of 1.07 GB: no bucket is wasted"


@pytest.mark.parametrize(
    ("fan_out", "trainer_out", "busiest", "between", "within"),
    [
        # A chain: into node 0, on to node 1, on to node 2; 7 steps within each.
        pytest.param(1, 1, 1, 3, 21, id="chain"),
        # The trainer sends 24 times, each node receives 8 times.
        pytest.param(24, 24, 24, 24, 0, id="unicast"),
    ],
)
def test_each_link_carries(fan_out, trainer_out, busiest, between, within):
    of = traffic(PLAN, Topology(3, 8), fan_out)
    assert of.trainer_out == trainer_out * NUM_BYTES
    assert of.busiest_nic == busiest * NUM_BYTES
    assert of.between_nodes == between * NUM_BYTES
    assert of.within_nodes == within * NUM_BYTES


def test_a_tree_has_one_parent_an_engine():
    assert [parent(i, 2) for i in range(6)] == [TRAINER, TRAINER, 0, 0, 1, 1]
    assert [parent(i, 1) for i in range(3)] == [TRAINER, 0, 1]
    with pytest.raises(ValueError, match="fan_out is 0"):
        traffic(PLAN, Topology(1, 1), 0)


def test_the_table_bounds_a_chain_by_the_nic():
    """61.06 GB at 50 GB/s is 1.22 s; 24 times that is 29.3 s."""
    text = "\n".join(table(PLAN, Topology(3, 8)))
    assert "1.22 s" in text
    assert "29.31 s" in text
    assert "not measured" in text
