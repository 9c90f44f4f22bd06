"""The manager behind a real in-process server, with scripted gateways, workers and trainers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from proto import rollout_pb2 as pb
from proto import trajectory_pb2 as tpb
from rollout.attempt_summaries import main
from rollout.client import (
    BadRequestError,
    CapExceededError,
    ConflictError,
    DeadlineError,
    FencedError,
    NotFoundError,
    RolloutClient,
    UnavailableError,
    read_attempts,
)
from rollout.fakes import Testbed, make_turn, play, publish


async def add_tasks(client: RolloutClient, num: int, pool: int = pb.POOL_TRAIN) -> None:
    name = pb.Pool.Name(pb.Pool.ValueType(pool)).removeprefix("POOL_").lower()
    tasks = [pb.Task(task_id=f"{name}{i}", path=f"/tasks/{name}{i}") for i in range(num)]
    await client.add_tasks(pb.AddTasksRequest(pool=pb.Pool.ValueType(pool), tasks=tasks))


async def begin(client: RolloutClient, num_tasks: int = 4) -> None:
    await add_tasks(client, num_tasks)
    await publish(client, 1)
    await client.set_admission(pb.SetAdmissionRequest(open=True))


async def lease(
    client: RolloutClient, num: int, worker: str = "w", timeout_s: float = 5.0
) -> list[pb.LeasedAttempt]:
    request = pb.LeaseAttemptsRequest(worker=worker, max_attempts=num)
    return list((await client.lease_attempts(request, timeout_s=timeout_s)).attempts)


def admit(
    leased: pb.LeasedAttempt, ticket: str, prompt: int = 3, new: int = 8
) -> pb.AdmitTurnRequest:
    return pb.AdmitTurnRequest(
        ticket_id=ticket,
        attempt_id=leased.attempt_id,
        epoch=leased.epoch,
        prompt_tokens=prompt,
        max_new_tokens=new,
    )


async def next_batch(client: RolloutClient, step: int, num_groups: int = 2) -> pb.NextBatchReply:
    request = pb.NextBatchRequest(step=step, weight_version=1, num_groups=num_groups)
    return await client.next_batch(request, timeout_s=5.0)


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


async def test_infrastructure_causes_are_retried_and_never_scored(tmp_path: Path) -> None:
    async with Testbed(tmp_path, max_attempt_retries=1, max_staleness=9) as client:
        await begin(client)
        leased = await lease(client, 2)
        failed = leased[0]
        with pytest.raises(BadRequestError):
            await play(client, failed, 0.0, cause=tpb.CAUSE_SANDBOX_FAILED)
        finish = pb.FinishAttemptRequest(
            attempt_id=failed.attempt_id, epoch=failed.epoch, cause=tpb.CAUSE_SANDBOX_FAILED
        )
        assert (await client.finish_attempt(finish)).requeued
        assert (await client.finish_attempt(finish)).requeued, "idempotent"
        with pytest.raises(FencedError):
            await client.append_turn(
                pb.AppendTurnRequest(
                    epoch=failed.epoch, turn=make_turn(failed.attempt_id, 2, [1], [2], history=10)
                )
            )
        with pytest.raises(NotFoundError):
            await client.get_session(failed.session_key)
        (again,) = await lease(client, 1)
        assert again.attempt_id == failed.attempt_id
        assert again.epoch > failed.epoch and again.session_key != failed.session_key
        _, turns = await client.get_session(again.session_key)
        assert turns == [], "the next try starts clean"
        assert not (await play(client, again, None, cause=tpb.CAUSE_ENGINE_FAILED)).requeued
        await play(client, leased[1], 1.0)
        status = await client.get_status()
        assert status.dropped_reasons == {"too_few_valid_members": 1}
        assert status.causes == {"engine_failed": 1, "submitted": 1}
        assert status.reward_mean_recent == 1.0


async def test_an_expired_lease_is_requeued_and_fences_its_worker(tmp_path: Path) -> None:
    bed = Testbed(tmp_path, lease_ttl_s=10.0)
    async with bed as client:
        await begin(client)
        (first, second) = await lease(client, 2)
        bed.clock.now_s += 6
        keys = [pb.AttemptKey(attempt_id=first.attempt_id, epoch=first.epoch)]
        assert list(
            (await client.renew_attempts(pb.RenewAttemptsRequest(worker="w", attempts=keys))).held
        ) == [True]
        assert list(
            (
                await client.renew_attempts(pb.RenewAttemptsRequest(worker="other", attempts=keys))
            ).held
        ) == [False]
        bed.clock.now_s += 6
        bed.manager.tick()
        with pytest.raises(FencedError):
            await client.admit_turn(admit(second, "t"))
        assert (await client.admit_turn(admit(first, "u"))).engine == "engine0"
        (again,) = await lease(client, 1, worker="other")
        assert again.attempt_id == second.attempt_id


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


async def test_a_restarted_worker_takes_back_what_its_name_held(tmp_path: Path) -> None:
    bed = Testbed(tmp_path)
    async with bed as client:
        await begin(client)

        async def call(incarnation: str, num: int, worker: str = "w") -> list[pb.LeasedAttempt]:
            request = pb.LeaseAttemptsRequest(
                worker=worker, max_attempts=num, incarnation=incarnation
            )
            return list((await client.lease_attempts(request, timeout_s=5.0)).attempts)

        held = await call("one", 1) + await call("one", 1)
        (others,) = await call("one", 1, worker="v")
        await client.admit_turn(admit(held[0], "t"))
        again = await call("two", 2)
        assert [a.attempt_id for a in again] == [a.attempt_id for a in held]
        assert [a.epoch for a in again] == [a.epoch + 1 for a in held]
        for old in held:
            with pytest.raises(FencedError):
                await play(client, old, 1.0)
        assert (await client.get_status()).engines[0].tokens_reserved == 0, "its ticket went too"
        with pytest.raises(FencedError, match="another process"):
            await call("one", 1)
        spent = [bed.manager.attempts.get(a.attempt_id).num_retries for a in again]
        assert spent == [0, 0], "the attempts did nothing wrong"
        await play(client, others, 1.0)
        for attempt in again:
            await play(client, attempt, 1.0)


async def test_a_pause_holds_training_attempts_and_survives_a_restart(tmp_path: Path) -> None:
    async with Testbed(tmp_path) as client:
        await begin(client)
        await add_tasks(client, 1, pb.POOL_TEST)
        (running,) = await lease(client, 1)
        await client.set_admission(
            pb.SetAdmissionRequest(open=False, reason="entropy left its band", hold=True)
        )
        assert await lease(client, 8, timeout_s=1.5) == [], "queued members wait"
        assert not (await play(client, running, 1.0)).requeued, "what runs may end"
        await client.start_evaluation(
            pb.StartEvaluationRequest(
                name="e", pool=pb.POOL_TEST, attempts_per_task=1, agent="nop", temperature=1.0
            )
        )
        assert [a.evaluation for a in await lease(client, 8)] == ["e"], "evaluations go on"
    async with Testbed(tmp_path) as client:
        await publish(client, 2)
        status = await client.get_status()
        assert status.admission_held and not status.admission_open
        assert status.admission_reason == "entropy left its band"
        assert [a.evaluation for a in await lease(client, 8)] == ["e"]
        await client.set_admission(pb.SetAdmissionRequest(open=False, reason="rl is over"))
        assert len(await lease(client, 8)) == 1, "closed without a hold: groups are finished"
        assert not (await client.get_status()).admission_held
        await client.set_admission(pb.SetAdmissionRequest(open=True, hold=True))
        assert not (await client.get_status()).admission_held


async def test_too_many_unclassified_ends_pause_the_run_until_it_is_opened(tmp_path: Path) -> None:
    pause = {"window": 20, "min_tries": 4, "max_unclassified_rate": 0.25}
    async with Testbed(tmp_path, pause=pause, max_staleness=9) as client:
        await begin(client)
        for cause in (tpb.CAUSE_SUBMITTED, tpb.CAUSE_UNCLASSIFIED, tpb.CAUSE_UNCLASSIFIED):
            (attempt,) = await lease(client, 1)
            scored = cause == tpb.CAUSE_SUBMITTED
            await play(client, attempt, 1.0 if scored else None, cause=cause)
        (fourth,) = await lease(client, 1)
        await play(client, fourth, None, cause=tpb.CAUSE_UNCLASSIFIED)
        status = await client.get_status()
        assert status.admission_held, "3 of 4 is above a quarter"
        assert "3 of the last 4 tries ended unclassified" in status.admission_reason
        assert status.causes == {"submitted": 1, "unclassified": 3}
        assert await lease(client, 1, timeout_s=1.5) == []
        await client.set_admission(pb.SetAdmissionRequest(open=True))
        assert len(await lease(client, 1)) == 1
        assert not (await client.get_status()).admission_held, "the count starts anew"


async def test_a_summary_tells_what_became_of_an_attempt(tmp_path: Path) -> None:
    async with Testbed(tmp_path, max_attempt_retries=1, max_staleness=1) as client:
        await begin(client)
        (first, second, *rest) = await lease(client, 4)
        failed = tpb.CAUSE_SANDBOX_FAILED
        assert (await play(client, first, None, cause=failed, num_turns=0)).requeued
        (again,) = await lease(client, 1)
        for attempt, reward in ((again, 1.0), (second, 0.0), *((r, 1.0) for r in rest)):
            await play(client, attempt, reward)
        dropped = rest[0].group_id
        batch = await next_batch(client, 1, num_groups=1)
        told = pb.TrainedTrajectory(
            attempt_id=first.attempt_id, num_tokens=3, num_tokens_masked_stale=1
        )
        await client.ack_batch(
            pb.AckBatchRequest(
                batch_id=batch.batch_id, step=1, weight_version=1, trajectories=[told]
            )
        )
        summaries = {s.ref.attempt_id: s for s in await client.list_attempts()}
        mine = summaries[first.attempt_id]
        assert (mine.group_state, mine.group_reason, mine.num_tries) == ("trained", "", 2)
        assert mine.trained == told
        assert [t.cause for t in mine.earlier_tries] == [failed]
        assert not summaries[second.attempt_id].HasField("trained")
        other = summaries[rest[0].attempt_id]
        assert (other.ref.group_id, other.group_state) == (dropped, "dropped")
        assert other.group_reason == "zero_variance"

        # Another program reads the same from the file, while the manager has it.
        assert main(["--ledger", str(tmp_path / "ledger.db"), "--out", str(tmp_path / "a")]) == 0
        assert {s.ref.attempt_id: s for s in read_attempts(tmp_path / "a")} == summaries

        await client.rewind(pb.RewindRequest(step=0, lineage_token="l"))
        summaries = {s.ref.attempt_id: s for s in await client.list_attempts()}
        assert summaries[first.attempt_id].group_state == "ready"
        assert not summaries[first.attempt_id].HasField("trained")


def test_attempts_of_no_ledger_are_an_error_of_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--ledger", str(tmp_path / "none.db"), "--out", str(tmp_path / "a")]) == 1
    assert capsys.readouterr().err.startswith("error: cannot list the attempts of")
    assert list(tmp_path.iterdir()) == []
