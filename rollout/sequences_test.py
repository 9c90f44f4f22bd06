"""The sampled-token contract on written cases, and its properties on random trees of turns."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proto import trajectory_pb2 as tpb
from rollout.errors import BadRequestError, CorruptStoreError
from rollout.fakes import make_turn
from rollout.sequences import build_sequences, check_turn

SIDE, COMPACTION = tpb.TURN_KIND_SIDE, tpb.TURN_KIND_COMPACTION


def ids(sequence: tpb.TokenSequence) -> list[int]:
    return [int(i) for i in np.frombuffer(sequence.token_ids, "<i4")]


def trained(sequence: tpb.TokenSequence) -> list[int]:
    return [i for i, m in zip(ids(sequence), sequence.loss_mask, strict=True) if m]


def test_a_straight_line_is_one_sequence() -> None:
    turns = [
        make_turn("a", 0, [1, 2], [10, 11], version=3),
        make_turn("a", 1, [4], [12], history=4, version=5),
    ]
    (sequence,), totals = build_sequences(turns)
    assert ids(sequence) == [1, 2, 10, 11, 4, 12]
    assert list(sequence.loss_mask) == [0, 0, 1, 1, 0, 1]
    assert list(np.frombuffer(sequence.rollout_logprobs, "<f4")) == [0, 0, -0.5, -0.5, 0, -0.5]
    assert [(s.weight_version, s.start, s.end) for s in sequence.version_spans] == [
        (3, 2, 4),
        (5, 5, 6),
    ]
    assert sequence.oldest_weight_version == 3
    assert (totals.num_tokens, totals.num_trained_tokens, totals.num_turns) == (6, 3, 2)
    assert (totals.oldest_weight_version, totals.newest_weight_version) == (3, 5)


def test_an_abandoned_resend_is_masked() -> None:
    turns = [
        make_turn("a", 0, [1], [10]),
        make_turn("a", 1, [2], [11], history=2),
        make_turn("a", 2, [2], [12], parent=0, history=2),
    ]
    sequences, totals = build_sequences(turns)
    assert [ids(s) for s in sequences] == [[1, 10, 2, 12]]
    assert trained(sequences[0]) == [10, 12]
    assert totals.num_tokens == 6


def test_a_side_turn_is_masked_and_leaves_the_main_line_alone() -> None:
    turns = [
        make_turn("a", 0, [1], [10]),
        make_turn("a", 1, [9], [99], history=2, kind=SIDE),
        make_turn("a", 2, [2], [12], parent=0, history=2),
    ]
    sequences, _ = build_sequences(turns)
    assert [ids(s) for s in sequences] == [[1, 10, 2, 12]]
    assert trained(sequences[0]) == [10, 12]


def test_a_side_turn_after_the_last_ordinary_one_stands_in_its_line() -> None:
    turns = [
        make_turn("a", 0, [1], [10]),
        make_turn("a", 1, [9], [99], history=2, kind=SIDE),
    ]
    (sequence,), _ = build_sequences(turns)
    assert trained(sequence) == [10]


def test_compaction_opens_a_branch_and_is_trained() -> None:
    turns = [
        make_turn("a", 0, [1], [10]),
        make_turn("a", 1, [2], [20, 21], history=2, kind=COMPACTION),
        make_turn("a", 2, [5], [12], parent=-1, history=0),
    ]
    main, old = build_sequences(turns)[0]
    assert (ids(main), trained(main), main.branch_index) == ([5, 12], [12], 0)
    assert (ids(old), trained(old), old.branch_index) == ([1, 10, 2, 20, 21], [10, 20, 21], 1)


def test_text_that_the_client_cut_from_its_history_is_masked() -> None:
    turns = [
        make_turn("a", 0, [1], [10, 11, 12]),
        make_turn("a", 1, [2], [20], parent=0, history=3),  # keeps 10 and 11 only
    ]
    sequences, _ = build_sequences(turns)
    assert ids(sequences[0]) == [1, 10, 11, 2, 20]
    assert trained(sequences[0]) == [10, 11, 20]
    assert len(sequences) == 1


def test_ids_shared_by_branches_are_trained_once() -> None:
    turns = [
        make_turn("a", 0, [1], [10]),
        make_turn("a", 1, [2], [11], history=2),
        make_turn("a", 2, [3], [12], history=4),
        make_turn("a", 3, [4], [13], parent=0, history=2),
    ]
    main, branch = build_sequences(turns)[0]
    assert (ids(main), trained(main)) == ([1, 10, 4, 13], [10, 13])
    assert (ids(branch), trained(branch)) == ([1, 10, 2, 11, 3, 12], [11])


def test_missing_and_unlike_turns_are_corrupt() -> None:
    with pytest.raises(CorruptStoreError):
        build_sequences([make_turn("a", 1, [1], [2], parent=-1)])
    hot = make_turn("a", 1, [1], [2], history=2)
    hot.sampling.temperature = 0.5
    with pytest.raises(CorruptStoreError):
        build_sequences([make_turn("a", 0, [1], [2]), hot])


def test_no_turns_make_no_sequences() -> None:
    sequences, totals = build_sequences([])
    assert sequences == []
    assert totals.num_trained_tokens == 0


def broken(name: str) -> tpb.TurnRecord:
    turn = make_turn("a", 1, [1], [2, 3], history=4)
    if name == "logprobs":
        turn.rollout_logprobs = turn.rollout_logprobs[:4]
    elif name == "nan":
        turn.rollout_logprobs = np.asarray([np.nan, 0], "<f4").tobytes()
    elif name == "odd":
        turn.sampled_ids += b"x"
    elif name == "history":
        turn.history_length = 5
    elif name == "gap":
        turn.version_spans[0].start = 1
    elif name == "version":
        turn.version_spans[0].weight_version = 0
    elif name == "parent":
        turn.parent_turn_index = 1
    elif name == "kind":
        turn.kind = tpb.TURN_KIND_UNSPECIFIED
    return turn


@pytest.mark.parametrize(
    "name", ["logprobs", "nan", "odd", "history", "gap", "version", "parent", "kind"]
)
def test_broken_turns_are_refused(name: str) -> None:
    check_turn(make_turn("a", 1, [1], [2, 3], history=4), parent_length=4)
    with pytest.raises(BadRequestError):
        check_turn(broken(name), parent_length=4)


@st.composite
def trees(draw: st.DrawFn) -> list[tpb.TurnRecord]:
    """Random trees of turns whose ids are all different."""
    turns: list[tpb.TurnRecord] = []
    lengths: list[int] = []
    fresh = iter(range(100, 10_000))
    for index in range(draw(st.integers(1, 8))):
        parent = draw(st.integers(-1, index - 1))
        whole = lengths[parent] if parent >= 0 else 0
        history = draw(st.one_of(st.just(whole), st.integers(0, whole)))
        prompt = [next(fresh) for _ in range(draw(st.integers(0, 3)))]
        sampled = [next(fresh) for _ in range(draw(st.integers(1, 4)))]
        kind = draw(st.sampled_from([tpb.TURN_KIND_AGENT, SIDE, COMPACTION]))
        version = draw(st.integers(1, 4))
        turns.append(
            make_turn(
                "a",
                index,
                prompt,
                sampled,
                parent=parent,
                history=history,
                kind=kind,
                version=version,
            )
        )
        lengths.append(history + len(prompt) + len(sampled))
    return turns


def chain_ids(turns: list[tpb.TurnRecord], index: int) -> list[int]:
    if index < 0:
        return []
    turn = turns[index]
    own = np.frombuffer(turn.prompt_ids + turn.sampled_ids, "<i4").tolist()
    return chain_ids(turns, turn.parent_turn_index)[: turn.history_length] + own


def expected_trained(turns: list[tpb.TurnRecord]) -> set[int]:
    """The contract, id by id, the slow way."""
    last = max((t.turn_index for t in turns if t.kind == tpb.TURN_KIND_AGENT), default=-1)
    result: set[int] = set()
    for turn in turns:
        sampled = set(np.frombuffer(turn.sampled_ids, "<i4").tolist())
        if turn.kind == COMPACTION or turn.turn_index == last:
            result |= sampled
        elif turn.kind == tpb.TURN_KIND_AGENT:
            for later in turns[turn.turn_index + 1 :]:
                history = chain_ids(turns, later.parent_turn_index)[: later.history_length]
                result |= sampled & set(history)
    return result


@settings(deadline=None, max_examples=150)
@given(trees())
def test_random_trees_keep_the_contract(turns: list[tpb.TurnRecord]) -> None:
    sequences, totals = build_sequences(turns)
    chains = [chain_ids(turns, t.turn_index) for t in turns]
    trained_ids = [i for s in sequences for i in trained(s)]
    assert len(trained_ids) == len(set(trained_ids)), "an id is trained once"
    assert set(trained_ids) == expected_trained(turns)
    assert totals.num_trained_tokens == len(trained_ids)
    assert [s.branch_index for s in sequences] == list(range(len(sequences)))
    version_of = {
        int(i): t.version_spans[0].weight_version
        for t in turns
        for i in np.frombuffer(t.sampled_ids, "<i4")
    }
    for sequence in sequences:
        assert ids(sequence) in chains, "a sequence is what the engine saw, nothing else"
        covered = {}
        for span in sequence.version_spans:
            for position in range(span.start, span.end):
                covered[ids(sequence)[position]] = span.weight_version
        assert covered == {i: version_of[i] for i in ids(sequence) if i in version_of}
        versions = [version_of[i] for i in trained(sequence)]
        assert sequence.oldest_weight_version == min(versions, default=0)
        logprobs = np.frombuffer(sequence.rollout_logprobs, "<f4")
        assert [bool(p) for p in logprobs] == [i in version_of for i in ids(sequence)]
    versions = [version_of[i] for i in trained_ids]
    assert totals.oldest_weight_version == min(versions, default=0)
    assert totals.newest_weight_version == max(versions, default=0)
