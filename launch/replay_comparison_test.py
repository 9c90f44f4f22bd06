"""What counts as the same step, bit for bit."""

from __future__ import annotations

import json
import math

from launch.replay_comparison import Difference, compare, read_steps


def row(step: int, **more: object) -> dict[str, object]:
    base = {"stage": "rl", "step": step, "weight_version": 7, "finished_at": 1.5 * step}
    base |= {"time_step_s": 0.1 * step, "loss": 0.1, "grad_norm": 0.25}
    return base | {"staleness_histogram": {"0": 3, "1": 2}} | more


def test_times_versions_and_neighbours_are_not_compared():
    other = row(1, weight_version=0, finished_at=9.0, time_step_s=4.0, time_wait_s=1.0)
    got = compare(
        [row(1, num_groups_ready_left=3.0, lineage=1.0, tokens_per_s=2.0, mfu_step_estimate=0.1)],
        [other],
    )
    assert got.equal
    assert got.steps == (1,)
    assert got.num_values == 4  # step, loss, grad_norm, staleness_histogram


def test_one_bit_is_a_difference_and_the_loss_comes_first():
    changed = math.nextafter(0.1, 1.0)
    replayed = [row(1), row(2, loss=changed, grad_norm=0.5, staleness_histogram={"0": 5})]
    got = compare([row(1), row(2)], replayed)
    assert not got.equal
    assert got.differences == (
        Difference(2, "loss", 0.1, changed),
        Difference(2, "grad_norm", 0.25, 0.5),
        Difference(2, "staleness_histogram", {"0": 3, "1": 2}, {"0": 5}),
    )


def test_a_metric_that_one_side_lacks_and_a_signed_zero_differ():
    got = compare([row(1, loss=0.0, entropy=1.0)], [row(1, loss=-0.0)])
    assert [(d.metric, d.recorded, d.replayed) for d in got.differences] == [
        ("loss", 0.0, -0.0),
        ("entropy", 1.0, None),
    ]


def test_fewer_steps_are_compared_as_far_as_they_go():
    assert compare([row(1), row(2), row(3)], [row(1), row(2)]).steps == (1, 2)
    assert compare([row(1)], []).steps == ()


def test_rows_are_read_up_to_a_gap_and_the_last_of_a_step_counts(tmp_path):
    path = tmp_path / "rl.jsonl"
    assert read_steps(path) == []
    lines = [json.dumps(row(n, loss=loss)) for n, loss in ((1, 9.0), (1, 0.3), (2, 0.1), (4, 0.2))]
    path.write_text("\n".join(lines) + '\n{"step": 5, "lo')
    assert [(r["step"], r["loss"]) for r in read_steps(path)] == [(1, 0.3), (2, 0.1)]
