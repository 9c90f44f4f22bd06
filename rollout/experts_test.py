"""Experts of turns: layouts, what of them becomes a sequence's, and their way over the wire."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import grpc
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proto import rollout_pb2 as pb
from proto import trajectory_pb2 as tpb
from rollout.client import BadRequestError, RolloutClient
from rollout.experts import bytes_per_token, check_experts, num_routed, read_layout
from rollout.fakes import Testbed, begin, lease, make_turn
from rollout.sequences import build_sequences

LAYOUT = tpb.ExpertLayout(num_layers=3, top_k=2, num_experts=8)
WIDE = tpb.ExpertLayout(num_layers=3, top_k=2, num_experts=300)
LARGE = tpb.ExpertLayout(num_layers=48, top_k=8, num_experts=128)
QWEN3_30B = {"num_hidden_layers": 48, "num_experts_per_tok": 8, "num_experts": 128}


def choice(ids: npt.NDArray[np.int32], layout: tpb.ExpertLayout = LAYOUT) -> bytes:
    """A made-up choice at each token, which follows from its id."""
    dtype = np.uint8 if layout.num_experts <= 256 else np.dtype("<u2")
    shape = (len(ids), layout.num_layers, layout.top_k)
    cells = ids[:, None, None] * 7 + np.arange(shape[1])[:, None] * 3 + np.arange(shape[2])
    return (cells % layout.num_experts).astype(dtype).tobytes()


def routed_turn(
    index: int,
    before: list[int],
    prompt: list[int],
    sampled: list[int],
    parent: int | None = None,
    layout: tpb.ExpertLayout = LAYOUT,
) -> tuple[tpb.TurnRecord, bytes]:
    """A turn after the ids `before`, and the choices recorded with it."""
    turn = make_turn("a", index, prompt, sampled, parent=parent, history=len(before))
    ids = np.asarray([*before, *prompt, *sampled], np.int32)
    turn.expert_layout.CopyFrom(layout)
    turn.num_routed_tokens = num_routed(len(before), len(ids))
    return turn, choice(ids[max(len(before) - 1, 0) : -1], layout)


def reader(experts: list[bytes]) -> Callable[[tpb.TurnRecord], bytes]:
    return lambda turn: experts[turn.turn_index]


@pytest.mark.parametrize("layout", [LAYOUT, WIDE], ids=["uint8", "uint16"])
def test_every_token_but_the_last_has_its_choice(layout: tpb.ExpertLayout) -> None:
    pairs = [
        routed_turn(0, [], [1, 2], [10, 11], layout=layout),
        routed_turn(1, [1, 2, 10, 11], [4], [12], layout=layout),
    ]
    turns, experts = zip(*pairs, strict=True)
    assert [t.num_routed_tokens for t in turns] == [3, 2]
    (sequence,), _ = build_sequences(turns, reader(list(experts)))
    assert sequence.routed_experts.layout == layout
    ids = np.frombuffer(sequence.token_ids, "<i4")
    assert sequence.routed_experts.ids == choice(ids[:-1], layout)
    (without,), _ = build_sequences(turns)
    assert not without.HasField("routed_experts")


def test_a_chain_with_a_turn_without_experts_has_none() -> None:
    first, experts = routed_turn(0, [], [1], [10])
    bare = make_turn("a", 1, [2], [11], history=2)
    (sequence,), _ = build_sequences([first, bare], reader([experts, b""]))
    assert not sequence.HasField("routed_experts")
    other, more = routed_turn(1, [1, 10], [2], [11], layout=WIDE)
    (sequence,), _ = build_sequences([first, other], reader([experts, more]))
    assert not sequence.HasField("routed_experts")


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_branches_have_the_choices_of_their_own_tokens(data: st.DataObject) -> None:
    turns: list[tpb.TurnRecord] = []
    experts: list[bytes] = []
    chains: list[list[int]] = []
    for index in range(data.draw(st.integers(1, 5))):
        parent = data.draw(st.integers(-1, index - 1))
        whole = chains[parent] if parent >= 0 else []
        before = whole[: data.draw(st.integers(0, len(whole)))]
        prompt = data.draw(st.lists(st.integers(0, 99), min_size=1, max_size=4))
        sampled = data.draw(st.lists(st.integers(0, 99), min_size=1, max_size=4))
        turn, recorded = routed_turn(index, before, prompt, sampled, parent)
        turns.append(turn)
        experts.append(recorded)
        chains.append([*before, *prompt, *sampled])
        check_experts(turn, len(chains[-1]), recorded)
    sequences, _ = build_sequences(turns, reader(experts))
    for sequence in sequences:
        ids = np.frombuffer(sequence.token_ids, "<i4")
        assert sequence.routed_experts.ids == choice(ids[:-1])


def test_layout_is_the_models(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B))
    layout = read_layout(tmp_path)
    assert (layout.num_layers, layout.top_k, layout.num_experts) == (48, 8, 128)
    assert bytes_per_token(layout) == 384
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 4}))
    with pytest.raises(BadRequestError, match=r"tells of no experts.*turn it off"):
        read_layout(tmp_path)
    with pytest.raises(BadRequestError, match="FileNotFoundError"):
        read_layout(tmp_path / "missing")


def recording(tmp_path: Path) -> Testbed:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(QWEN3_30B))
    engines = {"model_path": str(model), "routed_experts": True}
    return Testbed(tmp_path / "run", engines=engines)


def long_turn(attempt_id: str, num_prompt: int, num_sampled: int) -> tuple[tpb.TurnRecord, bytes]:
    rng = np.random.default_rng(0)
    prompt, sampled = rng.integers(0, 1000, num_prompt), rng.integers(0, 1000, num_sampled)
    turn = make_turn(attempt_id, 0, prompt.tolist(), sampled.tolist())
    turn.expert_layout.CopyFrom(LARGE)
    turn.num_routed_tokens = num_prompt + num_sampled - 1
    whole = np.concatenate([prompt, sampled]).astype(np.int32)
    return turn, choice(whole[:-1], LARGE)


async def leased_attempt(client: RolloutClient) -> pb.LeasedAttempt:
    await begin(client)
    return (await lease(client, 1))[0]


async def test_64k_tokens_go_in_and_out_in_messages_below_4_mib(tmp_path: Path) -> None:
    # As of Qwen3-30B-A3B: 25 MB of experts, which no message may hold.
    bed = recording(tmp_path)
    async with bed as client:
        leased = await leased_attempt(client)
        header, _ = await client.get_session(leased.session_key)
        assert header.expert_layout == LARGE
        turn, experts = long_turn(leased.attempt_id, 57_344, 8_192)
        assert len(experts) > 25_000_000
        request = pb.AppendTurnRequest(ticket_id="t", epoch=leased.epoch, turn=turn)
        await client.append_turn(request, experts)
        await client.append_turn(request, experts)  # a retry
        _, (durable,) = await client.get_session(leased.session_key)
        assert durable == turn
        await client.finish_attempt(
            pb.FinishAttemptRequest(
                attempt_id=leased.attempt_id,
                epoch=leased.epoch,
                cause=tpb.CAUSE_SUBMITTED,
                reward=1.0,
            )
        )
        # A channel that nobody has set up carries messages of 4 MiB.
        async with grpc.aio.insecure_channel(bed.address) as plain:
            fetched = [s async for s in RolloutClient(plain).fetch_sequences([leased.attempt_id])]
        (sequence,) = fetched
        assert len(sequence.token_ids) // 4 == 65_536
        assert sequence.routed_experts.ids == experts
        assert sequence.routed_experts.layout == LARGE


async def test_experts_that_do_not_fit_their_turn_are_refused(tmp_path: Path) -> None:
    async with recording(tmp_path) as client:
        leased = await leased_attempt(client)

        async def appended(change: Callable[[tpb.TurnRecord], None], experts: bytes) -> None:
            turn, _ = long_turn(leased.attempt_id, 5, 3)
            change(turn)
            request = pb.AppendTurnRequest(ticket_id="t", epoch=leased.epoch, turn=turn)
            await client.append_turn(request, experts)

        _, whole = long_turn(leased.attempt_id, 5, 3)

        def fewer(turn: tpb.TurnRecord) -> None:
            turn.num_routed_tokens = 6

        def otherwise(turn: tpb.TurnRecord) -> None:
            turn.expert_layout.num_experts = 64

        cases = [
            (lambda _: None, whole[:-1], "want 2688 B"),
            (lambda _: None, whole + b"\0", "at most 2688 B"),
            (lambda _: None, b"", "want 2688 B"),
            (fewer, whole[:-384], "want 2304 B, and 7 tokens or none"),
            (otherwise, whole, "this run records"),
        ]
        for change, experts, message in cases:
            with pytest.raises(BadRequestError, match=message):
                await appended(change, experts)
        await appended(lambda _: None, whole)


async def test_a_run_that_records_none_takes_none(tmp_path: Path) -> None:
    async with Testbed(tmp_path) as client:
        leased = await leased_attempt(client)
        header, _ = await client.get_session(leased.session_key)
        assert not header.HasField("expert_layout")
        turn, experts = long_turn(leased.attempt_id, 5, 3)
        with pytest.raises(BadRequestError, match="this run records none"):
            await client.append_turn(
                pb.AppendTurnRequest(ticket_id="t", epoch=leased.epoch, turn=turn), experts
            )
