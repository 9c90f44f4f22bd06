"""What the paths through SGLang's own update calls have in common.

Owner: distributed_path and disk_path. SGLang's calls skip unknown names, keep the old values of
missing ones, and answer 400 for a call that they refused as well as for one that failed half-way:
only what was sent before an answer tells whether the weights can have changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from weightsync.plan import TensorSpec, make_plan
from weightsync.tensor_source import Gathered
from weightsync.update_path import EngineResult, Target, Update

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a call to an engine."""

    status: int
    """Of HTTP; 0: none came."""
    error: str
    """Empty: the engine did what it was asked."""
    was_sent: bool = True
    """False: no connection came about, so that the engine knows nothing of the call."""


@dataclass(slots=True)
class Progress:
    """How far one engine has come in an update."""

    target: Target
    touched: bool = False
    complete: bool = False
    error: str = ""
    seconds: float = 0.0

    def result(self) -> EngineResult:
        """As the publisher wants it."""
        error = "" if self.complete else self.error or "the update ended before this engine had it"
        return EngineResult(self.target.engine, self.complete, self.touched, error, self.seconds)


@dataclass(frozen=True, slots=True)
class EngineCalls:
    """HTTP calls to engines, each with a deadline."""

    session: aiohttp.ClientSession = field(default_factory=aiohttp.ClientSession)

    async def post(
        self, target: Target, path: str, body: Mapping[str, Any], timeout_s: float
    ) -> Answer:
        """One call; never raises for what an engine or the network does."""
        url = target.url + path
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self.session.post(url, json=body, timeout=timeout) as response:
                text = await response.text()
                if response.status != 200:
                    error = f"{url}: got status {response.status}, wanted 200: {text[:300]}"
                    return Answer(response.status, error)
                return Answer(200, "")
        except TimeoutError:
            return Answer(0, f"{url}: no answer in {timeout_s} s")
        except aiohttp.ClientConnectorError as failure:
            return Answer(0, f"{url}: {type(failure).__name__}: {failure}", was_sent=False)
        except (aiohttp.ClientError, OSError) as failure:
            return Answer(0, f"{url}: {type(failure).__name__}: {failure}")

    async def close(self) -> None:
        """Ends every connection."""
        await self.session.close()


def with_head(update: Update) -> Update:
    """The update with an output head, where the sender's is tied to the embedding; may block.

    SGLang's Qwen3-MoE model has a head of its own even where the configuration ties the two, and
    would leave it at zero; models that tie them by themselves skip the name.
    """
    names = [tensor.name for tensor in update.plan.tensors]
    if HEAD in names or EMBEDDING not in names:
        return update
    place = names.index(EMBEDDING)
    embedding = update.plan.tensors[place]
    head = TensorSpec(HEAD, embedding.shape, embedding.dtype)
    plan = make_plan([*update.plan.tensors, head], update.plan.bucket_bytes)
    tensors = update.source.whole()
    return Update(plan, Gathered(plan, [*tensors, tensors[place]]), update.weight_version)
