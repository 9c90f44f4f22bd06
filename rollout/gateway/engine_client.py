"""Calls to SGLang engines: ids in, ids and log-probs out.

Owner: the gateway (one client, one connection pool). Field names and behaviour are those of
SGLang 0.5.23. Banned ids go as a large negative logit_bias: SGLang adds it to the logits
before both sampling and the log-probs that it returns, so that these are of the masked
distribution. JSON has no -inf, and e^-1e9 is exactly 0 in float32.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import aiohttp

from rollout.gateway.routing import Routing, read_experts

BANNED_BIAS = -1e9


class EngineLostError(Exception):
    """The engine died, hung or answered with nonsense; what it sampled is lost."""


class EngineRefusedError(Exception):
    """The engine refuses this very call (HTTP 400): another engine would too."""


@dataclass(frozen=True, slots=True)
class Span:
    """Sampled ids [start, end) came from `weight_version`."""

    weight_version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Generation:
    """What an engine sampled; `finish` is stop, length or abort."""

    ids: list[int]
    logprobs: list[float]
    spans: list[Span]
    finish: str
    cached_tokens: int
    engine_queued_s: float
    # Unix seconds by the engine's clock; 0: it did not tell. Of a continued turn, the first part's.
    first_token_at_s: float = 0.0
    # RoutedExperts.ids at the tokens from Routing.start to the last but one.
    experts: bytes = b""

    def then(self, later: Generation) -> Generation:
        """This partial continued by `later`, whose prompt ended with our ids."""
        shift = len(self.ids)
        spans = list(self.spans)
        for span in later.spans:
            if spans and spans[-1].weight_version == span.weight_version:
                spans[-1] = Span(span.weight_version, spans[-1].start, span.end + shift)
            else:
                spans.append(Span(span.weight_version, span.start + shift, span.end + shift))
        return Generation(
            ids=self.ids + later.ids,
            logprobs=self.logprobs + later.logprobs,
            spans=spans,
            finish=later.finish,
            cached_tokens=self.cached_tokens,
            engine_queued_s=self.engine_queued_s + later.engine_queued_s,
            first_token_at_s=self.first_token_at_s or later.first_token_at_s,
            experts=self.experts + later.experts,
        )


NOTHING = Generation([], [], [], "abort", 0, 0.0)
"""A turn before its first engine call."""


class EngineClient:
    """Use as `async with`; `generate` and `abort` may run concurrently."""

    def __init__(self, *, max_connections: int, connect_s: float, abort_timeout_s: float) -> None:
        """`max_connections` 0 means no limit."""
        self._max_connections = max_connections
        self._connect_s = connect_s
        self._abort_timeout_s = abort_timeout_s
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=self._max_connections, limit_per_host=0)
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._http is not None:
            await self._http.close()

    @property
    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            raise RuntimeError("EngineClient is used outside `async with`")
        return self._http

    async def generate(
        self,
        url: str,
        rid: str,
        prompt_ids: Sequence[int],
        *,
        max_new_tokens: int,
        temperature: float,
        stop_token_ids: Sequence[int],
        banned_token_ids: Sequence[int],
        extra_key: str,
        timeout_s: float,
        ignore_stops: bool = False,
        routing: Routing | None = None,
    ) -> Generation:
        """Samples up to `max_new_tokens` ids after `prompt_ids`; exactly so many if `ignore_stops`.

        With `routing` the engine tells the experts that it chose.

        Raises EngineLostError (another engine may do), EngineRefusedError, TimeoutError.
        """
        sampling: dict[str, Any] = {
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "stop_token_ids": list(stop_token_ids),
            "no_stop_trim": True,
            "skip_special_tokens": False,
        }
        if ignore_stops:
            sampling["ignore_eos"] = True  # stop_token_ids too
        if banned_token_ids:
            sampling["logit_bias"] = {str(i): BANNED_BIAS for i in banned_token_ids}
        body: dict[str, Any] = {
            "rid": rid,
            "input_ids": list(prompt_ids),
            "sampling_params": sampling,
            "return_logprob": True,
            "stream": False,
        }
        if extra_key:
            body["extra_key"] = extra_key
        if routing is not None:
            body["return_routed_experts"] = True
            body["routed_experts_start_len"] = routing.start
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=self._connect_s)
        try:
            async with self._session.post(
                f"{url}/generate", json=body, timeout=timeout
            ) as response:
                if response.status == 400:
                    raise EngineRefusedError(f"{url} answered 400: {await response.text()}")
                if response.status != 200:
                    raise EngineLostError(f"{url} answered HTTP {response.status}")
                answer = await response.json(content_type=None)
        except aiohttp.ConnectionTimeoutError as error:
            raise EngineLostError(f"{url} took no connection in {self._connect_s} s") from error
        except (aiohttp.ClientError, ValueError) as error:
            raise EngineLostError(f"{url}: {type(error).__name__}: {error}") from error
        generation = parse_generation(answer, url)
        if routing is None:
            return generation
        encoded = answer["meta_info"].get("routed_experts")
        if encoded is None and generation.finish == "abort":
            return generation  # aborted before it ran: whoever goes on asks for these too
        try:
            experts = read_experts(encoded, routing, len(prompt_ids) + len(generation.ids))
        except ValueError as error:
            raise EngineLostError(f"{url} answered with {error}") from error
        return dataclasses.replace(generation, experts=experts)

    async def abort(self, url: str, rid: str) -> None:
        """Tells the engine to give a call up. Best effort: a dead engine has given up."""
        timeout = aiohttp.ClientTimeout(total=self._abort_timeout_s)
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with self._session.post(
                f"{url}/abort_request", json={"rid": rid}, timeout=timeout
            ):
                pass


def parse_generation(answer: Any, url: str) -> Generation:
    """Checks an answer of /generate. Raises EngineLostError when it cannot be trusted."""
    try:
        meta = answer["meta_info"]
        ids = [int(i) for i in answer["output_ids"]]
        pairs = meta.get("output_token_logprobs") or []
        logprobs = [float(pair[0]) for pair in pairs]
        finish = meta["finish_reason"]["type"]
        spans = [
            Span(int(s["version"]), int(s["start"]), int(s["end"]))
            for s in meta.get("weight_versions") or []
        ]
        if not spans:
            spans = [Span(int(meta["weight_version"]), 0, len(ids))]
        queued_s = float(meta.get("queue_time") or 0.0)
        cached = int(meta.get("cached_tokens") or 0)
        latency_s = float(meta.get("first_token_latency") or 0.0)
        first_token_at_s = float(meta["request_received_ts"]) + latency_s if latency_s else 0.0
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise EngineLostError(
            f"{url} answered 200 without what a turn needs: {type(error).__name__}: {error}"
        ) from error
    spans = [s for s in spans if s.end > s.start]
    covered = [position for s in spans for position in range(s.start, s.end)]
    if [int(pair[1]) for pair in pairs] != ids or covered != list(range(len(ids))):
        raise EngineLostError(
            f"{url} answered {len(ids)} ids with {len(pairs)} log-probs and spans {spans}: "
            "they do not belong together"
        )
    if finish not in ("stop", "length", "abort"):
        raise EngineLostError(f"{url} answered with the unknown finish reason {finish!r}")
    return Generation(ids, logprobs, spans, finish, cached, queued_s, first_token_at_s)
