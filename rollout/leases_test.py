"""Leases, retries and pauses, against a real in-process manager."""

from __future__ import annotations

from pathlib import Path

import pytest

from proto import rollout_pb2 as pb
from proto import trajectory_pb2 as tpb
from rollout.client import BadRequestError, FencedError, NotFoundError
from rollout.fakes import Testbed, add_tasks, admit, begin, lease, make_turn, play, publish


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
