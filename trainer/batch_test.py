from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trainer import batch
from trainer.errors import BadSequenceError
from trainer.testbed import VOCAB, record

CPU = torch.device("cpu")
PACKED = json.loads((Path(__file__).parent / "testdata" / "loss_cases.json").read_text())[
    "packed_sft"
]


def test_record_becomes_arrays() -> None:
    got = batch.from_proto(
        record([6, 7, 8], [0, 1, 1], logprobs=[0, -1, -2], version=3, banned=[0, 1], reward=0.5),
        VOCAB,
    )
    assert got.token_ids.tolist() == [6, 7, 8]
    assert got.loss_mask.tolist() == [False, True, True]
    assert got.versions.tolist() == [3, 3, 3]
    assert got.sampling == batch.Sampling(1.0, (0, 1))
    assert got.reward == 0.5
    assert got.oldest_version == 3


def test_first_id_is_never_trained() -> None:
    assert not batch.from_proto(record([6, 7], [1, 1]), VOCAB).loss_mask[0]


def _short_mask() -> Any:
    bad = record([6, 7], [0, 1])
    bad.loss_mask = b"\x01"
    return bad


def _no_span() -> Any:
    bad = record([6, 7], [0, 1], logprobs=[0, -1])
    bad.version_spans[0].end = 1
    return bad


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (_short_mask(), "loss_mask has 1 B, want 2 B"),
        (_no_span(), "no version span"),
        (record([6, VOCAB], [0, 1]), "want 1 or more ids in"),
        (record([], []), "want 1 or more ids in"),
    ],
    ids=["short_mask", "no_span", "id_outside", "empty"],
)
def test_broken_record_is_refused(bad: Any, message: str) -> None:
    with pytest.raises(BadSequenceError, match=message):
        batch.from_proto(bad, VOCAB)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"logprobs": [0, float("nan")]}, "nonfinite_rollout_logprob"),
        ({"logprobs": [float("inf"), -1]}, ""),
        ({"banned": [7]}, "banned_id_sampled"),
        ({"banned": [6]}, ""),
        ({"temperature": 0.0}, "greedy"),
    ],
    ids=["sound", "nan", "inf_where_masked", "banned_trained", "banned_in_prompt", "greedy"],
)
def test_untrainable_sequence_is_named(changes: dict[str, object], reason: str) -> None:
    fields: dict[str, Any] = {"logprobs": [0, -1]} | changes
    sequence = batch.from_proto(record([6, 7], [0, 1], **fields), VOCAB)
    assert batch.broken_reason(sequence) == reason


def test_stale_tokens_are_masked() -> None:
    both = record([6, 7, 8], [0, 1, 1], logprobs=[0, -1, -1], version=1)
    both.version_spans[0].end = 2
    both.version_spans.add(weight_version=5, start=2, end=3)
    fresh = batch.mask_stale(batch.from_proto(both, VOCAB), weight_version=6, max_staleness=4)
    assert fresh.loss_mask.tolist() == [False, False, True]
    assert batch.mask_stale(fresh, 5, 4).num_trained == 1


def test_packs_keep_the_budget_and_never_mix_keys() -> None:
    lengths, keys = [5, 9, 3, 4, 30], ["a", "a", "b", "a", "a"]
    packs = batch.plan_packs(lengths, keys, token_budget=10)
    assert sorted(i for pack in packs for i in pack) == [0, 1, 2, 3, 4]
    assert all(len({keys[i] for i in pack}) == 1 for pack in packs)
    assert all(sum(lengths[i] for i in p) <= 10 or len(p) == 1 for p in packs)
    assert all(lengths[a] <= lengths[b] for p in packs for a, b in itertools.pairwise(p))


def test_targets_shift_inside_each_document() -> None:
    tokens, cu = PACKED["tokens"], PACKED["cu_seqlens"]
    documents = [
        batch.from_proto(record(tokens[a:b], PACKED["target_mask"][a:b]), VOCAB)
        for a, b in itertools.pairwise(cu)
    ]
    (micro,) = batch.make_micro_batches(documents[::-1], 100, VOCAB, CPU)
    # The shorter document comes first in the pack.
    assert micro.tokens.tolist() == [21, 22, 11, 12, 13]
    assert micro.rows.position_ids is not None
    assert micro.rows.position_ids.tolist() == [0, 1, 0, 1, 2]
    assert micro.rows.cu_seqlens_q.tolist() == [0, 2, 5]
    assert micro.slots.tolist() == [0, 2, 3]
    assert micro.targets.tolist() == [22, 12, 13]
    assert micro.sequence.tolist() == [0, 1, 1]


def test_banned_ids_become_a_mask_and_split_packs() -> None:
    plain = batch.from_proto(record([6, 7], [0, 1], logprobs=[0, -1]), VOCAB)
    banned = batch.from_proto(record([6, 7], [0, 1], logprobs=[0, -1], banned=[0, 3]), VOCAB)
    micros = batch.make_micro_batches([plain, banned], 100, VOCAB, CPU)
    assert len(micros) == 2
    masks = [m.banned for m in micros if m.banned is not None]
    assert [m.nonzero()[:, 0].tolist() for m in masks] == [[0, 3]]


def test_branches_of_a_trajectory_share_a_pack_where_asked() -> None:
    rows = [
        batch.from_proto(record([6] * n, [0] + [1] * (n - 1), logprobs=[-1] * n), VOCAB)
        for n in (4, 9, 3, 5)
    ]
    micros = batch.make_micro_batches(rows, 9, VOCAB, CPU, trajectory=[0, 1, 1, 0])
    assert sorted(sorted(set(m.sequence.tolist())) for m in micros) == [[0, 3], [1, 2]]
    apart = batch.make_micro_batches(rows, 9, VOCAB, CPU)
    assert [sorted(set(m.sequence.tolist())) for m in apart] == [[0, 2], [3], [1]]


def test_sequences_without_trained_tokens_are_left_out() -> None:
    nothing = batch.from_proto(record([6, 7], [0, 0]), VOCAB)
    assert batch.make_micro_batches([nothing], 100, VOCAB, CPU) == []


def test_trained_arrays_keep_their_order() -> None:
    s = batch.from_proto(record([6, 7, 8, 9], [0, 1, 0, 1], logprobs=[0, -1, 0, -3]), VOCAB)
    (micro,) = batch.make_micro_batches([s], 100, VOCAB, CPU)
    np.testing.assert_allclose(micro.rollout.numpy(), [-1, -3])
    assert micro.versions.tolist() == [1, 1]


def test_packs_are_dealt_evenly() -> None:
    lengths = [9, 2, 7, 7, 3, 8, 1]
    hands = batch.deal(lengths, 3)
    assert sorted(i for hand in hands for i in hand) == list(range(7))
    assert sorted(map(len, hands)) == [2, 2, 3]
    tokens = [sum(lengths[i] for i in hand) for hand in hands]
    assert max(tokens) - min(tokens) <= 3
    assert batch.deal([5], 2) == [[0], []]


def test_every_rank_gets_as_many_micro_batches() -> None:
    rows = [
        batch.from_proto(record([6] * n, [0] + [1] * (n - 1), logprobs=[-1] * n), VOCAB)
        for n in (4, 9, 5)
    ]
    micros = batch.make_micro_batches(rows, 1, VOCAB, CPU, multiple=4)
    # Filled up, with nothing to train there.
    assert [m.tokens.numel() for m in micros] == [4, 8, 12]
    assert [m.targets.numel() for m in micros] == [3, 4, 8]
    assert [m.rows.cu_seqlens_q.tolist() for m in micros] == [[0, 4], [0, 5, 8], [0, 9, 12]]
    shares = [batch.own_share(micros, rank, 2, 4, CPU) for rank in range(2)]
    assert [len(share) for share in shares] == [2, 2]
    trained = sorted(m.targets.numel() for share in shares for m in share)
    assert trained == [0, 3, 4, 8]
    (filler,) = [m for share in shares for m in share if not m.targets.numel()]
    assert filler.tokens.numel() == 4
