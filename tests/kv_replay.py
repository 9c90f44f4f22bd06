"""Recomputes a session whose KV cache outlived updates: which weights wrote each entry, and what
Transformers' model then gives for every sampled token.

Owner: weight_sync_test. A position's entry is written when the model runs on it, which is when the
token behind it is sampled; a prompt's entries when its turn's first token is. So the version spans of
the turns say which version wrote each entry, unless it was taken from another session's: the
prefix that every session shares is left to the caller. Legend: T tokens of a session.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from transformers import DynamicCache, Qwen3MoeForCausalLM

from proto import trajectory_pb2 as tpb


@dataclass(frozen=True)
class Turn:
    """One turn as its session's tokens."""

    ids: list[int]
    """Prompt and sampled ids, the whole chain."""
    num_prompt: int
    rollout_logprobs: list[float]
    versions: list[int]
    """Of each sampled id."""
    kv_version_lower_bound: int
    engine: str


def turns_of(records: Iterable[tpb.TurnRecord]) -> list[Turn]:
    """The turns of one session without branches, in order."""
    turns: list[Turn] = []
    chain: list[int] = []
    for record in records:
        assert record.history_length == len(chain), "a branch"
        prompt = chain + np.frombuffer(record.prompt_ids, "<i4").tolist()
        sampled = np.frombuffer(record.sampled_ids, "<i4").tolist()
        versions = [
            span.weight_version
            for span in record.version_spans
            for _ in range(span.start, span.end)
        ]
        assert len(versions) == len(sampled)
        chain = prompt + sampled
        turns.append(
            Turn(
                ids=chain,
                num_prompt=len(prompt),
                rollout_logprobs=np.frombuffer(record.rollout_logprobs, "<f4").tolist(),
                versions=versions,
                kv_version_lower_bound=record.kv_version_lower_bound,
                engine=record.engine,
            )
        )
    return turns


def writers(turns: list[Turn]) -> list[list[int]]:
    """For each turn, the version that wrote each entry that it read: T - 1 of them.

    A session that comes to another engine leaves its entries behind.
    """
    result: list[list[int]] = []
    before: list[int] = []
    engine = ""
    for turn in turns:
        kept = before if turn.engine == engine else []
        new = turn.num_prompt - len(kept)
        assert new > 0
        before = kept + [turn.versions[0]] * new + turn.versions[1:]
        result.append(before)
        engine = turn.engine
    return result


@torch.no_grad()
def replay(
    turn: Turn,
    written_by: list[int],
    models: Mapping[int, Qwen3MoeForCausalLM],
    banned: list[int],
) -> list[float]:
    """Rollout minus recomputed log-prob of each sampled id, in nats, where entry i of the cache was
    written by the model of version written_by[i].
    """
    cache = DynamicCache()
    rows = []
    start = 0
    while start < len(written_by):
        end = start
        while end < len(written_by) and written_by[end] == written_by[start]:
            end += 1
        ids = torch.tensor([turn.ids[start:end]])
        model = models[written_by[start]]
        rows.append(model(ids, past_key_values=cache, use_cache=True).logits[0])
        start = end
    logits = torch.cat(rows)[turn.num_prompt - 1 :].float()
    logits[:, banned] = float("-inf")
    logprobs = torch.log_softmax(logits, dim=-1)
    sampled = turn.ids[turn.num_prompt :]
    return [
        theirs - float(row[token])
        for theirs, row, token in zip(turn.rollout_logprobs, logprobs, sampled, strict=True)
    ]
