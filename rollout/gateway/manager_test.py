"""The gateway against the real manager, scheduler, ledger and token store; the engine is faked."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from proto import rollout_pb2 as pb
from proto import trajectory_pb2 as tpb
from rollout.client import RolloutClient
from rollout.fakes import Testbed, publish
from rollout.gateway.app import Gateway
from rollout.gateway.chat_template import ChatTemplate
from rollout.gateway.config import GatewayConfig
from rollout.gateway.engine_client import EngineClient
from rollout.gateway.fakes import FakeEngine, drop_connection
from rollout.gateway.world import user


async def lease(client: RolloutClient) -> list[pb.LeasedAttempt]:
    """The two attempts of one task's group."""
    await client.add_tasks(
        pb.AddTasksRequest(pool=pb.POOL_TRAIN, tasks=[pb.Task(task_id="t", path="/t")])
    )
    await client.set_admission(pb.SetAdmissionRequest(open=True))
    reply = await client.lease_attempts(
        pb.LeaseAttemptsRequest(worker="w", max_attempts=2), timeout_s=5
    )
    return list(reply.attempts)


async def test_attempts_run_through_the_real_manager(tmp_path: Path, tiny: ChatTemplate) -> None:
    alphabet = [i for i in range(tiny.vocab_size) if i not in tiny.special_ids]
    caps = {"max_new_tokens_per_turn": 32, "max_total_tokens": 2048, "max_turns": 3}
    bed = Testbed(tmp_path, 2, caps=caps, sampling={"stop_token_ids": [2]})
    bed.config.run_dir.mkdir(exist_ok=True)
    async with FakeEngine(alphabet, 0) as first, FakeEngine(alphabet, 1) as second:
        for engine, fake in zip(bed.fake_pool.engines.values(), (first, second), strict=True):
            engine.url = fake.url
        first.plans = [drop_connection]
        async with (
            bed as client,
            EngineClient(max_connections=0, connect_s=2.0, abort_timeout_s=2.0) as engines,
            aiohttp.ClientSession() as http,
        ):
            await publish(client, 1)
            config = GatewayConfig(manager_address="unused:1", model_dir=tmp_path)
            gateway = Gateway(config, client, engines, tiny)
            runner = web.AppRunner(gateway.app(), handler_cancellation=True, access_log=None)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1/chat/completions"

            async def ask(key: str, messages: list[dict[str, Any]]) -> tuple[int, dict[str, Any]]:
                headers = {"Authorization": f"Bearer {key}"}
                body = {"model": "m", "messages": messages}
                async with http.post(url, json=body, headers=headers) as response:
                    return response.status, await response.json()

            attempts = await lease(client)
            messages: list[dict[str, Any]] = []
            for attempt, num_turns in zip(attempts, (2, 3), strict=True):
                messages = []
                for _ in range(num_turns):
                    messages.append(user("go on"))
                    status, body = await ask(attempt.session_key, messages)
                    assert status == 200, body
                    messages.append(body["choices"][0]["message"])
            status, body = await ask(attempts[1].session_key, [*messages, user("more")])
            assert (status, body["error"]["code"]) == (400, "turn_limit_exceeded")
            for attempt, reward in zip(attempts, (0.0, 1.0), strict=True):
                await client.finish_attempt(
                    pb.FinishAttemptRequest(
                        attempt_id=attempt.attempt_id,
                        epoch=attempt.epoch,
                        cause=tpb.CAUSE_TURN_CAP,
                        reward=reward,
                    )
                )
            # The attempt is over, and the session in memory learns it from the manager.
            status, body = await ask(attempts[0].session_key, [user("late")])
            assert (status, body["error"]["code"]) == (409, "session_fenced")
            status, body = await ask(attempts[0].session_key, [user("later")])
            assert (status, body["error"]["code"]) == (401, "invalid_api_key")

            counts = gateway.counters
            manager = await client.get_status()
            assert manager.num_turns == counts.num_answered == counts.num_generate_calls == 5
            assert manager.num_sampled_tokens == counts.num_sampled_tokens
            assert manager.num_turns_queued == 0
            assert all(engine.num_running == 0 for engine in manager.engines)
            assert [name for name, _ in bed.fake_pool.failures] == ["engine0"]

            sequences = [s async for s in client.fetch_sequences([a.attempt_id for a in attempts])]
            asked = [r["input_ids"] for r in first.requests + second.requests]
            for sequence in sequences:
                ids = list(struct.unpack(f"<{len(sequence.token_ids) // 4}i", sequence.token_ids))
                # The last prompt that the engine saw is the sequence but for its last answer.
                assert max(len(a) for a in asked if ids[: len(a)] == a) < len(ids)
                assert ids[-1] == 2
                assert sequence.loss_mask[-1] == 1
            await runner.cleanup()
            await gateway.runner.close()
