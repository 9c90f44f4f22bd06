"""Properties of the bucket plan, and of the descriptor that carries it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.descriptor import Descriptor, pack_plan, unpack_plan
from weightsync.errors import PlanMismatchError
from weightsync.plan import ALIGNMENT, DTYPE_BYTES, Plan, TensorSpec, make_plan

SHAPES = st.lists(st.integers(1, 9), max_size=3).map(tuple)


@st.composite
def specs(draw: st.DrawFn) -> list[TensorSpec]:
    rows = draw(st.lists(st.tuples(SHAPES, st.sampled_from(sorted(DTYPE_BYTES))), min_size=1))
    return [TensorSpec(f"t{i}", shape, dtype) for i, (shape, dtype) in enumerate(rows)]


@settings(deadline=None)
@given(specs(), st.integers(9**3 * 8, 20_000))
def test_buckets_hold_every_tensor_whole_in_order_and_within_bounds(tensors, bucket_bytes):
    plan = make_plan(tensors, bucket_bytes)
    assert [t.name for t in plan.tensors] == [t.name for t in tensors]
    covered = []
    for bucket in plan.buckets:
        end = 0
        for place, offset in enumerate(bucket.offsets):
            tensor = plan.tensors[bucket.first + place]
            assert offset % ALIGNMENT == 0
            assert offset >= end
            end = offset + tensor.num_bytes
            covered.append(tensor.name)
        assert end == bucket.num_bytes <= bucket_bytes
    assert covered == [t.name for t in tensors]
    assert plan.largest_bucket == max(b.num_bytes for b in plan.buckets)


@settings(deadline=None)
@given(specs(), st.integers(9**3 * 8, 20_000))
def test_no_bucket_could_have_taken_the_next_tensor(tensors, bucket_bytes):
    plan = make_plan(tensors, bucket_bytes)
    for bucket, following in zip(plan.buckets, plan.buckets[1:], strict=False):
        start = -(-bucket.num_bytes // ALIGNMENT) * ALIGNMENT
        assert start + plan.tensors[following.first].num_bytes > bucket_bytes


@settings(deadline=None)
@given(specs(), st.integers(9**3 * 8, 20_000))
def test_sums_lie_behind_their_tensors(tensors, bucket_bytes):
    plan = make_plan(tensors, bucket_bytes)
    for index, bucket in enumerate(plan.buckets):
        offset = plan.sums_offset(index)
        assert offset % ALIGNMENT == 0
        assert 0 <= offset - bucket.num_bytes < ALIGNMENT
        assert plan.bucket_size(index, with_sums=False) == bucket.num_bytes
        assert plan.bucket_size(index, with_sums=True) == offset + 8 * len(bucket.offsets)
    for with_sums in (False, True):
        sizes = [plan.bucket_size(index, with_sums) for index in range(len(plan.buckets))]
        assert plan.largest_size(with_sums) == max(sizes)


@given(specs(), st.integers(9**3 * 8, 20_000))
def test_a_receiver_rebuilds_the_same_plan(tensors, bucket_bytes):
    plan = make_plan(tensors, bucket_bytes)
    sent = Descriptor(
        3, 4, {"transport": "shm", "segment": "s"}, 1, pack_plan(plan), plan.digest, 5.0, True
    )
    got = Descriptor.decode(sent.encode())
    assert unpack_plan(got.plan, got.plan_digest) == plan


def test_the_digest_covers_names_shapes_dtypes_and_order_but_not_buckets():
    a, b = TensorSpec("a", (2, 3), "float32"), TensorSpec("b", (4,), "float32")
    base = make_plan([a, b], 1024).digest
    assert make_plan([a, b], 2048).digest == base
    others = [
        [b, a],
        [a],
        [TensorSpec("c", (2, 3), "float32"), b],
        [TensorSpec("a", (3, 2), "float32"), b],
        [TensorSpec("a", (2, 3), "int32"), b],
    ]
    digests = {make_plan(other, 1024).digest for other in others}
    assert len(digests) == len(others)
    assert base not in digests


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([], "got none"),
        ([TensorSpec("a", (1,), "int8")], "dtype int8"),
        ([TensorSpec("a", (0, 4), "float32")], "is empty"),
        ([TensorSpec("a", (1,), "uint8"), TensorSpec("a", (2,), "uint8")], "listed twice"),
        ([TensorSpec("model.big", (9, 9), "float32")], "model.big has 324 bytes.*bucket_bytes"),
    ],
    ids=["none", "dtype", "empty", "twice", "larger_than_a_bucket"],
)
def test_impossible_plans_are_refused(tensors, message):
    with pytest.raises(ValueError, match=message):
        make_plan(tensors, 256)


@pytest.mark.parametrize("packed", ["", "!", "AAAA", "eJyLjgUAARUAuQ=="])
def test_a_packed_plan_that_is_none_is_refused(packed):
    with pytest.raises(PlanMismatchError, match="cannot be read"):
        unpack_plan(packed, "digest")


def test_a_changed_plan_is_refused():
    plan = make_plan([TensorSpec("a", (2,), "float32")], 256)
    data = plan.to_json()
    data["tensors"][0][1] = [3]
    with pytest.raises(PlanMismatchError, match="digest"):
        Plan.from_json(data, plan.digest)


@pytest.mark.parametrize("data", [b"", b"[]", b'{"format":2}', b'{"format":4}', b"\xff"])
def test_a_descriptor_that_cannot_be_read_is_refused(data):
    with pytest.raises(PlanMismatchError):
        Descriptor.decode(data)
