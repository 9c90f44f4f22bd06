"""The gateway on a real socket: the sampled-token contract, caps, failures, takeover."""

from __future__ import annotations

import asyncio
import json
import random
import struct
from typing import Any

import grpc
import pytest
from aiohttp import web

from proto import trajectory_pb2 as tpb
from rollout.gateway.chat_template import ChatTemplate
from rollout.gateway.engine_client import BANNED_BIAS
from rollout.gateway.fakes import drop_connection, generation, hang
from rollout.gateway.world import World, open_world, until, user
from rollout.sequences import build_sequences


def ids_of(data: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(data) // 4}i", data))


def chain_ids(turns: list[tpb.TurnRecord], index: int) -> list[int]:
    """A turn's whole ids, from the records alone."""
    turn = turns[index]
    before = chain_ids(turns, turn.parent_turn_index) if turn.parent_turn_index >= 0 else []
    return before[: turn.history_length] + ids_of(turn.prompt_ids) + ids_of(turn.sampled_ids)


def code(body: dict[str, Any]) -> str:
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return str(body["error"]["code"])


async def test_prompts_extend_and_nothing_is_tokenised_twice(any_chat: ChatTemplate) -> None:
    async with open_world(any_chat) as world:
        key = world.manager.add_attempt()
        messages: list[dict[str, Any]] = []
        for number in range(8):
            messages.append(user(f"step {number}: é"))
            await world.say(key, messages)
        turns = world.manager.attempts[key].turns
        sent = [request["input_ids"] for request in world.engines[0].requests]
        for number, turn in enumerate(turns):
            assert turn.parent_turn_index == number - 1
            whole = chain_ids(turns, number)
            assert whole == sent[number] + ids_of(turn.sampled_ids)
            if number:
                before = chain_ids(turns, number - 1)
                assert sent[number][: len(before)] == before
                # Random ids decode to broken text, so encoding it again would differ.
        glue = any_chat.encode_delta([user("x")], add_generation_prompt=True, is_first=False)
        assert ids_of(turns[1].prompt_ids)[0] == glue[0]
        (sequence,), totals = build_sequences(turns)
        assert ids_of(sequence.token_ids) == chain_ids(turns, 7)
        assert sum(sequence.loss_mask) == sum(len(t.sampled_ids) // 4 for t in turns)
        assert totals.num_turns == 8


async def test_what_the_engine_is_asked_and_what_becomes_durable(world: World) -> None:
    key = world.manager.add_attempt()
    world.engines[0].plans = [generation([70, 71, 2], versions=[(3, 0, 1), (4, 1, 3)])]
    async with world.client.post(
        f"{world.url}/v1/chat/completions",
        json={"model": "any", "messages": [user("hi")], "max_tokens": 9, "temperature": 0.1},
        headers={"Authorization": f"Bearer {key}"},
    ) as response:
        body = await response.json()
        assert float(response.headers["x-swe-rl-decode-ms"]) >= 0
    choice = body["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == world.chat.decode([70, 71])
    assert body["usage"]["completion_tokens"] == 3
    (request,) = world.engines[0].requests
    assert request["return_logprob"] is True
    assert request["sampling_params"] == {
        "max_new_tokens": 9,
        "temperature": 1.0,  # the session's, not the client's
        "stop_token_ids": [2],
        "no_stop_trim": True,
        "skip_special_tokens": False,
        "logit_bias": {"0": BANNED_BIAS, "1": BANNED_BIAS},
    }
    (turn,) = world.manager.attempts[key].turns
    assert ids_of(turn.sampled_ids) == [70, 71, 2]
    assert struct.unpack("<3f", turn.rollout_logprobs) == (-0.125, -0.25, -0.375)
    assert [(s.weight_version, s.start, s.end) for s in turn.version_spans] == [
        (3, 0, 1),
        (4, 1, 3),
    ]
    assert turn.kv_version_lower_bound == 3
    assert turn.sampling.banned_token_ids == [0, 1]
    assert turn.finish_reason == tpb.FINISH_REASON_STOP
    assert json.loads(turn.new_messages_json) == [user("hi")]
    assert world.manager.open_tickets == set()


async def test_extra_key_travels_and_bounds_the_kv_version(world: World) -> None:
    world.manager.extra_key = "lineage-1"
    key = world.manager.add_attempt()
    world.engines[0].plans = [generation([70, 2], versions=[(5, 0, 2)])]
    await world.say(key, [user("hi")])
    assert world.engines[0].requests[0]["extra_key"] == "lineage-1"
    assert world.manager.attempts[key].turns[0].kv_version_lower_bound == 1


async def test_a_cut_turn_is_closed_by_glue_in_the_next_prompt(any_chat: ChatTemplate) -> None:
    async with open_world(any_chat) as world:
        key = world.manager.add_attempt()
        messages: list[dict[str, Any]] = [user("a")]
        world.engines[0].plans = [generation([70, 71], "length")]
        status, body = await world.ask(key, messages, max_tokens=2)
        assert (status, body["choices"][0]["finish_reason"]) == (200, "length")
        messages += [body["choices"][0]["message"], user("b")]
        await world.say(key, messages)
        second = world.manager.attempts[key].turns[1]
        delta = any_chat.encode_delta([user("b")], add_generation_prompt=True, is_first=False)
        assert ids_of(second.prompt_ids) == [any_chat.end_of_turn_id, *delta]


async def test_branch_resend_and_edit(world: World) -> None:
    key = world.manager.add_attempt()
    messages: list[dict[str, Any]] = [user("a")]
    await world.say(key, messages)
    await world.say(key, [*messages, user("b")])
    await world.say(key, [*messages, user("b2")])  # leaves at turn 0
    await world.say(key, [user("a"), {"role": "assistant", "content": "edited"}, user("c")])
    await world.say(key, [user("a")])  # delivered before: a new sample
    turns = world.manager.attempts[key].turns
    assert [t.parent_turn_index for t in turns] == [-1, 0, 0, -1, -1]
    assert world.gateway.counters.num_branches == 2 + 1
    assert world.gateway.counters.num_replayed == 0
    for index in range(len(turns)):
        sent = world.engines[0].requests[index]["input_ids"]
        assert chain_ids(turns, index) == sent + ids_of(turns[index].sampled_ids)
    build_sequences(turns)


async def test_another_gateway_takes_over_and_repeats_what_may_be_undelivered(world: World) -> None:
    key = world.manager.add_attempt()
    messages: list[dict[str, Any]] = [user("a")]
    answer = await world.say(key, messages)
    other, url = await world.another()
    # The last turn may not have arrived: the same request gets the same answer, unsampled.
    status, body = await world.ask(key, [user("a")], url)
    assert (status, body["choices"][0]["message"]["content"]) == (200, answer)
    assert other.counters.num_replayed == 1
    messages.append(user("b"))
    await world.say(key, messages, url)
    turns = world.manager.attempts[key].turns
    assert [t.parent_turn_index for t in turns] == [-1, 0]
    # The first gateway's memory is stale now: it must notice, forget and recover.
    messages.append(user("c"))
    status, body = await world.ask(key, messages)
    assert (status, code(body)) == (503, "session_moved")
    await until(lambda: not world.manager.open_tickets, "the ticket came back")
    status, _ = await world.ask(key, messages)
    assert status == 200
    assert [t.parent_turn_index for t in turns] == [-1, 0, 1]


async def test_an_answer_lost_on_its_way_is_answered_again(world: World) -> None:
    key = world.manager.add_attempt()
    gate = world.manager.append_gate = asyncio.Event()
    call = asyncio.create_task(world.ask(key, [user("a")]))
    await world.manager.append_reached.wait()
    call.cancel()
    await until(call.done, "the client left")
    await asyncio.sleep(0.05)
    gate.set()
    status, body = await world.ask(key, [user("a")])
    (turn,) = world.manager.attempts[key].turns
    assert status == 200
    assert body["choices"][0]["message"] == json.loads(turn.assistant_message_json)
    assert world.gateway.counters.num_replayed == 1
    assert world.gateway.counters.num_client_left == 1


async def test_append_is_repeated_until_durable(world: World) -> None:
    key = world.manager.add_attempt()
    world.manager.append_codes = [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED]
    await world.say(key, [user("a")])
    assert len(world.manager.attempts[key].turns) == 1


async def test_admission_is_repeated_while_no_engine_serves(world: World) -> None:
    key = world.manager.add_attempt()
    world.manager.admit_codes = [grpc.StatusCode.UNAVAILABLE] * 3
    await world.say(key, [user("a")])


async def test_no_engine_within_the_deadline(tiny: ChatTemplate) -> None:
    async with open_world(tiny, turn_deadline_s=0.2, admission_wait_s=0.1) as world:
        key = world.manager.add_attempt()
        world.manager.admit_codes = [grpc.StatusCode.UNAVAILABLE] * 1000
        status, body = await world.ask(key, [user("a")])
        assert (status, code(body)) == (503, "no_engine")


async def test_a_dead_engine_is_reported_and_another_tried(world: World) -> None:
    key = world.manager.add_attempt()
    world.engines[0].plans = [drop_connection]
    await world.say(key, [user("a")])
    assert len(world.manager.failed_tickets) == 1
    (turn,) = world.manager.attempts[key].turns
    assert turn.engine == "e1"
    assert world.manager.open_tickets == set()


async def test_engines_that_keep_dying_end_the_call_within_the_bound(tiny: ChatTemplate) -> None:
    async with open_world(tiny, max_engine_retries=2) as world:
        key = world.manager.add_attempt()
        for engine in world.engines:
            engine.plans = [drop_connection] * 9
        status, body = await world.ask(key, [user("a")])
        assert (status, code(body)) == (503, "engine_failed")
        assert len(world.manager.failed_tickets) == 3
        assert world.manager.attempts[key].turns == []


@pytest.mark.parametrize(
    "answer",
    [
        {"output_ids": [70]},
        generation([70, 2], versions=[(1, 0, 1)]),
        {**generation([70, 2]), "output_ids": [70]},
        generation([70, 2], "mystery"),
    ],
    ids=["no meta", "span gap", "ids and logprobs differ", "finish"],
)
async def test_nonsense_from_an_engine_is_never_trusted(
    world: World, answer: dict[str, Any]
) -> None:
    key = world.manager.add_attempt()
    world.engines[0].plans = [answer]
    await world.say(key, [user("a")])
    assert world.manager.attempts[key].turns[0].engine == "e1"


async def test_an_aborted_partial_goes_on_from_its_ids(world: World) -> None:
    key = world.manager.add_attempt()
    world.engines[0].plans = [
        generation([70, 71], "abort", [(1, 0, 2)]),
        generation([72, 2], versions=[(1, 0, 1), (2, 1, 2)]),
    ]
    status, _ = await world.ask(key, [user("a")], max_tokens=10)
    assert status == 200
    first, second = world.engines[0].requests
    assert second["input_ids"] == first["input_ids"] + [70, 71]
    assert second["sampling_params"]["max_new_tokens"] == 8
    (turn,) = world.manager.attempts[key].turns
    assert ids_of(turn.sampled_ids) == [70, 71, 72, 2]
    assert [(s.weight_version, s.start, s.end) for s in turn.version_spans] == [
        (1, 0, 3),
        (2, 3, 4),
    ]
    assert world.manager.failed_tickets == []
    assert world.manager.open_tickets == set()


async def test_an_engine_that_hangs_is_given_up_at_the_deadline(tiny: ChatTemplate) -> None:
    async with open_world(tiny, turn_deadline_s=0.3, admission_wait_s=0.1) as world:
        key = world.manager.add_attempt()
        world.engines[0].plans = [hang]
        status, body = await world.ask(key, [user("a")])
        assert (status, code(body)) == (503, "engine_failed")
        assert world.engines[0].aborted == [world.engines[0].requests[0]["rid"]]
        assert world.manager.open_tickets == set()


async def test_a_client_that_leaves_gives_its_ticket_back(world: World) -> None:
    key = world.manager.add_attempt()
    world.engines[0].plans = [hang]
    call = asyncio.create_task(world.ask(key, [user("a")]))
    await until(lambda: bool(world.engines[0].requests), "generate was called")
    assert len(world.manager.open_tickets) == 1
    call.cancel()
    await until(lambda: not world.manager.open_tickets, "the ticket came back")
    await until(lambda: bool(world.engines[0].aborted), "the engine was told")
    assert world.gateway.counters.num_client_left == 1
    await world.say(key, [user("a")])  # the session is free again


async def test_the_turn_cap(world: World) -> None:
    caps = tpb.TokenCaps(max_new_tokens_per_turn=8, max_total_tokens=900, max_turns=2)
    key = world.manager.add_attempt(caps=caps)
    messages: list[dict[str, Any]] = []
    for _ in range(2):
        messages.append(user("a"))
        await world.say(key, messages)
    status, body = await world.ask(key, [*messages, user("a")])
    assert (status, code(body)) == (400, "turn_limit_exceeded")
    assert len(world.engines[0].requests) == 2


async def test_token_caps_bound_the_engine_and_then_refuse(world: World) -> None:
    caps = tpb.TokenCaps(max_new_tokens_per_turn=8, max_total_tokens=12, max_turns=9)
    key = world.manager.add_attempt(caps=caps)
    messages: list[dict[str, Any]] = [user("a")]  # 6 ids
    world.engines[0].plans = [generation([70, 71, 72, 73, 74, 75], "length")]
    await world.say(key, messages)
    assert world.engines[0].requests[0]["sampling_params"]["max_new_tokens"] == 6
    status, body = await world.ask(key, [*messages, user("b")])
    assert (status, code(body)) == (400, "context_length_exceeded")
    assert body["error"]["message"].startswith("This model's maximum context length is 12 tokens.")
    assert len(world.engines[0].requests) == 1


@pytest.mark.parametrize(
    ("cap", "wanted"),
    [
        ("max_turns", "turn_limit_exceeded"),
        ("max_total_tokens", "context_length_exceeded"),
        ("hard_context_cap", "context_length_exceeded"),
    ],
)
async def test_caps_that_the_manager_finds_first(world: World, cap: str, wanted: str) -> None:
    world.manager.admit_cap = cap
    status, body = await world.ask(world.manager.add_attempt(), [user("a")])
    assert (status, code(body)) == (400, wanted)


async def test_a_fenced_session_is_told_so(world: World) -> None:
    key = world.manager.add_attempt()
    messages: list[dict[str, Any]] = [user("a")]
    await world.say(key, messages)
    world.manager.attempts[key].epoch = 2
    status, body = await world.ask(key, [*messages, user("b")])
    assert (status, code(body)) == (409, "session_fenced")
    assert len(world.gateway.sessions) == 0


@pytest.mark.parametrize("key", ["", "short", "x" * 40], ids=["none", "short", "unknown"])
async def test_keys_that_name_nothing(world: World, key: str) -> None:
    status, body = await world.ask(key, [user("a")])
    assert (status, code(body)) == (401, "invalid_api_key")


@pytest.mark.parametrize(
    ("fields", "wanted", "param"),
    [
        ({"top_p": 0.9}, "unsupported_parameter", "top_p"),
        ({"top_k": 5}, "unsupported_parameter", "top_k"),
        ({"min_p": 0.1}, "unsupported_parameter", "min_p"),
        ({"presence_penalty": 0.5}, "unsupported_parameter", "presence_penalty"),
        ({"frequency_penalty": 0.5}, "unsupported_parameter", "frequency_penalty"),
        ({"repetition_penalty": 1.1}, "unsupported_parameter", "repetition_penalty"),
        ({"n": 2}, "unsupported_parameter", "n"),
        ({"logit_bias": {"5": 1}}, "unsupported_parameter", "logit_bias"),
        ({"tools": [{"type": "function"}]}, "unsupported_parameter", "tools"),
        ({"max_tokens": 0}, "invalid_value", "max_tokens"),
        ({"surprise": 1}, "invalid_value", "surprise"),
        ({"messages": []}, "invalid_value", "messages"),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else None,
)
async def test_requests_that_would_bend_the_distribution_are_refused(
    world: World, fields: dict[str, Any], wanted: str, param: str
) -> None:
    key = world.manager.add_attempt()
    status, body = await world.ask(key, **{"messages": [user("a")], **fields})
    assert (status, code(body), body["error"]["param"]) == (400, wanted, param)
    assert world.engines[0].requests == []


async def test_neutral_values_and_text_parts_pass(world: World) -> None:
    key = world.manager.add_attempt()
    message = {"role": "user", "content": [{"type": "text", "text": "a"}], "extra": {"x": 1}}
    status, _ = await world.ask(key, [message], top_p=1, n=1, stop=[], tools=[])
    assert status == 200
    assert json.loads(world.manager.attempts[key].turns[0].new_messages_json) == [user("a")]


async def test_a_stream_opens_after_the_turn_is_durable(world: World) -> None:
    key = world.manager.add_attempt()
    world.engines[0].plans = [generation([70, 2])]
    async with world.client.post(
        f"{world.url}/v1/chat/completions",
        json={
            "model": "m",
            "messages": [user("a")],
            "stream": True,
            "stream_options": {"include_usage": True},
        },
        headers={"Authorization": f"Bearer {key}"},
    ) as response:
        assert response.content_type == "text/event-stream"
        events = (await response.text()).strip().split("\n\n")
    assert len(world.manager.attempts[key].turns) == 1
    assert events[-1] == "data: [DONE]"
    chunks = [json.loads(e.removeprefix("data: ")) for e in events[:-1]]
    assert chunks[0]["choices"][0]["delta"]["content"] == world.chat.decode([70])
    assert chunks[1]["choices"][0]["finish_reason"] == "stop"
    assert chunks[2]["usage"]["completion_tokens"] == 2


async def test_a_waiting_stream_is_pinged_and_can_still_fail(tiny: ChatTemplate) -> None:
    async with open_world(
        tiny, ping_interval_s=0.02, turn_deadline_s=0.3, admission_wait_s=0.1
    ) as world:
        key = world.manager.add_attempt()
        world.engines[0].plans = [hang]
        async with world.client.post(
            f"{world.url}/v1/chat/completions",
            json={"model": "m", "messages": [user("a")], "stream": True},
            headers={"Authorization": f"Bearer {key}"},
        ) as response:
            assert response.status == 200
            events = (await response.text()).strip().split("\n\n")
        assert events[0] == ": ping"
        assert code(json.loads(events[-1].removeprefix("data: "))) == "engine_failed"


async def test_a_stream_at_a_cap_still_gets_the_status(world: World) -> None:
    caps = tpb.TokenCaps(max_new_tokens_per_turn=8, max_total_tokens=3, max_turns=2)
    key = world.manager.add_attempt(caps=caps)
    status, body = await world.ask(key, [user("a")], stream=True)
    assert (status, code(body)) == (400, "context_length_exceeded")


async def test_many_sessions_at_once_and_one_call_at_a_time_in_each(world: World) -> None:
    keys = [world.manager.add_attempt(f"a{i}") for i in range(24)]

    async def converse(key: str) -> None:
        messages: list[dict[str, Any]] = []
        for number in range(4):
            messages.append(user(f"{key[:4]} {number}"))
            await world.say(key, messages)

    await asyncio.gather(*(converse(key) for key in keys))
    for key in keys:
        turns = world.manager.attempts[key].turns
        assert [t.parent_turn_index for t in turns] == [-1, 0, 1, 2]
    # Two calls of one session: the second sees what the first made.
    key = world.manager.add_attempt("twice")
    results = await asyncio.gather(*(world.ask(key, [user(f"q{i}")]) for i in range(3)))
    assert [status for status, _ in results] == [200] * 3
    assert [t.turn_index for t in world.manager.attempts[key].turns] == [0, 1, 2]


@pytest.mark.parametrize("seed", range(6))
async def test_random_histories_always_extend(any_chat: ChatTemplate, seed: int) -> None:
    """Any mix of going on, resending, branching, editing, failing engines and takeovers."""
    choose = random.Random(seed)
    async with open_world(any_chat) as world:
        key = world.manager.add_attempt()
        urls = [world.url, (await world.another())[1]]
        talks: list[list[dict[str, Any]]] = [[]]
        for number in range(40):
            messages = list(choose.choice(talks))
            move = choose.random()
            if move < 0.1 and messages:
                messages[-1] = {"role": "assistant", "content": f"edited {number}"}
            if move < 0.2:
                world.engines[0].plans = [drop_connection]
            if messages and move > 0.9:
                messages.pop()  # its question again
            else:
                messages.append(user(f"{number} <|im_end|>"))
            status, body = await world.ask(key, messages, choose.choice(urls))
            if status == 503:
                assert code(body) == "session_moved"
                continue
            assert status == 200, body
            talks.append([*messages, body["choices"][0]["message"]])
        turns = world.manager.attempts[key].turns
        assert len(turns) > 15
        asked = {tuple(r["input_ids"]) for engine in world.engines for r in engine.requests}
        for index, turn in enumerate(turns):
            whole = chain_ids(turns, index)
            assert tuple(whole[: len(whole) - len(turn.sampled_ids) // 4]) in asked
        for talk in talks[1:]:
            # What the client believes is what some chain of turns holds.
            assert any(spoken(turns, i) == talk for i in range(len(turns)))
        build_sequences(turns)
        await until(lambda: not world.manager.open_tickets, "every ticket came back")


def spoken(turns: list[tpb.TurnRecord], index: int) -> list[dict[str, Any]]:
    """The messages of a turn's chain, from the records alone."""
    turn = turns[index]
    before = spoken(turns, turn.parent_turn_index) if turn.parent_turn_index >= 0 else []
    return [
        *before,
        *json.loads(turn.new_messages_json),
        json.loads(turn.assistant_message_json),
    ]


async def test_counters_agree_with_both_neighbours(world: World) -> None:
    key = world.manager.add_attempt()
    messages: list[dict[str, Any]] = []
    for _ in range(3):
        messages.append(user("a"))
        await world.say(key, messages)
    await world.ask("", [user("a")])
    async with world.client.get(f"{world.url}/counters") as response:
        counts = await response.json()
    turns = world.manager.attempts[key].turns
    assert counts["num_requests"] == 4
    assert counts["num_answered"] == len(turns) == 3
    assert counts["num_generate_calls"] == len(world.engines[0].requests) == 3
    assert counts["num_sampled_tokens"] == sum(len(t.sampled_ids) // 4 for t in turns)
    assert counts["num_refused"]["unknown_key"] == 1
    async with world.client.get(f"{world.url}/metrics") as response:
        text = await response.text()
    assert "swe_rl_gateway_answered_total 3.0" in text
    assert 'swe_rl_gateway_refused_total{reason="unknown_key"} 1.0' in text
    async with world.client.get(f"{world.url}/v1/models") as response:
        assert (await response.json())["data"][0]["id"] == "swe_rl"
    async with world.client.get(f"{world.url}/health") as response:
        assert response.status == 200


async def test_least_used_sessions_leave_memory_and_come_back(tiny: ChatTemplate) -> None:
    async with open_world(tiny, max_sessions=2) as world:
        keys = [world.manager.add_attempt(f"a{i}") for i in range(3)]
        talks: list[list[dict[str, Any]]] = [[user("a")] for _ in keys]
        for key, messages in zip(keys, talks, strict=True):
            await world.say(key, messages)
        assert len(world.gateway.sessions) == 2
        talks[0].append(user("b"))
        await world.say(keys[0], talks[0])
        assert [t.parent_turn_index for t in world.manager.attempts[keys[0]].turns] == [-1, 0]
        assert world.manager.num_session_loads == 4


async def test_a_draining_gateway_sends_clients_away(world: World) -> None:
    world.gateway.draining = True
    status, body = await world.ask(world.manager.add_attempt(), [user("a")])
    assert (status, code(body)) == (503, "draining")
    async with world.client.get(f"{world.url}/health") as response:
        assert response.status == 503


async def test_a_body_above_the_limit(tiny: ChatTemplate) -> None:
    async with open_world(tiny, max_request_bytes=1000) as world:
        status, body = await world.ask(world.manager.add_attempt(), [user("a" * 5000)])
        assert (status, code(body)) == (413, "request_too_large")


ROUTED = tpb.ExpertLayout(num_layers=2, top_k=1, num_experts=50)


def rows(first: int, last: int) -> list[int]:
    """Experts at positions [first, last): layer 0 of position p chooses p, layer 1 p + 1."""
    return [expert for p in range(first, last) for expert in (p % 50, (p + 1) % 50)]


async def test_turns_are_recorded_with_the_experts_of_each_token(world: World) -> None:
    key = world.manager.add_attempt(expert_layout=ROUTED)
    messages = [user("a")]
    num_prompts = []

    def sampling(count: int) -> Any:
        async def plan(_: Any, body: dict[str, Any]) -> Any:
            start, total = body["routed_experts_start_len"], len(body["input_ids"]) + count
            assert body["return_routed_experts"] is True
            num_prompts.append((start, len(body["input_ids"])))
            ids = [70] * (count - 1) + [2]
            return web.json_response(generation(ids, experts=rows(start, total - 1)))

        return plan

    world.engines[0].plans = [sampling(3), sampling(4)]
    await world.say(key, messages)
    messages.append(user("b"))
    await world.say(key, messages)
    attempt = world.manager.attempts[key]
    first = num_prompts[0][1] + 3
    # The last id of a turn is read when the next one is sampled.
    assert [start for start, _ in num_prompts] == [0, first - 1]
    (sequence,), _ = build_sequences(attempt.turns, lambda t: attempt.experts[t.turn_index])
    total = len(sequence.token_ids) // 4
    assert total == num_prompts[1][1] + 4
    assert list(sequence.routed_experts.ids) == rows(0, total - 1)


async def test_an_aborted_turn_goes_on_with_the_experts_that_are_missing(world: World) -> None:
    key = world.manager.add_attempt(expert_layout=ROUTED)
    starts = []

    def part(ids: list[int], finish: str, gives: bool) -> Any:
        async def plan(_: Any, body: dict[str, Any]) -> Any:
            start, total = body["routed_experts_start_len"], len(body["input_ids"]) + len(ids)
            starts.append((start, len(body["input_ids"])))
            experts = rows(start, total - 1) if gives else None
            return web.json_response(generation(ids, finish, experts=experts))

        return plan

    world.engines[0].plans = [
        part([70, 71], "abort", gives=True),
        part([72], "abort", gives=False),
        part([73, 2], "stop", gives=True),
    ]
    await world.say(key, [user("a")])
    prompt = starts[0][1]
    assert starts == [(0, prompt), (prompt + 1, prompt + 2), (prompt + 1, prompt + 3)]
    attempt = world.manager.attempts[key]
    assert ids_of(attempt.turns[0].sampled_ids) == [70, 71, 72, 73, 2]
    assert list(attempt.experts[0]) == rows(0, prompt + 4)
    assert attempt.turns[0].num_routed_tokens == prompt + 4


@pytest.mark.parametrize("bad", ["missing", "short", "unknown", "noise"])
async def test_an_engine_whose_experts_do_not_fit_is_given_up(world: World, bad: str) -> None:
    key = world.manager.add_attempt(expert_layout=ROUTED)

    async def plan(_: Any, body: dict[str, Any]) -> Any:
        experts = rows(0, len(body["input_ids"]) + 1)
        answer = generation([70, 2], experts=experts)
        meta = answer["meta_info"]
        if bad == "missing":
            del meta["routed_experts"]
        elif bad == "short":
            answer = generation([70, 2], experts=experts[:-1])
        elif bad == "unknown":
            answer = generation([70, 2], experts=[*experts[:-1], 50])
        else:
            meta["routed_experts"] = "%%"
        return web.json_response(answer)

    async def sound(_: Any, body: dict[str, Any]) -> Any:
        experts = rows(0, len(body["input_ids"]) + 1)
        return web.json_response(generation([71, 2], experts=experts))

    world.engines[0].plans, world.engines[1].plans = [plan], [sound]
    await world.say(key, [user("a")])
    (turn,) = world.manager.attempts[key].turns
    assert ids_of(turn.sampled_ids) == [71, 2]
    assert len(world.manager.failed_tickets) == 1
