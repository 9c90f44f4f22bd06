"""Publications from real megatron ranks to two real SGLang engines, in the middle of sessions that
go through the real gateway and manager, under both KV policies and over both transports.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from safetensors.torch import save_file

from proto import rollout_pb2 as pb
from proto import trajectory_pb2 as tpb
from rollout.client import write_sequences
from rollout.engines.tiny_moe import expected_checksums, make_weights, reference_model
from tests import kv_replay
from tests.live_engines import Trainer, World, open_world

NUM_SESSIONS = 8
MAX_TURNS = 36
TOLERANCE_NATS = 1e-5
# (ranks of the trainer, transport) of versions 2, 3, 4; version 1 is there before the sessions. The
# list begins again while too few publications came in the middle of a turn.
PUBLICATIONS = [("tp2ep2", "tcp"), ("tp2ep2", "shm"), ("one", "tcp")]
MAX_PUBLICATIONS = 7
TOKENS_BETWEEN = 2200


async def publish(world: World, trainer: Trainer, version: int, transport: str) -> None:
    """A new version on both engines: bit for bit the trainer's, by the engines' own account."""
    weights = make_weights(version)
    save_file(weights, world.model_dir / "model.safetensors", metadata={"format": "pt"})
    answer = await trainer.order(do="publish", version=version, transport=transport)
    assert sorted(answer["engines"]) == ["engine0", "engine1"]
    assert answer["num_bytes"] == sum(tensor.nbytes for tensor in weights.values())
    expected = expected_checksums(weights)
    for engine in answer["engines"]:
        found = await world.checksums(engine)
        assert {name: found[name] for name in expected} == expected


async def play_through(world: World) -> tuple[list[str], int]:
    """Sessions during which three versions or more arrive; returns their attempts, and the last."""
    one = await world.start_trainer()
    trainers = {"one": one, "tp2ep2": await world.start_trainer(2, 2)}
    await publish(world, one, 1, "shm")
    leased = await world.lease(NUM_SESSIONS)
    stop = asyncio.Event()
    version, goal = 1, TOKENS_BETWEEN
    async with asyncio.TaskGroup() as group:
        for attempt in leased:
            group.create_task(world.play(attempt, stop, MAX_TURNS))
        await tokens_sampled(world, goal)
        while version <= len(PUBLICATIONS) or num_split(world, leased) < NUM_SESSIONS:
            assert version <= MAX_PUBLICATIONS, "too few updates came in the middle of a turn"
            ranks, transport = PUBLICATIONS[(version - 1) % len(PUBLICATIONS)]
            version, goal = version + 1, goal + TOKENS_BETWEEN
            await publish(world, trainers[ranks], version, transport)
            await tokens_sampled(world, goal)
        stop.set()
    return [attempt.attempt_id for attempt in leased], version


def num_split(world: World, leased: list[pb.LeasedAttempt]) -> int:
    """Turns so far that an update came into."""
    held = [world.manager.attempts.by_session(attempt.session_key) for attempt in leased]
    turns = [turn for attempt in held for turn in world.manager.sessions.turns(attempt)]
    return sum(len(turn.version_spans) > 1 for turn in turns)


async def tokens_sampled(world: World, count: int) -> None:
    async with asyncio.timeout(300):
        while (await world.client.get_status()).num_sampled_tokens < count:
            await asyncio.sleep(0.2)


def check_spans(turns: list[tpb.TurnRecord], last: int) -> None:
    """Spans cover what was sampled, in order; versions only grow, and each was sampled with."""
    for turn in turns:
        spans = turn.version_spans
        assert [span.start for span in spans] == [0, *(span.end for span in spans[:-1])]
        assert spans[-1].end == len(turn.sampled_ids) // 4
        versions = [span.weight_version for span in spans]
        assert versions == sorted(set(versions))
    sampled_with = {span.weight_version for turn in turns for span in turn.version_spans}
    assert sampled_with == set(range(1, last + 1))


@pytest.fixture
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    async with open_world(tmp_path, request.param) as opened:
        yield opened


@pytest.mark.parametrize("world", ["flush"], indirect=True)
async def test_flushed_every_token_is_its_versions(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    attempts, last = await play_through(world)
    turns = [turn async for turn in world.client.fetch_turns(attempts)]
    check_spans(turns, last)
    for turn in turns:
        assert turn.kv_version_lower_bound == turn.version_spans[0].weight_version

    sequences = [sequence async for sequence in world.client.fetch_sequences(attempts)]
    path = world.folder / "played.sequences"
    write_sequences(path, sequences)
    trainer = world.trainers[0]
    differences: list[float] = []
    for version in range(last, 0, -1):
        if version == 1:
            assert len(differences) >= 5000, "of versions that came in the middle"
        save_file(make_weights(version), world.model_dir / "model.safetensors")
        answer = await trainer.order(do="score", version=version, sequences=str(path))
        assert answer["differences"]
        differences += answer["differences"]
    largest = max(map(abs, differences))
    with capsys.disabled():
        print(
            f"\n{len(differences)} tokens of {last} versions, largest difference {largest:.2e} nats"
        )
    assert largest <= TOLERANCE_NATS


@pytest.mark.parametrize("world", ["keep"], indirect=True)
async def test_kept_entries_are_no_older_than_the_bound(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    attempts, last = await play_through(world)
    records = [turn async for turn in world.client.fetch_turns(attempts)]
    check_spans(records, last)
    models = {version: reference_model(make_weights(version)) for version in range(1, last + 1)}
    banned = list(records[0].sampling.banned_token_ids)
    replayed: list[float] = []
    gaps: list[float] = []
    num_tight = num_old = 0
    for attempt in attempts:
        turns = kv_replay.turns_of(r for r in records if r.attempt_id == attempt)
        for turn, written_by in zip(turns, kv_replay.writers(turns), strict=True):
            # What the engine gave is what entries of these versions give, and of no others.
            replayed += kv_replay.replay(turn, written_by, models, banned)
            assert turn.kv_version_lower_bound <= min(written_by)
            num_tight += turn.kv_version_lower_bound == min(written_by)
            newest = turn.versions[-1]
            if turn.versions[0] == newest and turn.kv_version_lower_bound < newest:
                num_old += 1
                fresh = [newest] * len(written_by)
                gaps += map(abs, kv_replay.replay(turn, fresh, models, banned))
    largest = max(map(abs, replayed))
    with capsys.disabled():
        print(
            f"\n{len(replayed)} tokens, largest difference from a cache of the recorded versions "
            f"{largest:.2e} nats; {num_old} turns on older entries, mean gap to a fresh cache "
            f"{sum(gaps) / len(gaps):.3f} nats; {num_tight} of {len(records)} bounds tight"
        )
    assert len(replayed) >= 5000
    assert largest <= TOLERANCE_NATS
    assert num_tight == len(records)
    # The weights of these versions have nothing in common, so stale entries do show.
    assert num_old >= NUM_SESSIONS
    assert sum(gaps) / len(gaps) > 0.01
