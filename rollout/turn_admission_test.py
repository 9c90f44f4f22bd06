"""Tickets, caps and recorded turns, against a real in-process manager."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from proto import rollout_pb2 as pb
from rollout.client import (
    BadRequestError,
    CapExceededError,
    ConflictError,
    DeadlineError,
    NotFoundError,
)
from rollout.fakes import Testbed, admit, begin, lease, make_turn, play, publish


async def test_appended_turns_are_idempotent_and_conflicts_refused(tmp_path: Path) -> None:
    async with Testbed(tmp_path) as client:
        await begin(client)
        (attempt, *_) = await lease(client, 1)
        turn = make_turn(attempt.attempt_id, 0, [1, 2], [3], history=0)
        request = pb.AppendTurnRequest(ticket_id="t", epoch=attempt.epoch, turn=turn)
        await client.append_turn(request)
        await client.append_turn(request)
        other = make_turn(attempt.attempt_id, 0, [1, 2], [4], history=0)
        with pytest.raises(ConflictError):
            await client.append_turn(pb.AppendTurnRequest(epoch=attempt.epoch, turn=other))
        skipped = make_turn(attempt.attempt_id, 2, [1], [4], history=3, parent=0)
        with pytest.raises(BadRequestError):
            await client.append_turn(pb.AppendTurnRequest(epoch=attempt.epoch, turn=skipped))
        header, turns = await client.get_session(attempt.session_key)
        assert turns == [turn]
        assert header.attempt_id == attempt.attempt_id and header.sampling.temperature == 1.0


@pytest.mark.parametrize(
    ("prompt", "new", "cap"),
    [
        pytest.param(3, 99, "max_new_tokens_per_turn", id="turn"),
        pytest.param(95, 8, "max_total_tokens", id="total"),
    ],
)
async def test_caps_are_named(tmp_path: Path, prompt: int, new: int, cap: str) -> None:
    caps = {"max_new_tokens_per_turn": 8, "max_total_tokens": 100, "max_turns": 1}
    async with Testbed(tmp_path, caps=caps) as client:
        await begin(client)
        (attempt, *_) = await lease(client, 1)
        with pytest.raises(CapExceededError) as caught:
            await client.admit_turn(admit(attempt, "t", prompt, new))
        assert caught.value.cap == cap
        await client.append_turn(
            pb.AppendTurnRequest(
                epoch=attempt.epoch, turn=make_turn(attempt.attempt_id, 0, [1], [2])
            )
        )
        with pytest.raises(CapExceededError) as caught:
            await client.admit_turn(admit(attempt, "t"))
        assert caught.value.cap == "max_turns"


async def test_tickets_hold_room_until_given_back_or_reclaimed(tmp_path: Path) -> None:
    scheduler = {"growth_tokens": 4000, "high_watermark": 1.0, "ticket_ttl_s": 50.0}
    bed = Testbed(tmp_path, scheduler=scheduler)
    async with bed as client:
        await begin(client)
        first, second, *_ = await lease(client, 4)
        big = admit(first, "a", 100, 3000)
        await client.admit_turn(big)
        assert (await client.admit_turn(big)).engine == "engine0", "idempotent by ticket"
        with pytest.raises(ConflictError):
            await client.admit_turn(admit(second, "a", 100, 3000))
        with pytest.raises(DeadlineError):
            await client.admit_turn(admit(second, "b", 100, 3000), timeout_s=1.5)
        waiting = asyncio.create_task(client.admit_turn(admit(second, "b", 100, 3000)))
        while (await client.get_status()).num_turns_queued == 0:
            await asyncio.sleep(0.01)
        release = pb.ReleaseTicketRequest(ticket_id="a", engine_failed=True, detail="broken pipe")
        await client.release_ticket(release)
        assert (await waiting).engine == "engine0"
        assert bed.fake_pool.failures == [("engine0", "broken pipe")]
        await client.release_ticket(release)
        bed.clock.now_s += 51
        bed.manager.tick()
        assert (await client.get_status()).engines[0].tokens_reserved == 0


async def test_calls_are_told_what_they_may_read_of_a_kept_cache(tmp_path: Path) -> None:
    async with Testbed(tmp_path, engines={"kv_policy": "keep"}) as client:
        await begin(client)
        first, second, *_ = await lease(client, 4)

        async def granted(attempt: pb.LeasedAttempt, ticket: str) -> tuple[str, int]:
            reply = await client.admit_turn(admit(attempt, ticket))
            return reply.extra_key, reply.kv_version_lower_bound

        assert await granted(first, "a") == ("v1", 1)
        await publish(client, 2)
        assert await granted(first, "b") == ("v1", 1)
        assert await granted(second, "c") == ("v2", 2)


async def test_long_sequences_are_joined_from_parts(tmp_path: Path) -> None:
    async with Testbed(tmp_path, fetch_chunk_tokens=3) as client:
        await begin(client)
        (attempt, *_) = await lease(client, 1)
        await play(client, attempt, 1.0, num_turns=3)
        (sequence,) = [s async for s in client.fetch_sequences([attempt.attempt_id])]
        assert list(np.frombuffer(sequence.token_ids, "<i4")) == [1, 2, 3, 7, 8] * 3
        assert list(sequence.loss_mask) == [0, 0, 0, 1, 1] * 3
        assert len(sequence.rollout_logprobs) == 60
        assert len(sequence.version_spans) == 3


async def test_finished_turns_can_be_fetched_whole_or_without_content(tmp_path: Path) -> None:
    async with Testbed(tmp_path) as client:
        await begin(client)
        first, second, *_ = await lease(client, 4)
        with pytest.raises(NotFoundError):
            _ = [t async for t in client.fetch_turns([first.attempt_id])]
        await play(client, first, 1.0)
        await play(client, second, 0.0, num_turns=1)
        ids = [second.attempt_id, first.attempt_id]
        turns = [t async for t in client.fetch_turns(ids)]
        assert [(t.attempt_id, t.turn_index) for t in turns] == [
            (second.attempt_id, 0),
            (first.attempt_id, 0),
            (first.attempt_id, 1),
        ]
        assert list(np.frombuffer(turns[2].sampled_ids, "<i4")) == [7, 8]
        bare = [t async for t in client.fetch_turns(ids, omit_content=True)]
        assert not any(t.prompt_ids or t.sampled_ids or t.rollout_logprobs for t in bare)
        assert [t.version_spans[-1].end for t in bare] == [2, 2, 2]
        assert bare[2].history_length == turns[2].history_length == 5
