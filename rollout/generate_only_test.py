"""The replay against a scripted engine: same prompts, same counts, rates while slots are busy."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from aiohttp import web

from proto import trajectory_pb2 as tpb
from rollout.fakes import make_turn
from rollout.gateway.engine_client import EngineClient, EngineLostError
from rollout.generate_only import Replay, ReplayConfig, by_attempt


class CountingEngine:
    """Answers with ids 1000, 1001, ...: as many as asked for, less `short_by`."""

    def __init__(self, short_by: int = 0) -> None:
        self.requests: list[dict[str, Any]] = []
        self._short_by = short_by

    async def generate(self, http: web.Request) -> web.Response:
        body = await http.json()
        self.requests.append(body)
        num = body["sampling_params"]["max_new_tokens"] - self._short_by
        ids = list(range(1000, 1000 + num))
        meta = {
            "finish_reason": {"type": "length"},
            "output_token_logprobs": [[-0.5, i, None] for i in ids],
            "cached_tokens": 2,
            "weight_version": "7",
        }
        return web.json_response({"output_ids": ids, "meta_info": meta})


async def measure(
    engine: CountingEngine, turns: list[tpb.TurnRecord], concurrency: int = 1, **limits: float
) -> Any:
    app = web.Application()
    app.add_routes([web.post("/generate", engine.generate)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    config = ReplayConfig(manager_address="", attempt_ids=["a"], concurrency=concurrency, **limits)
    ticks = itertools.count()
    try:
        async with EngineClient(max_connections=4, connect_s=5.0, abort_timeout_s=1.0) as http:
            replay = Replay(config, http, [url], clock=lambda: float(next(ticks)))
            return await replay.run(by_attempt(turns))
    finally:
        await runner.cleanup()


def attempt(name: str) -> list[tpb.TurnRecord]:
    """Two turns in a line, then a branch that keeps three ids of the first."""
    return [
        make_turn(name, 0, [1, 2], [3, 4, 5]),
        make_turn(name, 1, [6], [7], history=5),
        make_turn(name, 2, [8, 9], [10, 11], history=3, parent=0),
    ]


async def test_same_lengths_and_the_replays_own_ids_as_history() -> None:
    engine = CountingEngine()
    measured = await measure(engine, attempt("a") + attempt("b"))
    asked = [
        (body["input_ids"], body["sampling_params"]["max_new_tokens"]) for body in engine.requests
    ]
    one = [
        ([1, 2], 3),
        ([1, 2, 1000, 1001, 1002, 6], 1),
        ([1, 2, 1000, 8, 9], 2),
    ]
    assert asked == one + one
    assert all(body["sampling_params"]["ignore_eos"] for body in engine.requests)
    assert (measured.num_turns, measured.num_sampled_tokens) == (6, 12)
    assert (measured.num_prompt_tokens, measured.num_cached_tokens) == (26, 12)
    assert measured.tokens_per_trajectory == 6.0


async def test_rates_are_tokens_over_time_and_trajectories_worth_of_tokens() -> None:
    measured = await measure(CountingEngine(), attempt("a"))
    # One tick each: begin, the slot's two looks at the limit, the end.
    assert measured.wall_s == 3.0
    rates = measured.as_dict()
    assert (rates["sampled_tokens_per_s"], rates["trajectories_per_s"]) == (2.0, 1 / 3)


async def test_nothing_starts_after_the_time_limit() -> None:
    engine = CountingEngine()
    measured = await measure(engine, attempt("a") + attempt("b") + attempt("c"), time_limit_s=2.0)
    assert len(engine.requests) == 3
    assert measured.num_sampled_tokens == 6


async def test_an_engine_that_stops_early_is_no_measurement() -> None:
    with pytest.raises(EngineLostError, match="sampled 2 ids of 3"):
        await measure(CountingEngine(short_by=1), attempt("a"), concurrency=3)
