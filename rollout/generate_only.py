"""Replays recorded turns on the engines alone: what RL is compared with. A one-shot program.

Owner: `launch` runs it when the RL stage is over and nothing else asks the engines. It fetches
the turns of finished attempts from the manager, empties the KV caches, and asks the engines
for the same turns again: as many new ids after as many prompt ids, the turns of a trajectory
one after another, `concurrency` trajectories at a time. No agent, gateway, sandbox, scheduler
or ledger takes part.

    attempts --FetchTurns--> [trajectories] --/generate--> engines      (round robin)

Invariant: a prompt is made of the recorded prompt ids and of the ids that this replay sampled
where the record has sampled ones, so that prefix caching helps exactly as much as it did.
Tokens are counted while every slot is busy: from the first call until no trajectory is left
to start; trajectories/s are these tokens/s over the mean sampled tokens of a trajectory, so
that those half done at either end count as what they are. Engines must serve; a failed call
ends the program, since a rate over fewer calls would say nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from proto import trajectory_pb2 as tpb
from proto.serving import ClientSecurity, ServingError, dial, fail
from rollout.client import RolloutClient, RolloutError
from rollout.gateway.engine_client import EngineClient, EngineLostError, EngineRefusedError

_IDS = np.dtype("<i4")


class ReplayConfig(BaseModel):
    """What to replay, and how."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    manager_address: str
    """HOST:PORT of the RolloutManager."""
    attempt_ids: list[str] = Field(min_length=1)
    """Finished attempts, in the order in which they are replayed."""
    concurrency: int = Field(gt=0)
    """Trajectories at a time, over all engines: the slots of the harness workers."""
    time_limit_s: float = Field(default=120.0, gt=0)
    """No trajectory is started later than this."""
    call_timeout_s: float = Field(default=300.0, gt=0)
    """Of one engine call."""


@dataclass(frozen=True)
class Measured:
    """Rates over the time in which every slot was busy."""

    num_trajectories: int  # given to replay
    tokens_per_trajectory: float  # sampled ones, mean
    num_turns: int  # that ended in it
    num_sampled_tokens: int
    num_prompt_tokens: int  # whole prompts, cached prefixes included
    num_cached_tokens: int
    wall_s: float

    def as_dict(self) -> dict[str, float]:
        """For metrics/throughput.json."""
        return {
            "num_trajectories": self.num_trajectories,
            "sampled_tokens_per_trajectory": self.tokens_per_trajectory,
            "num_turns": self.num_turns,
            "num_sampled_tokens": self.num_sampled_tokens,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_cached_tokens": self.num_cached_tokens,
            "wall_s": self.wall_s,
            "sampled_tokens_per_s": self.num_sampled_tokens / self.wall_s,
            "trajectories_per_s": self.num_sampled_tokens
            / self.wall_s
            / self.tokens_per_trajectory,
        }


class Replay:
    """The loop. Counts whatever ends while it runs."""

    def __init__(
        self,
        config: ReplayConfig,
        engines: EngineClient,
        urls: Sequence[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._engines, self._urls, self._clock = config, engines, urls, clock
        self._counts = dict.fromkeys(
            ("num_turns", "num_sampled_tokens", "num_prompt_tokens", "num_cached_tokens"), 0
        )

    async def run(self, trajectories: Sequence[Sequence[tpb.TurnRecord]]) -> Measured:
        """Replays them. Raises EngineLostError, EngineRefusedError, TimeoutError."""
        waiting = iter(list(zip(trajectories, itertools.cycle(self._urls), strict=False)))
        num_sampled = sum(len(t.sampled_ids) // _IDS.itemsize for ts in trajectories for t in ts)
        begun = self._clock()
        seen: list[Measured] = []

        async def slot() -> None:
            while self._clock() - begun < self._config.time_limit_s:
                chosen = next(waiting, None)
                if chosen is None:
                    break
                await self._trajectory(*chosen)
            if not seen:  # the first slot that finds nothing to start ends the measurement
                wall_s = max(self._clock() - begun, 1e-9)
                mean = num_sampled / len(trajectories)
                seen.append(Measured(len(trajectories), mean, **self._counts, wall_s=wall_s))

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self._config.concurrency, len(trajectories))):
                    group.create_task(slot())
        except ExceptionGroup as failed:  # the others were cancelled: the first says it all
            raise failed.exceptions[0] from failed
        return seen[0]

    async def _trajectory(self, turns: Sequence[tpb.TurnRecord], url: str) -> None:
        chains: list[list[int]] = []
        for turn in turns:
            parent = chains[turn.parent_turn_index] if turn.parent_turn_index >= 0 else []
            prompt = parent[: turn.history_length] + ids_of(turn.prompt_ids)
            num_wanted = len(turn.sampled_ids) // _IDS.itemsize
            sampled: list[int] = []
            if num_wanted:
                sampled = await self._generate(url, turn, prompt, num_wanted)
            chains.append(prompt + sampled)

    async def _generate(
        self, url: str, turn: tpb.TurnRecord, prompt: list[int], num_wanted: int
    ) -> list[int]:
        generation = await self._engines.generate(
            url,
            uuid.uuid4().hex,
            prompt,
            max_new_tokens=num_wanted,
            temperature=turn.sampling.temperature,
            stop_token_ids=turn.sampling.stop_token_ids,
            banned_token_ids=turn.sampling.banned_token_ids,
            extra_key="",
            timeout_s=self._config.call_timeout_s,
            ignore_stops=True,
        )
        if len(generation.ids) != num_wanted:
            raise EngineLostError(
                f"{url} sampled {len(generation.ids)} ids of {num_wanted} asked for"
            )
        self._counts["num_turns"] += 1
        self._counts["num_sampled_tokens"] += num_wanted
        self._counts["num_prompt_tokens"] += len(prompt)
        self._counts["num_cached_tokens"] += generation.cached_tokens
        return generation.ids


def ids_of(data: bytes) -> list[int]:
    """int32[] of the contracts as a list."""
    ids: list[int] = np.frombuffer(data, _IDS).tolist()
    return ids


def by_attempt(turns: Iterable[tpb.TurnRecord]) -> list[list[tpb.TurnRecord]]:
    """Turns of one attempt after another, apart."""
    return [list(group) for _, group in itertools.groupby(turns, key=lambda t: t.attempt_id)]


async def replay(config: ReplayConfig) -> Measured:
    """Fetches, flushes, replays. Raises RolloutError and what Replay.run raises."""
    async with dial(config.manager_address, ClientSecurity.from_environment()) as channel:
        client = RolloutClient(channel)
        turns = [turn async for turn in client.fetch_turns(config.attempt_ids)]
        engines = (await client.get_status()).engines
        urls = [e.url for e in engines if e.state == "serving"]
        if not turns or not urls:
            raise EngineLostError(f"{len(turns)} turns and {len(urls)} serving engines: want both")
        await client.flush_cache()
    async with EngineClient(
        max_connections=config.concurrency, connect_s=10.0, abort_timeout_s=5.0
    ) as http:
        return await Replay(config, http, urls).run(by_attempt(turns))


def main(argv: list[str] | None = None) -> int:
    """Prints what was measured as one JSON object. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="rollout.generate_only", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="JSON of ReplayConfig")
    args = parser.parse_args(argv)
    try:
        config = ReplayConfig.model_validate_json(args.config.read_bytes())
        measured = asyncio.run(replay(config))
    except (EngineLostError, EngineRefusedError, TimeoutError) as error:
        return fail(f"the engines failed under the replay: {error or type(error).__name__}")
    except (OSError, ValidationError, ServingError, RolloutError) as error:
        return fail(f"{args.config}: {error}")
    print(json.dumps(measured.as_dict()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
