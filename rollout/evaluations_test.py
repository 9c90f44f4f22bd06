"""Evaluations, against a real in-process manager."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from proto import rollout_pb2 as pb
from proto import trajectory_pb2 as tpb
from rollout.client import ConflictError, FencedError, UnavailableError
from rollout.fakes import Testbed, add_tasks, begin, lease, play, publish


async def test_evaluations_come_first_are_pinned_and_never_trained(tmp_path: Path) -> None:
    bed = Testbed(tmp_path, max_attempt_retries=1)
    async with bed as client:
        await add_tasks(client, 2, pb.POOL_TEST)
        request = pb.StartEvaluationRequest(
            name="base", pool=pb.POOL_TEST, attempts_per_task=1, agent="mini", flush_before=True
        )
        with pytest.raises(UnavailableError):
            await client.start_evaluation(request)
        await begin(client)
        training = await lease(client, 1)
        started = await client.start_evaluation(request)
        assert (started.num_attempts, started.weight_version) == (2, 1)
        assert (await client.start_evaluation(request)) == started
        with pytest.raises(ConflictError):
            await client.start_evaluation(
                pb.StartEvaluationRequest(
                    name="base", pool=pb.POOL_TEST, attempts_per_task=2, agent="mini"
                )
            )
        assert bed.fake_pool.num_flushes == 1
        leased = await lease(client, 3)
        assert [a.evaluation for a in leased] == ["base", "base", ""]
        header, _ = await client.get_session(leased[0].session_key)
        assert header.sampling.temperature == 0.0
        await play(client, leased[0], 1.0)
        with pytest.raises(FencedError):
            await play(client, leased[1], 0.0, version=2)
        waiting = asyncio.create_task(
            client.get_evaluation(pb.GetEvaluationRequest(name="base"), timeout_s=5.0)
        )
        partial = await client.get_evaluation(pb.GetEvaluationRequest(name="base"), timeout_s=1.5)
        assert (partial.finished, partial.num_finished) == (False, 1)
        (again,) = await lease(client, 1)
        assert again.attempt_id == leased[1].attempt_id
        await play(client, again, 0.0)
        done = await waiting
        assert done.finished
        assert [list(t.rewards) for t in done.tasks] == [[1.0], [0.0]]
        assert [t.attempt_ids[0] for t in done.tasks] == [a.attempt_id for a in leased[:2]]
        assert (await client.get_status()).num_attempts_finished == 0
        assert len(await client.list_attempts("base")) == 2
        assert training


async def test_an_evaluation_that_lost_its_version_starts_over_when_asked(tmp_path: Path) -> None:
    bed = Testbed(tmp_path, num_engines=2)
    async with bed as client:
        await begin(client)
        await add_tasks(client, 3, pb.POOL_TEST)
        request = pb.StartEvaluationRequest(
            name="base", pool=pb.POOL_TEST, attempts_per_task=1, agent="mini"
        )
        await client.start_evaluation(request)
        ended, running, _queued = await lease(client, 3)
        await play(client, ended, 1.0)
        asked = pb.GetEvaluationRequest(name="base")
        await bed.fake_pool.restart("engine0", "test")
        partial = await client.get_evaluation(asked, timeout_s=1.5)
        assert not partial.republish_requested, "engine1 serves the version still"
        waiting = asyncio.create_task(client.get_evaluation(asked, timeout_s=5.0))
        await bed.fake_pool.restart("engine1", "test")
        assert (await waiting).republish_requested
        await publish(client, 2)
        with pytest.raises(FencedError):
            await play(client, running, 1.0)
        lost = await client.get_evaluation(asked, timeout_s=5.0)
        assert lost.finished
        causes = [list(t.causes) for t in lost.tasks]
        assert causes == [[tpb.CAUSE_SUBMITTED], [tpb.CAUSE_CANCELLED], [tpb.CAUSE_CANCELLED]]
        assert (await client.start_evaluation(request)).weight_version == 2
        assert (await client.start_evaluation(request)).weight_version == 2
        again = await lease(client, 3)
        assert [a.attempt_id for a in again] == [f"e-base-0000{i}-00" for i in range(3)]
        assert [a.epoch for a in again] == [2, 2, 2]
        for attempt in again:
            await play(client, attempt, 0.0, version=2)
        done = await client.get_evaluation(asked, timeout_s=5.0)
        assert (done.finished, done.weight_version) == (True, 2)
        assert [list(t.rewards) for t in done.tasks] == [[0.0]] * 3
        tries = bed.manager.ledger.number("SELECT COUNT(*) FROM tries WHERE epoch=1")
        assert tries == 3, "what ended keeps its try, what ran was cancelled"
        await publish(client, 3)
        assert (await client.get_evaluation(asked)).weight_version == 2, "a finished one stays"


async def test_agents_that_need_no_engine_run_without_one(tmp_path: Path) -> None:
    async with Testbed(tmp_path, num_engines=0) as client:
        await add_tasks(client, 3, pb.POOL_DEV)
        await add_tasks(client, 1)
        await client.set_admission(pb.SetAdmissionRequest(open=True))
        await client.start_evaluation(
            pb.StartEvaluationRequest(
                name="gold", pool=pb.POOL_DEV, attempts_per_task=1, agent="oracle"
            )
        )
        leased = await lease(client, 8)
        assert [a.agent for a in leased] == ["oracle"] * 3, "mini waits for an engine"
        for attempt in leased:
            await play(client, attempt, 1.0, num_turns=0)
        reply = await client.get_evaluation(pb.GetEvaluationRequest(name="gold"))
        assert reply.finished


async def test_weights_loaded_from_disk_are_served_as_version_one(tmp_path: Path) -> None:
    bed = Testbed(tmp_path, engines={"load_format": "auto"})
    async with bed as client:
        await add_tasks(client, 1, pb.POOL_TEST)
        started = await client.start_evaluation(
            pb.StartEvaluationRequest(
                name="e", pool=pb.POOL_TEST, attempts_per_task=1, agent="mini", temperature=1.0
            )
        )
        assert started.weight_version == 1
        (leased,) = await lease(client, 1)
        await play(client, leased, 1.0)
        assert (await client.get_evaluation(pb.GetEvaluationRequest(name="e"))).finished
        assert bed.fake_pool.clients["engine0"].calls == ["version 1"]
