"""The manager behind a real in-process server, with scripted gateways, workers and trainers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from proto import rollout_pb2 as pb
from rollout.client import (
    BadRequestError,
    ConflictError,
    FencedError,
    NotFoundError,
    UnavailableError,
)
from rollout.fakes import Testbed, add_tasks, admit, begin, lease, next_batch, play, publish


async def test_whole_loop_from_tasks_to_trained_batch(tmp_path: Path) -> None:
    bed = Testbed(tmp_path)
    async with bed as client:
        await begin(client)
        waiting = asyncio.create_task(next_batch(client, 1))
        leased = await lease(client, 8)
        assert len(leased) == 4, "the gate allows two groups of two at max_staleness 0"
        assert all(len(a.session_key) >= 32 and a.task_path for a in leased)
        for index, attempt in enumerate(leased):
            await play(client, attempt, float(index % 2))
        batch = await waiting
        assert [len(g.members) for g in batch.groups] == [2, 2]
        assert batch.groups[0].group_id < batch.groups[1].group_id
        ids = [m.attempt_id for g in batch.groups for m in g.members]
        fetched = [s async for s in client.fetch_sequences(ids)]
        assert [s.attempt_id for s in fetched] == ids
        assert list(np.frombuffer(fetched[0].token_ids, "<i4")) == [1, 2, 3, 7, 8] * 2
        assert list(fetched[0].loss_mask) == [0, 0, 0, 1, 1] * 2
        assert {s.reward for s in fetched} == {0.0, 1.0}
        assert await lease(client, 1, timeout_s=1.5) == [], "a claimed batch is not consumed yet"
        ack = pb.AckBatchRequest(batch_id=batch.batch_id, step=1, weight_version=1)
        await client.ack_batch(ack)
        await client.ack_batch(ack)
        assert len(await lease(client, 8)) == 4
        status = await client.get_status()
        assert (status.num_groups_trained, status.num_turns) == (2, 8)
        assert status.causes == {"submitted": 4}
        assert status.num_turns_admitted == 8
        assert status.reward_mean_recent == 0.5
        assert status.engines[0].state == "serving"
        summaries = await client.list_attempts()
        assert [s.consumed_at_version for s in summaries] == [1] * 4


async def test_next_batch_is_idempotent_by_step_and_rewind_brings_batches_back(
    tmp_path: Path,
) -> None:
    async with Testbed(tmp_path, max_staleness=3) as client:
        await begin(client)
        first = await client.rewind(pb.RewindRequest(step=0, lineage_token="one"))
        assert (first.lineage, first.max_weight_version) == (1, 1)
        for step in (1, 2):
            for index, attempt in enumerate(await lease(client, 4)):
                await play(client, attempt, float(index % 2))
            batch = await next_batch(client, step)
            assert (await next_batch(client, step)).batch_id == batch.batch_id
            await client.ack_batch(
                pb.AckBatchRequest(batch_id=batch.batch_id, step=step, weight_version=step)
            )
        groups = [g.group_id for g in batch.groups]
        again = pb.RewindRequest(step=1, lineage_token="two")
        rewound = await client.rewind(again)
        assert (rewound.lineage, rewound.num_batches_ready_again) == (2, 1)
        assert await client.rewind(again) == rewound
        with pytest.raises(FencedError):
            await client.ack_batch(pb.AckBatchRequest(batch_id=batch.batch_id, step=2))
        repeated = await next_batch(client, 2)
        assert [g.group_id for g in repeated.groups] == groups
        assert repeated.batch_id != batch.batch_id


async def test_a_checkpoint_of_another_past_is_refused(tmp_path: Path) -> None:
    async with Testbed(tmp_path, max_staleness=3) as client:
        await begin(client)
        await client.rewind(pb.RewindRequest(step=0, lineage_token="one"))
        ids: dict[str, list[str]] = {"one": [], "two": []}
        for token, steps in (("one", (1, 2)), ("two", (2,))):
            for step in steps:
                if token == "one":
                    for index, attempt in enumerate(await lease(client, 4)):
                        await play(client, attempt, float(index % 2))
                batch = await next_batch(client, step)
                await client.ack_batch(pb.AckBatchRequest(batch_id=batch.batch_id, step=step))
                ids[token].append(batch.batch_id)
            if token == "one":
                one = pb.RewindRequest(step=1, lineage_token="two", batch_ids=ids["one"][:1])
                assert (await client.rewind(one)).num_batches_ready_again == 1
        first, of_old_lineage = ids["one"]
        wrong = [[first, of_old_lineage], [first], [first, *ids["two"], "b000003.2"]]
        for batch_ids in wrong:
            with pytest.raises(ConflictError, match="not of one past"):
                await client.rewind(
                    pb.RewindRequest(step=2, lineage_token="three", batch_ids=batch_ids)
                )
        right = pb.RewindRequest(step=2, lineage_token="three", batch_ids=[first, *ids["two"]])
        assert (await client.rewind(right)).lineage == 3


async def test_versions_never_repeat_and_a_window_pauses_admission(tmp_path: Path) -> None:
    bed = Testbed(tmp_path)
    async with bed as client:
        await begin(client)
        with pytest.raises(ConflictError):
            await publish(client, 1)
        (attempt, *_) = await lease(client, 4)
        request = pb.OpenUpdateWindowRequest(
            weight_version=5, plan_digest="0" * 64, num_tensors=1, total_bytes=4
        )
        opened = await client.open_update_window(request)
        assert (await client.get_status()).update_window_phase == "buckets"
        with pytest.raises(UnavailableError):
            await client.admit_turn(admit(attempt, "t"), timeout_s=1.5)
        waiting = asyncio.create_task(client.admit_turn(admit(attempt, "t")))
        closed = await client.close_update_window(
            pb.CloseUpdateWindowRequest(
                epoch=opened.epoch,
                weight_version=5,
                results=[pb.EngineUpdateResult(engine="engine0", complete=True, touched=True)],
            )
        )
        assert list(closed.engines_serving) == ["engine0"]
        granted = await waiting
        assert granted.kv_version_lower_bound == 5
        assert (await client.get_status()).weight_version == 5


async def test_a_restarted_engine_asks_for_republication(tmp_path: Path) -> None:
    bed = Testbed(tmp_path)
    async with bed as client:
        await begin(client)
        waiting = asyncio.create_task(next_batch(client, 1))
        (attempt, *_) = await lease(client, 4)
        await client.admit_turn(admit(attempt, "lost"))
        await bed.fake_pool.restart("engine0", "test")
        assert (await waiting).republish_requested
        with pytest.raises(UnavailableError):
            await client.admit_turn(admit(attempt, "later"), timeout_s=1.5)
        await publish(client, 2)
        assert (await client.admit_turn(admit(attempt, "lost"))).engine == "engine0"
        assert not (await client.get_status()).republish_requested


async def test_zero_variance_groups_are_refilled_up_to_the_setting(tmp_path: Path) -> None:
    async with Testbed(tmp_path, max_zero_variance_refill=1, batch_groups=1) as client:
        await begin(client)
        for reward in (0.0, 1.0):
            for attempt in await lease(client, 2):
                await play(client, attempt, reward)
        status = await client.get_status()
        assert status.dropped_reasons == {"zero_variance": 1}
        assert status.num_groups_ready == 1, "the setting's second such group is kept"
        assert status.reward_mean_recent == 0.5, "dropped groups stay in the statistics"
        assert len((await next_batch(client, 1, num_groups=1)).groups) == 1


async def test_a_version_is_spent_before_its_window_opens(tmp_path: Path) -> None:
    """Else a manager that dies inside the window would give it out a second time."""
    bed = Testbed(tmp_path)
    async with bed as client:
        await begin(client)
        refused = pb.OpenUpdateWindowRequest(weight_version=2, plan_digest="short")
        with pytest.raises(BadRequestError):
            await client.open_update_window(refused)
        rewound = await client.rewind(pb.RewindRequest(step=0, lineage_token="t"))
        assert rewound.max_weight_version == 2


async def test_tasks_are_idempotent_and_a_changed_path_is_refused(tmp_path: Path) -> None:
    async with Testbed(tmp_path) as client:
        await add_tasks(client, 2)
        tasks = [pb.Task(task_id="train0", path="/tasks/train0"), pb.Task(task_id="n", path="/n")]
        reply = await client.add_tasks(pb.AddTasksRequest(pool=pb.POOL_TRAIN, tasks=tasks))
        assert (reply.num_added, reply.num_known) == (1, 1)
        moved = [pb.Task(task_id="new", path="/new"), pb.Task(task_id="train0", path="/moved")]
        with pytest.raises(ConflictError):
            await client.add_tasks(pb.AddTasksRequest(pool=pb.POOL_TRAIN, tasks=moved))
        reply = await client.add_tasks(pb.AddTasksRequest(pool=pb.POOL_TRAIN, tasks=moved[:1]))
        assert reply.num_added == 1, "the refused call added nothing"


async def test_tokens_are_deleted_only_when_no_checkpoint_needs_them(tmp_path: Path) -> None:
    async with Testbed(tmp_path, keep_consumed_tokens=False, max_staleness=3) as client:
        await begin(client)
        for step in (1, 2):
            for index, attempt in enumerate(await lease(client, 4)):
                await play(client, attempt, float(index % 2))
            batch = await next_batch(client, step)
            await client.ack_batch(
                pb.AckBatchRequest(batch_id=batch.batch_id, step=step, weight_version=step)
            )
        assert len(list((tmp_path / "tokens").iterdir())) == 8
        await client.report_checkpoint(pb.ReportCheckpointRequest(step=2, oldest_kept_step=1))
        assert len(list((tmp_path / "tokens").iterdir())) == 4
        with pytest.raises(NotFoundError):
            await client.rewind(pb.RewindRequest(step=0, lineage_token="old"))
        rewound = await client.rewind(pb.RewindRequest(step=1, lineage_token="kept"))
        assert rewound.num_batches_ready_again == 1
